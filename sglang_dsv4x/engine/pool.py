"""Seam: the KV pool. SGLang's DeepSeekV4TokenToKVPool with our page layouts, our index dtype and the tier.

Nothing about ownership changes: logical locations stay with SGLang's allocator and radix tree. What changes is
where the bytes of C4 main KV are: with the tier on, the C4 pool's device pages are the hot slots of a
`TieredCache`, and its rows live in that cache's host store.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    DeepSeekV4SingleKVPool,
    DeepSeekV4TokenToKVPool,
)
from sglang.srt.runtime_context import get_server_args

from ..config import Dsv4xConfig, load_published
from ..hicache.cache import TieredCache
from ..hicache.host_memory import GIB
from ..hicache.resume_points import ResumePoints
from ..hicache.shape import TierShape
from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, PageLayout, index_layout, main_layout
from .hooks import Seam
from .resume_rows import point_pieces, undefined_pieces


class LaidOutKVPool(DeepSeekV4SingleKVPool):
    """SWA, C4 or C128 rows in pages of a `PageLayout`: the released 584-byte rows, or fp32 for debugging."""

    layout: PageLayout

    def get_bytes_per_token(self) -> int:
        return self.layout.row_bytes

    def _create_buffers(self) -> None:
        self.layout = main_layout(self.page_size, load_published().storage)
        super()._create_buffers()

    def create_buffer(self, *, num_pages: int) -> torch.Tensor:
        self.kv_cache_total_dim = self.layout.row_bytes
        self.bytes_per_page_padded = self.layout.page_bytes
        return torch.zeros(num_pages, self.layout.page_bytes, dtype=self.store_dtype, device=self.device)


class HotC4Pool(LaidOutKVPool):
    """The device pages of the tiered cache, in the place where SGLang expects the C4 pool.

    Indices into it are slots, not logical entries: whoever reads it must have resolved them.
    """

    tier: TieredCache

    def _create_buffers(self) -> None:
        self.layout = main_layout(self.page_size, load_published().storage)
        self.kv_cache_total_dim = self.layout.row_bytes
        self.bytes_per_page_padded = self.layout.page_bytes
        self.kv_buffer: list[torch.Tensor] = []

    def attach(self, tier: TieredCache) -> None:
        self.tier = tier
        self.size = tier.shape.slots
        self.kv_buffer = [tier.device_pages(layer) for layer in range(self.layer_num)]


class LaidOutIndexerPool(DeepSeekV4IndexerPool):
    """C4 index keys, all of them on the device, in the configured dtype."""

    layout: PageLayout

    def get_bytes_per_token(self) -> int:
        return self.layout.row_bytes

    def _create_buffer(self) -> None:
        config = load_published()
        self.layout = index_layout(config.index_dtype, config.storage)
        super()._create_buffer()


class Dsv4xTokenToKVPool(DeepSeekV4TokenToKVPool):
    """SGLang's pool, with `tier` (None when the tier is off) and the layouts that the kernels need."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.config: Dsv4xConfig = load_published()
        self.tier: TieredCache | None = None
        super().__init__(*args, **kwargs)
        if self.config.tier == "on":
            self._attach_tier()
        self.resume_points = self._make_resume_points()

    def _make_kv_pool(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        global_page_size: int,
        cls: type = DeepSeekV4SingleKVPool,
    ) -> DeepSeekV4SingleKVPool:
        if cls is not DeepSeekV4SingleKVPool:
            raise TypeError(
                f"--enable-dsv4x cannot serve with SGLang's {cls.__name__}: drop --enable-hisparse."
            )
        # SWA pages have global_page_size tokens, C4 pages a quarter of that.
        is_c4 = page_size * 4 == global_page_size
        pool_class = HotC4Pool if is_c4 and self.config.tier == "on" else LaidOutKVPool
        return super()._make_kv_pool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_num=layer_num,
            device=device,
            enable_memory_saver=enable_memory_saver,
            global_page_size=global_page_size,
            cls=pool_class,
        )

    def _make_indexer_pool(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        index_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
    ) -> LaidOutIndexerPool:
        return LaidOutIndexerPool(
            size, page_size, dtype, index_head_dim, layer_num, device, enable_memory_saver
        )

    def _attach_tier(self) -> None:
        shape = tier_shape(
            self.config,
            layers=self.c4_kv_pool.layer_num,
            entries=self.c4_logical_size + C4_ENTRIES_PER_PAGE,
            max_requests=self.max_num_reqs,
        )
        self.tier = TieredCache(
            shape,
            self.device,
            checks=self.config.checks == "step",
            copy_timeout_s=self.config.copy_timeout_s,
            copy_delay_s=self.config.copy_delay_ms / 1000,
        )
        self.c4_kv_pool.attach(self.tier)

    def _make_resume_points(self) -> ResumePoints:
        """As many as fit in --dsv4x-resume-memory-gb; none without the radix cache, which owns them."""
        window = self.sliding_window
        pieces = point_pieces(self, window)
        point_bytes = sum(piece.shape[1] for piece in pieces)
        budget = 0 if get_server_args().disable_radix_cache else int(self.config.resume_memory_gb * GIB)
        poisoned = undefined_pieces(self, window) if self.config.checks == "step" else []
        return ResumePoints(pieces, budget // point_bytes, poisoned=poisoned)

    def c4_layer(self, layer_id: int) -> int:
        """Number of a model layer among the C4 layers."""
        return self.layer_mapping[layer_id].compress_layer_id

    def swa_pages(self, layer_id: int) -> torch.Tensor:
        """u8 [pages, page_bytes] of the layer's SWA rows."""
        return self.swa_kv_pool.kv_buffer[self._swa_local_layer_id(layer_id)]

    def compressed_pages(self, layer_id: int) -> torch.Tensor:
        """u8 [pages, page_bytes] of the layer's C4 rows (hot slots when the tier is on) or C128 rows."""
        _, number, pool = self.layer_mapping[layer_id]
        return pool.kv_buffer[number]

    def compressed_layout(self, layer_id: int) -> PageLayout:
        return self.layer_mapping[layer_id].compress_kv_pool.layout


def tier_shape(config: Dsv4xConfig, *, layers: int, entries: int, max_requests: int) -> TierShape:
    """The tier's sizes for this server; hot entries default to twice the bound below which a step could fail."""
    server_args = get_server_args()
    top_k = int(server_args.get_model_config().hf_text_config.index_topk)

    def shape(slots: int) -> TierShape:
        return TierShape(
            layers=layers,
            entries=entries,
            slots=slots,
            unit=config.fetch_unit,
            layout=main_layout(C4_ENTRIES_PER_PAGE, config.storage),
            top_k=top_k,
            max_requests=max_requests,
            chunk_tokens=server_args.chunked_prefill_size,
        )

    # More slots than there are entries would never be filled.
    default = min(2 * shape(0).bound, max(entries, shape(0).bound))
    return shape(config.hot_entries if config.hot_entries is not None else default)


SEAMS = [
    Seam(
        path="sglang.srt.mem_cache.kv_cache_configurator.DeepSeekV4TokenToKVPool",
        signature="class (self, max_num_reqs, swa_size, c4_size, c128_size, c4_state_pool_size, "
        "c128_state_pool_size, page_size, swa_page_size, dtype, c4_state_dtype, c128_state_dtype, "
        "qk_nope_head_dim, qk_rope_head_dim, indexer_head_dim, layer_num, device, enable_memory_saver, "
        "compression_ratios, sliding_window=..., start_layer=..., end_layer=..., enable_hisparse=..., "
        "online_mtp_max_draft_tokens=..., num_req_slots=...)",
        kind="replace",
        reason="the pool is built by name from this module; ours adds the tier and the index dtype",
        hook=Dsv4xTokenToKVPool,
    ),
    Seam(
        path="sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool._make_kv_pool",
        signature="(self, *, size, page_size, dtype, layer_num, device, enable_memory_saver, global_page_size, "
        "cls=...)",
        kind="read",
        reason="overridden by our pool to choose the class of the C4 pool",
    ),
    Seam(
        path="sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool._make_indexer_pool",
        signature="(self, size, page_size, dtype, index_head_dim, layer_num, device, enable_memory_saver)",
        kind="read",
        reason="overridden by our pool for the MXFP4 index rows",
    ),
    Seam(
        path="sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool.create_buffer",
        signature="(self, *, num_pages)",
        kind="read",
        reason="overridden by our pools for the page layout",
    ),
    Seam(
        path="sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4IndexerPool._create_buffer",
        signature="(self)",
        kind="read",
        reason="overridden by our index pool for the row size",
    ),
]
