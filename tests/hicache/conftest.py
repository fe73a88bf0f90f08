"""Small tiers for the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from sglang_dsv4x.hicache import TieredCache, TierShape
from sglang_dsv4x.jit_kernels.layouts import PageLayout, main_layout
from sglang_dsv4x.jit_kernels.registry import select

SMALL = PageLayout(64, 24, 8)
"""Rows of 32 bytes: the arithmetic of the released layout with less to move."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_cache() -> Iterator[Callable[..., TieredCache]]:
    """make_cache(unit=..., ...) -> TieredCache with checks; everything made is closed afterwards."""
    made: list[TieredCache] = []

    def make(
        *,
        unit: int = 2,
        layers: int = 2,
        pages: int = 16,
        top_k: int = 8,
        max_requests: int = 2,
        chunk_tokens: int = 64,
        extra_slots: int = 0,
        layout: PageLayout | None = None,
        checks: bool = True,
        copy_timeout_s: float = 20,
        copy_delay_s: float = 0,
        device: str = "cpu",
        kernels: str = "auto",
        fetch_at_once: bool = False,
    ) -> TieredCache:
        shape = TierShape(
            layers=layers,
            entries=pages * 64,
            slots=unit * (max_requests * (top_k + 2) + -(-chunk_tokens // 4)) + extra_slots,
            unit=unit,
            layout=main_layout(64) if layout is None else layout,
            top_k=top_k,
            max_requests=max_requests,
            chunk_tokens=chunk_tokens,
        )
        cache = TieredCache(
            shape,
            device,
            checks=checks,
            copy_timeout_s=copy_timeout_s,
            copy_delay_s=copy_delay_s,
            kernels=select(kernels, torch.device(device)),
            fetch_at_once=fetch_at_once,
        )
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def small_layout() -> PageLayout:
    return SMALL
