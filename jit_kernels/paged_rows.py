"""Rows in and out of paged caches: one entry's values and scales, put together.

Layout of a page (`PageLayout`): all values, then all scales, then padding. Entry `loc` lies in page `loc //
entries`; its values start at byte `loc % entries * value_bytes`, its scales at `entries * value_bytes + loc %
entries * scale_bytes` (sglang 0.5.17 `kernels/jit/include/sgl_kernel/deepseek_v4/kvcacheio.cuh`:
kScaleOffset).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .layouts import PageLayout


class _Piece(NamedTuple):
    """Where one piece (values or scales) of an entry lies, in pieces from the start of the buffer."""

    width: int
    per_page: int
    first: int


@lru_cache
def _pieces(layout: PageLayout) -> tuple[_Piece, ...] | None:
    """The pieces of `layout` if a page is a whole number of each, so that the buffer is a plain table of
    pieces.

    Every released layout is (576-byte alignment is 576-byte values), and then a piece moves as one memcpy.
    """
    found = []
    for start, width in ((0, layout.value_bytes), (layout.entries * layout.value_bytes, layout.scale_bytes)):
        if width == 0:
            continue
        if layout.page_bytes % width or start % width:
            return None
        found.append(_Piece(width, layout.page_bytes // width, start // width))
    return tuple(found)


@lru_cache
def _word(layout: PageLayout) -> torch.dtype:
    """The widest integer that divides every offset in a page: CPU scatters go word by word."""
    sizes = (layout.value_bytes, layout.scale_bytes, layout.page_bytes)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(size % dtype.itemsize == 0 for size in sizes):
            return dtype
    return torch.uint8


def _check(pages: torch.Tensor, layout: PageLayout) -> None:
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != layout.page_bytes:
        raise ValueError(
            f"pages must be uint8 [P, {layout.page_bytes}], not {pages.dtype} {list(pages.shape)}"
        )
    if not pages.is_contiguous():
        raise ValueError("pages must be contiguous")


def _split(pages: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Strided views of all values [P, entries, value_bytes] and all scales [P, entries, scale_bytes]."""
    values = layout.entries * layout.value_bytes
    scales = layout.entries * layout.scale_bytes
    return (
        pages[:, :values].unflatten(1, (layout.entries, layout.value_bytes)),
        pages[:, values : values + scales].unflatten(1, (layout.entries, layout.scale_bytes)),
    )


def gather_rows(pages: torch.Tensor, layout: PageLayout, locs: torch.Tensor) -> torch.Tensor:
    """Reads entries as rows: value bytes, then scale bytes.

    Args:
        pages: u8 [P, page_bytes], contiguous.
        locs: int64 [N], entry numbers in [0, P * entries).
    Returns: u8 [N, row_bytes], a copy.
    Raises: ValueError for pages of another layout; IndexError for a location outside (torch, CPU).
    """
    _check(pages, layout)
    page = locs // layout.entries
    offset = locs - page * layout.entries
    pieces = _pieces(layout)
    if pieces is None:
        values, scales = _split(pages, layout)
        return torch.cat([values[page, offset], scales[page, offset]], 1)
    rows = torch.empty((locs.shape[0], layout.row_bytes), dtype=torch.uint8, device=pages.device)
    column = 0
    for width, per_page, first in pieces:
        index = page * per_page + (offset + first)
        torch.index_select(pages.view(-1, width), 0, index, out=rows[:, column : column + width])
        column += width
    return rows


def scatter_rows(pages: torch.Tensor, layout: PageLayout, locs: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows into their entries in place; the inverse of `gather_rows`.

    Args:
        pages: u8 [P, page_bytes], contiguous; modified.
        locs: int64 [N]; a location named twice keeps one of its rows.
        rows: u8 [N, row_bytes].
    Raises: ValueError for pages or rows of another layout; IndexError for a location outside (torch, CPU).
    """
    _check(pages, layout)
    if rows.dtype != torch.uint8 or rows.shape != (locs.shape[0], layout.row_bytes):
        raise ValueError(
            f"rows must be uint8 [{locs.shape[0]}, {layout.row_bytes}], not {rows.dtype} {list(rows.shape)}"
        )
    page = locs // layout.entries
    offset = locs - page * layout.entries
    pieces = _pieces(layout)
    if pieces is None:
        values, scales = _split(pages, layout)
        values[page, offset] = rows[:, : layout.value_bytes]
        scales[page, offset] = rows[:, layout.value_bytes :]
        return
    word = _word(layout)
    wide_pages, wide_rows = _words(pages, word), _words(_source(rows, word), word)
    column = 0
    for width, per_page, first in pieces:
        index = page * per_page + (offset + first)
        words = width // word.itemsize
        wide_pages.view(-1, words).index_copy_(0, index, wide_rows[:, column : column + words])
        column += words


def copy_rows(target: torch.Tensor, locs: torch.Tensor, rows: torch.Tensor) -> None:
    """target[locs] = rows for plain rows: target u8 [E, B], contiguous, modified; locs int64 [N]; rows u8 [N,
    B].

    Word by word where the row size allows: torch's CPU scatter of single bytes is eight times slower.
    """
    word = torch.int64 if target.shape[1] % 8 == 0 else torch.uint8
    _words(target, word).index_copy_(0, locs, _words(_source(rows, word), word))


def _source(rows: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """`rows`, copied if its bytes do not start on a word."""
    aligned = rows.is_contiguous() and rows.storage_offset() % word.itemsize == 0
    return rows if aligned else rows.clone(memory_format=torch.contiguous_format)


def _words(rows: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """A view of the bytes [N, B] as words [N, B / itemsize]."""
    if rows.storage_offset() % word.itemsize:
        raise ValueError(f"a buffer of pages or rows must start at a multiple of {word.itemsize} bytes")
    if rows.shape[0] <= 1:
        # torch calls one row, or none, contiguous whatever the stride, and then refuses to view it as wider words.
        return rows.reshape(-1).view(word).view(rows.shape[0], rows.shape[1] // word.itemsize)
    return rows.view(word)
