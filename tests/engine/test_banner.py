"""The start-up banner's numbers are those of the buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang_dsv4x.hicache.shape import TierShape
from sglang_dsv4x.jit_kernels.layouts import PageLayout, index_layout, main_layout

from sglang_dsv4x.config import Dsv4xConfig
from sglang_dsv4x.engine.banner import banner, pool_lines

SHAPE = TierShape(
    layers=2, entries=640, slots=128, unit=2, layout=main_layout(64), top_k=8, max_requests=1, chunk_tokens=64
)


def pages(count: int, layers: int, layout: PageLayout) -> list[torch.Tensor]:
    return [torch.zeros(count, layout.page_bytes, dtype=torch.uint8) for _ in range(layers)]


def pool(tier: bool) -> Any:
    window, c4, c128, index = main_layout(256), main_layout(64), main_layout(2), index_layout("fp4")
    state = SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(8, 16)))
    return SimpleNamespace(
        config=Dsv4xConfig(enable=True, tier="on" if tier else "off", host_memory_gb=2),
        device="cpu",
        tier=SimpleNamespace(shape=SHAPE) if tier else None,
        swa_kv_pool=SimpleNamespace(kv_buffer=pages(3, 5, window), layout=window),
        c4_kv_pool=SimpleNamespace(kv_buffer=pages(10, 2, c4), layout=c4),
        c128_kv_pool=SimpleNamespace(kv_buffer=pages(10, 1, c128), layout=c128),
        c4_indexer_kv_pool=SimpleNamespace(index_k_with_scale_buffer=pages(10, 2, index), layout=index),
        resume_points=SimpleNamespace(capacity=3, point_bytes=1000, host_bytes=3000),
        compress_state_pools=[None, state],
        indexer_compress_state_pools=[None, state],
    )


def test_each_pool_is_listed_with_the_bytes_of_its_buffers() -> None:
    lines = {line.name: line for line in pool_lines(pool(tier=False))}
    assert lines["C4 KV"][1:] == ("cpu", 640, 2, 584, 2 * 10 * 37440)
    assert lines["C4 index keys"][1:] == ("cpu", 640, 2, 68, 2 * 10 * 64 * 68)
    assert lines["window KV"].entries == 3 * 256
    assert lines["C128 KV"].entries == 20
    assert lines["compressor state"].total_bytes == 2 * 8 * 16 * 4


def test_with_the_tier_on_c4_is_hot_slots_and_host_rows() -> None:
    lines = {line.name: line for line in pool_lines(pool(tier=True))}
    assert "C4 KV" not in lines
    assert lines["C4 KV, hot"][1:] == ("cpu", 128, 2, 584, 2 * 2 * 37440)
    assert lines["C4 KV, all"][1:] == ("host", 640, 2, 584, 2 * 640 * 584)


def test_the_text_says_what_serves_what_is_clamped_and_what_is_refused() -> None:
    text = banner(pool(tier=True), tokens=2304, seams=45, sizing="tokens limited by x")
    for words in (
        "45 seams as expected",
        "tier on: 2304 tokens; 128 hot entries per layer (smallest that fits every step: 52), fetched by 2",
        "--dsv4x-host-memory-gb: 2 GiB",
        "tokens limited by x",
        "refused for now: --enable-hisparse",
    ):
        assert words in text
    assert "tier off: all C4 KV of 2304 tokens is resident" in banner(
        pool(tier=False), tokens=2304, seams=45, sizing="tokens limited by x"
    )
