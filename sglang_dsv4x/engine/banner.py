"""Seam: what a server says about itself at start, once its pools exist."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import sglang
import torch

from .. import __version__
from ..config import Dsv4xConfig
from ..hicache.host_memory import host_memory
from ..hicache.shape import TierShape
from . import refusals
from .hooks import Seam
from .pool import Dsv4xTokenToKVPool
from .sizing import check_server, describe

logger = logging.getLogger(__name__)


class PoolLine(NamedTuple):
    """One pool. `entry_bytes` counts one layer, padding of pages left out; `total_bytes` counts everything."""

    name: str
    where: str
    entries: int
    """Per layer."""
    layers: int
    entry_bytes: int
    total_bytes: int


def pool_lines(pool: Dsv4xTokenToKVPool) -> list[PoolLine]:
    """Every buffer of the KV pool, measured on the buffers themselves."""
    device = str(pool.device)
    index = pool.c4_indexer_kv_pool
    index_buffers = index.index_k_with_scale_buffer
    lines = [
        _paged("window KV", device, pool.swa_kv_pool.kv_buffer, pool.swa_kv_pool.layout),
        _paged("C128 KV", device, pool.c128_kv_pool.kv_buffer, pool.c128_kv_pool.layout),
        _paged("C4 index keys", device, index_buffers, index.layout),
    ]
    if pool.tier is None:
        lines.append(_paged("C4 KV", device, pool.c4_kv_pool.kv_buffer, pool.c4_kv_pool.layout))
    else:
        shape = pool.tier.shape
        row = shape.layout.row_bytes
        lines += [
            PoolLine("C4 KV, hot", device, shape.slots, shape.layers, row, shape.hot_bytes),
            PoolLine("C4 KV, tables", device, shape.units, shape.layers, 0, shape.table_bytes),
            PoolLine("C4 KV, all", "host", shape.entries, shape.layers, row, shape.host_bytes),
        ]
    points = pool.resume_points
    lines.append(PoolLine("resume points", "host", points.capacity, 1, points.point_bytes, points.host_bytes))
    states = [
        state.kv_score_buffer.kv_score
        for state in [*pool.compress_state_pools, *pool.indexer_compress_state_pools]
        if state is not None
    ]
    lines.append(PoolLine("compressor state", device, 0, len(states), 0, _bytes(states)))
    return lines


def _paged(name: str, device: str, buffers: list[torch.Tensor], layout: Any) -> PoolLine:
    entries = buffers[0].shape[0] * layout.entries if buffers else 0
    return PoolLine(name, device, entries, len(buffers), layout.row_bytes, _bytes(buffers))


def _bytes(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def banner(pool: Dsv4xTokenToKVPool, tokens: int, seams: int, sizing: str) -> str:
    """The text. `tokens` is max_total_num_tokens after every limit, `sizing` says which one bound; `seams` were
    checked."""
    config = pool.config
    lines = [
        f"sglang-dsv4x {__version__} on SGLang {sglang.__version__}, torch {torch.__version__}: "
        f"{seams} seams as expected, kernels {config.kernels}, checks {config.checks}, storage {config.storage}",
        f"  {'pool':<17} {'where':<7} {'layers':>6} {'entries/layer':>13} {'B/entry':>8} {'MiB':>10}",
    ]
    lines += [
        f"  {line.name:<17} {line.where:<7} {line.layers:>6} {line.entries or '-':>13} "
        f"{line.entry_bytes or '-':>8} {line.total_bytes / 2**20:>10.1f}"
        for line in pool_lines(pool)
    ]
    lines.append(f"  {_tier_line(config, pool.tier.shape if pool.tier is not None else None, tokens)}")
    lines.append(f"  {sizing}")
    lines.append(f"  refused for now: {refusals.describe()}")
    return "\n".join(lines)


def _tier_line(config: Dsv4xConfig, shape: TierShape | None, tokens: int) -> str:
    if shape is None:
        return f"tier off: all C4 KV of {tokens} tokens is resident"
    cap = "none given" if config.host_memory_gb is None else f"{config.host_memory_gb:g} GiB"
    return (
        f"tier on: {tokens} tokens; {shape.slots} hot entries per layer (smallest that fits every step: "
        f"{shape.bound}), fetched by {shape.unit}; host {shape.host_bytes / 2**30:.2f} GiB "
        f"(--dsv4x-host-memory-gb: {cap}), {host_memory().free / 2**30:.2f} GiB left"
    )


def announce(result: Any, self: Any, *_: Any, **__: Any) -> None:
    """After SGLang has built its pools: their bytes are checked, and the banner goes to the log.

    Raises: AllocationError when pools hold other bytes than they were charged.
    """
    from .seams import engine_seams

    pool = result.token_to_kv_pool
    if isinstance(pool, Dsv4xTokenToKVPool):
        check_server(result, self)
        sizing = describe(result.memory_pool_config)
        logger.info("%s", banner(pool, result.max_total_num_tokens, len(engine_seams()), sizing))


SEAMS = [
    Seam(
        path="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
        signature="(self, *, pre_model_load_memory)",
        kind="after",
        reason="the start-up banner, when all pools and sizes are known",
        hook=announce,
    ),
]
