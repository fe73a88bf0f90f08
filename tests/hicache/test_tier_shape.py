"""Sizes, the bound, and what is refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sglang_dsv4x.hicache import TieredCache, TierError, TierShape
from sglang_dsv4x.jit_kernels.layouts import main_layout

SHAPE = TierShape(
    layers=3,
    entries=64 * 10,
    slots=2 * (8 * 66 + 64),
    unit=2,
    layout=main_layout(64),
    top_k=64,
    max_requests=8,
    chunk_tokens=256,
)


def test_bound_is_a_unit_for_each_selection_two_per_request_and_the_chunk() -> None:
    assert SHAPE.bound == 2 * (8 * (64 + 2) + 256 // 4) == SHAPE.slots
    assert replace(SHAPE, chunk_tokens=257).bound == SHAPE.bound + 2
    SHAPE.check()


def test_fewer_slots_than_the_bound_are_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(TierError, match=r"--dsv4x-hot-entries is 1183.*Give at least 1184"):
        replace(SHAPE, slots=1183).check()
    with pytest.raises(TierError, match="--dsv4x-hot-entries"):
        TieredCache(replace(SHAPE, slots=1183), "cpu", checks=False, copy_timeout_s=1)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"unit": 3}, "--dsv4x-fetch-unit"),
        ({"entries": 64}, "--max-total-tokens"),
        ({"entries": 100}, "--max-total-tokens"),
        ({"chunk_tokens": -1}, "--chunked-prefill-size"),
        ({"layers": 0}, "at least one C4 layer"),
        ({"layout": main_layout(256)}, "64 entries"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change: dict[str, int], names: str) -> None:
    with pytest.raises(TierError, match=names):
        replace(SHAPE, **change).check()


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_bytes_are_those_of_the_tensors(unit: int, make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(unit=unit, extra_slots=5)
    assert cache.shape.host_bytes == cache._store.rows.numel()
    assert cache.shape.hot_bytes == cache._pages.numel()
    assert cache.shape.table_bytes == sum(table.numel() * table.itemsize for table in cache._tables.tensors)
    assert cache.shape.groups == cache.shape.slots // unit
