"""Bytes of the buffers that a server really holds, against those of the byte model (`capacity/byte_model.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..capacity.byte_model import ObjectBytes
from ..hicache.cache import TieredCache
from .pool import Dsv4xTokenToKVPool

TOLERANCE = 0.01
"""Of an object's bytes, between predicted and allocated."""

SLACK = 1 << 16
"""Bytes of an object that need not be predicted: single words, and counts per block of a kernel."""


class AllocationError(RuntimeError):
    """Objects hold other bytes than they were charged; the message names them."""


def allocated_bytes(pool: Dsv4xTokenToKVPool, allocator: Any, req_to_token_pool: Any) -> dict[str, int]:
    """Measured on the tensors, by the byte model's names.

    `allocator`: SWATokenToKVPoolAllocator, `req_to_token_pool`: ReqToTokenPool, as at start, with every page free.
    """
    states: dict[int, list[torch.Tensor]] = {4: [], 128: []}
    for state in [*pool.compress_state_pools, *pool.indexer_compress_state_pools]:
        if state is not None:
            states[state.ratio].append(state.kv_score_buffer.kv_score)
    points = pool.resume_points._mapping
    found = {
        "resume points": 0 if points is None else points.data.nbytes,
        "window KV": _bytes(pool.swa_kv_pool.kv_buffer),
        "C128 KV": _bytes(pool.c128_kv_pool.kv_buffer),
        "C4 index keys": _bytes(pool.c4_indexer_kv_pool.index_k_with_scale_buffer),
        "C4 compressor state": _bytes(states[4]),
        "C128 compressor state": _bytes(states[128]),
        "request table": req_to_token_pool.req_to_token.nbytes,
        "location tables": _bytes(
            [
                allocator.full_to_swa_index_mapping,
                allocator.full_attn_allocator.free_pages,
                allocator.swa_attn_allocator.free_pages,
            ]
        ),
    }
    if pool.tier is None:
        found["C4 KV"] = _bytes(pool.c4_kv_pool.kv_buffer)
    else:
        found.update(_tier_bytes(pool.tier))
    return found


def check_allocation(predicted: list[ObjectBytes], held: dict[str, int]) -> None:
    """Raises AllocationError, naming each, when objects hold other bytes than predicted, by more than `TOLERANCE`."""
    expected = {item.name: item.bytes for item in predicted if not item.staging}
    wrong = [
        f"{name} {expected.get(name, 0)} predicted, {held.get(name, 0)} allocated"
        for name in sorted(expected.keys() | held.keys())
        if abs(held.get(name, 0) - expected.get(name, 0)) > max(SLACK, TOLERANCE * expected.get(name, 0))
    ]
    if wrong:
        raise AllocationError(
            f"Allocated bytes are not the predicted ones: {'; '.join(wrong)}. The server would accept more "
            "tokens than it holds, or fewer: run `sglang-dsv4x check`, which says whether this SGLang is a tested one."
        )


def _tier_bytes(tier: TieredCache) -> dict[str, int]:
    tables = [field for field in tier._tables if isinstance(field, torch.Tensor)]
    found = {
        "C4 KV, hot": tier._pages.nbytes,
        "C4 KV, tables": _bytes(tables),
        "C4 KV, all": tier._store.rows.nbytes,
    }
    if tier._tables.scratch is not None:
        found["C4 KV, scratch"] = _bytes(
            field for field in tier._tables.scratch if field.device.type == "cuda"
        )
    if tier._shadow is not None:
        found["C4 KV, shadow"] = tier._shadow.rows.nbytes + tier._shadow.written.nbytes
    return found


def _bytes(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
