"""Bytes of the buffers that a server really holds, under the names of the byte model (`capacity/byte_model.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..hicache.cache import TieredCache
from .pool import Dsv4xTokenToKVPool


def allocated_bytes(pool: Dsv4xTokenToKVPool, allocator: Any, req_to_token_pool: Any) -> dict[str, int]:
    """Measured on the tensors. `allocator`: SWATokenToKVPoolAllocator, `req_to_token_pool`: ReqToTokenPool, both
    as they are at start, with every page free."""
    states: dict[int, list[torch.Tensor]] = {4: [], 128: []}
    for state in [*pool.compress_state_pools, *pool.indexer_compress_state_pools]:
        if state is not None:
            states[state.ratio].append(state.kv_score_buffer.kv_score)
    found = {
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


def _tier_bytes(tier: TieredCache) -> dict[str, int]:
    tables = [field for field in tier._tables if isinstance(field, torch.Tensor)]
    found = {
        "C4 KV, hot": tier._pages.nbytes,
        "C4 KV, tables": _bytes(tables),
        "C4 KV, all": tier._store.rows.nbytes,
    }
    if tier._shadow is not None:
        found["C4 KV, shadow"] = tier._shadow.rows.nbytes + tier._shadow.written.nbytes
    return found


def _bytes(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
