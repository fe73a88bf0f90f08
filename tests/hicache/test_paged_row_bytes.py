"""Rows in and out of pages, against a reading of the layout byte by byte."""

from __future__ import annotations

import pytest
import torch
from sglang_dsv4x.jit_kernels.layouts import PageLayout, index_layout, main_layout
from sglang_dsv4x.jit_kernels.paged_rows import copy_rows, gather_rows, scatter_rows

LAYOUTS = {
    "C4 main": main_layout(64),
    "SWA": main_layout(256),
    "C128": main_layout(2),
    "fp32": main_layout(64, "float32"),
    "MXFP4 index": index_layout("fp4"),
    "FP8 index": index_layout("fp8"),
    "pieces that do not divide the page": PageLayout(5, 10, 3, alignment=7),
}


def bytes_of(pages: torch.Tensor, layout: PageLayout, loc: int) -> bytes:
    page = bytes(pages[loc // layout.entries].tolist())
    at, scales = loc % layout.entries, layout.entries * layout.value_bytes
    return (
        page[at * layout.value_bytes : (at + 1) * layout.value_bytes]
        + page[scales + at * layout.scale_bytes : scales + (at + 1) * layout.scale_bytes]
    )


def test_the_c4_page_is_37440_bytes_and_its_row_584() -> None:
    layout = main_layout(64)
    assert (layout.page_bytes, layout.row_bytes) == (37440, 584)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gathered_rows_are_value_bytes_then_scale_bytes(layout: PageLayout) -> None:
    pages = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    locs = torch.randint(0, 4 * layout.entries, (50,))
    rows = gather_rows(pages, layout, locs)
    for loc, row in zip(locs.tolist(), rows, strict=True):
        assert bytes(row.tolist()) == bytes_of(pages, layout, loc)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_scattered_rows_change_their_own_bytes_only(layout: PageLayout) -> None:
    pages = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    before = pages.clone()
    locs = torch.randperm(4 * layout.entries)[: 2 * layout.entries]
    rows = torch.randint(0, 256, (len(locs) + 1, layout.row_bytes), dtype=torch.uint8)[1:]
    scatter_rows(pages, layout, locs, rows)
    assert torch.equal(gather_rows(pages, layout, locs), rows)
    others = torch.tensor(sorted(set(range(4 * layout.entries)) - set(locs.tolist())))
    assert torch.equal(gather_rows(pages, layout, others), gather_rows(before, layout, others))
    padding = layout.entries * layout.row_bytes
    assert torch.equal(pages[:, padding:], before[:, padding:])


def test_no_locations_move_nothing() -> None:
    layout = main_layout(64)
    pages = torch.randint(0, 256, (1, layout.page_bytes), dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    assert gather_rows(pages, layout, none).shape == (0, 584)
    before = pages.clone()
    scatter_rows(pages, layout, none, torch.empty((0, 584), dtype=torch.uint8))
    assert torch.equal(pages, before)


@pytest.mark.parametrize("row_bytes", [584, 13])
def test_copy_rows_takes_rows_that_start_anywhere(row_bytes: int) -> None:
    target = torch.zeros((9, row_bytes), dtype=torch.uint8)
    buffer = torch.randint(0, 256, (3 * row_bytes + 1,), dtype=torch.uint8)
    rows = buffer[1:].view(3, row_bytes)
    copy_rows(target, torch.tensor([8, 0, 4]), rows)
    assert torch.equal(target[[8, 0, 4]], rows)
    assert not target[[1, 2, 3, 5, 6, 7]].any()


def test_pages_and_rows_of_another_layout_are_refused() -> None:
    layout = main_layout(64)
    pages = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)
    loc = torch.tensor([0])
    with pytest.raises(ValueError, match="37440"):
        gather_rows(pages[:, :-576], layout, loc)
    with pytest.raises(ValueError, match="584"):
        scatter_rows(pages, layout, loc, torch.zeros((1, 576), dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        gather_rows(torch.zeros((4, layout.page_bytes), dtype=torch.uint8)[::2], layout, loc)
    with pytest.raises(IndexError):
        gather_rows(pages, layout, torch.tensor([128]))


@pytest.mark.parametrize("count", [0, 1])
def test_at_most_one_row_with_an_odd_stride_is_written(count: int) -> None:
    """Bug: one fp32 index key, or none, made by a transpose has stride 1; torch calls it contiguous, and viewing its
    bytes as words raised "stride(0) must be divisible by 8". Shows without the flattening in `_words`."""
    layout = LAYOUTS["fp32"]
    pages = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    rows = torch.arange(512 * count, dtype=torch.float32).view(512, count).T.view(torch.uint8)
    scatter_rows(pages, layout, torch.tensor([3] * count, dtype=torch.int64), rows)
    assert bytes_of(pages, layout, 3) == (bytes(rows[0].tolist()) if count else bytes(2048))
