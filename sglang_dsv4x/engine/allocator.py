"""Seam: the allocator. It stays SGLang's; we only learn of a flush and, under --dsv4x-checks step, of freed pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

from ..hicache.cache import TieredCache
from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE
from .hooks import Seam
from .pool import Dsv4xTokenToKVPool


def on_clear(result: None, self: SWATokenToKVPoolAllocator) -> None:
    """A flush frees every location, so the tier forgets every entry, on the forward stream."""
    tier = getattr(self._kvcache, "tier", None)
    if tier is not None:
        tier.reset()


def watch_allocator(allocator: Any, *_: Any, **__: Any) -> Any:
    """Checks that SGLang built what the tier's ownership rests on; under checks, watches freed pages."""
    if not isinstance(allocator, SWATokenToKVPoolAllocator):
        raise TypeError(
            f"--enable-dsv4x needs SGLang's SWATokenToKVPoolAllocator, found {type(allocator).__name__}. Run "
            "`sglang-dsv4x check`."
        )
    pool = allocator.get_kvcache()
    if not isinstance(pool, Dsv4xTokenToKVPool):
        raise TypeError(
            f"--enable-dsv4x: the KV pool is {type(pool).__name__}, not ours. Run `sglang-dsv4x check`."
        )
    if pool.tier is not None and pool.config.checks == "step":
        full = allocator.full_attn_allocator
        full._release_page_ids = forgetting(full._release_page_ids, pool.tier)
    return allocator


def forgetting(release: Callable[..., None], tier: TieredCache) -> Callable[..., None]:
    """`release`, but the tier first poisons the C4 entries of the freed full pages."""

    def release_and_forget(*page_ids: torch.Tensor) -> None:
        pages = torch.cat([ids.reshape(-1) for ids in page_ids])
        offsets = torch.arange(C4_ENTRIES_PER_PAGE, device=pages.device)
        tier.forget((pages.unsqueeze(1) * C4_ENTRIES_PER_PAGE + offsets).flatten())
        release(*page_ids)

    return release_and_forget


SEAMS = [
    Seam(
        path="sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.clear",
        signature="(self)",
        kind="after",
        reason="flush_cache and weight updates empty the tier",
        hook=on_clear,
    ),
    Seam(
        path="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator",
        signature="(self, *, sizes, token_to_kv_pool, is_dsv4_model, req_to_token_pool, token_to_kv_pool_allocator)",
        kind="after",
        reason="the tier's ownership rests on this allocator; under checks it reports freed pages",
        hook=watch_allocator,
    ),
    Seam(
        path="sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids",
        signature="(self, *page_ids)",
        kind="read",
        reason="the one place where full pages are freed, watched under --dsv4x-checks step",
    ),
]
