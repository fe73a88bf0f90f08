"""The attention backend "dsv4": SGLang's, with our kernels and the tier between top-k and attention.

Per C4 layer: indexer (score, top-k) -> core compressor (store, write-through) -> resolve, fetch on the copy
stream -> wait -> one attention call over window and selected rows. One call over all rows after the wait keeps
the bits of the tier-off run.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.layers.attention.dsv4.compressor import Compressor
from sglang.srt.layers.attention.dsv4.indexer import C4Indexer
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from ..config import load_published
from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, PageLayout
from ..jit_kernels.paged_rows import gather_rows, scatter_rows
from ..jit_kernels.registry import select
from .pool import Dsv4xTokenToKVPool
from .step import RowList, Step, describe_step, list_rows, recently_used


class Selection:
    """Entries that a C4 layer's indexer selected for every query of this step."""

    def __init__(self, entries: torch.Tensor, positions: torch.Tensor) -> None:
        self.entries = entries  # i32 [T, K] logical entries, -1 is none
        self.positions = positions  # i32 [T, K] the same, counted in the request
        self.slots: torch.Tensor | None = None  # i32 [T, K], once resolved (decode with the tier on)


class Dsv4xAttnBackend(DeepseekV4AttnBackend):
    """Serves with the kernels of `--dsv4x-kernels` on the real byte layouts of `Dsv4xTokenToKVPool`."""

    token_to_kv_pool: Dsv4xTokenToKVPool

    def __init__(self, model_runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        if not isinstance(self.token_to_kv_pool, Dsv4xTokenToKVPool):
            raise TypeError(
                f"--enable-dsv4x: the KV pool is {type(self.token_to_kv_pool).__name__}, not ours; another plug-in "
                "replaced it. Run `sglang-dsv4x check`."
            )
        self.config = load_published()
        self.kernels = select(self.config.kernels, self.device)
        self.tier = self.token_to_kv_pool.tier
        self.step: Step | None = None
        self._selections: dict[int, Selection] = {}
        self._c128_rows: RowList | None = None

    # ---- once a step

    def init_forward_metadata_indexer(
        self, core_attn_metadata: Any, *, use_prefill_cuda_graph: bool = False
    ) -> None:
        """SGLang's DeepGEMM schedule is not needed: `index_scores` works from the page table."""
        return None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._selections.clear()
        self._c128_rows = None
        self.step = None
        if forward_batch.forward_mode.is_idle():
            return
        core = self.forward_metadata.core_attn_metadata
        self.step = describe_step(core, forward_batch)
        if self.tier is not None:
            if self.config.checks == "step":
                # What the last step left, and what was freed since; nothing of this step has begun.
                self.tier.check_integrity()
            self.tier.begin_step(core.c4_out_loc, recently_used(core, forward_batch, self.step, self.c4_topk))

    # ---- compressors

    def forward_unified(
        self, x: torch.Tensor, forward_batch: ForwardBatch, layer_id: int, compressor: Compressor
    ) -> None:
        """Completes entries of one compressor (C4, C128 or indexer), stores them and keeps its state."""
        if forward_batch.forward_mode.is_idle():
            return
        pool, kernels = self.token_to_kv_pool, self.kernels
        plan = self._get_paged_compress_metadata(compressor.ratio)
        kv_score = F.linear(x.float(), compressor.wkv_gate.weight.float())
        state = compressor.get_state_pool(self).kv_score_buffer.kv_score
        made = kernels.compress(
            kv_score,
            state,
            compressor.ape.view(-1, compressor.head_dim),
            compressor.norm.weight,
            compressor.norm.variance_epsilon,
            compressor.freqs_cis,
            plan,
        )
        kernels.write_state(state, kv_score, plan)
        locations = self._get_out_loc(compressor.ratio)[made.tokens]
        if compressor.is_in_indexer:
            rows = kernels.pack_index_rows(
                kernels.hadamard(made.entries), self.config.index_dtype, self.config.storage
            )
            index_pool = pool.c4_indexer_kv_pool
            pages = index_pool.index_k_with_scale_buffer[pool.c4_layer(layer_id)]
            scatter_rows(pages, index_pool.layout, locations, rows)
            return
        rows = kernels.pack_kv_rows(made.entries, self.config.storage)
        if compressor.ratio == 4 and self.tier is not None:
            self.tier.write(pool.c4_layer(layer_id), locations, rows)
        else:
            scatter_rows(pool.compressed_pages(layer_id), pool.compressed_layout(layer_id), locations, rows)

    def forward_indexer_compressor(
        self, x: torch.Tensor, forward_batch: ForwardBatch, layer_id: int, compressor: Compressor
    ) -> None:
        self.forward_unified(x, forward_batch, layer_id, compressor)

    def forward_core_compressor(
        self, x: torch.Tensor, forward_batch: ForwardBatch, layer_id: int, compressor: Compressor
    ) -> None:
        """Stores the layer's entries; in decode with the tier on, then resolves its selection and starts the fetch."""
        self.forward_unified(x, forward_batch, layer_id, compressor)
        if compressor.ratio != 4 or self.tier is None or self.step is None or not self.step.is_decode:
            return
        chosen = self._selections[layer_id]
        chosen.slots = self.tier.resolve(
            self.token_to_kv_pool.c4_layer(layer_id), chosen.entries, chosen.positions, self.step.entry_lens
        )

    # ---- indexer

    def forward_c4_indexer(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        c4_indexer: C4Indexer,
        forward_batch: ForwardBatch,
        alt_streams: Any = None,
        enable_multi_stream: bool = False,
        q_lora_ready: Any = None,
        skip_compressor: bool = False,
    ) -> None:
        """Stores the indexer's keys, scores every visible entry and keeps the top-k as this layer's selection."""
        if forward_batch.forward_mode.is_idle():
            return
        step, kernels, config = self.step, self.kernels, self.config
        assert step is not None
        if not skip_compressor:
            self.forward_indexer_compressor(x, forward_batch, c4_indexer.layer_id, c4_indexer.compressor)
        core = self.forward_metadata.core_attn_metadata
        q = c4_indexer.wq_b(q_lora)[0].view(-1, c4_indexer.n_heads, c4_indexer.head_dim).float()
        q = torch.cat([q[..., :-64], kernels.rope(q[..., -64:], c4_indexer.freqs_cis, core.positions)], -1)
        q = kernels.quantise_index_query(kernels.hadamard(q), config.index_dtype, config.storage)
        pool = self.token_to_kv_pool.c4_indexer_kv_pool
        scores = kernels.index_scores(
            q,
            c4_indexer.compute_weights(x).float(),
            pool.index_k_with_scale_buffer[self.token_to_kv_pool.c4_layer(c4_indexer.layer_id)],
            pool.layout,
            config.index_dtype,
            config.storage,
            step.page_table,
            step.query_request,
            step.entry_lens,
        )
        positions = kernels.select_top_k(scores, step.entry_lens, self.c4_topk)
        page = positions.clamp_min(0) // C4_ENTRIES_PER_PAGE
        entries = (
            core.page_table.gather(1, page.long()).to(torch.int32) * C4_ENTRIES_PER_PAGE
            + positions % C4_ENTRIES_PER_PAGE
        )
        entries = torch.where(positions < 0, -1, entries).to(torch.int32)
        self._selections[c4_indexer.layer_id] = Selection(entries, positions)

    # ---- attention

    def store_cache(self, layer_id: int, swa_k: torch.Tensor, forward_batch: ForwardBatch) -> None:
        rows = self.kernels.pack_kv_rows(swa_k, self.config.storage)
        pool = self.token_to_kv_pool
        locations = self.get_swa_out_cache_loc(forward_batch).long()
        scatter_rows(pool.swa_pages(layer_id), pool.swa_kv_pool.layout, locations, rows)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        compress_ratio: Literal[0, 4, 128],
        save_kv_cache: bool = True,
        attn_sink: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """One softmax over the window and the layer's compressed rows. q [T, H, 512] -> [T, H, 512]."""
        if forward_batch.forward_mode.is_idle():
            return torch.empty_like(q)
        assert k is v and self.step is not None and attn_sink is not None
        layer_id = layer.layer_id
        if save_kv_cache:
            self.store_cache(layer_id, k, forward_batch)
        pool = self.token_to_kv_pool
        window = self.step.window
        rows = [self._read(pool.swa_pages(layer_id), pool.swa_kv_pool.layout, window.locations)]
        indices = [window.indices]
        if compress_ratio != 0:
            compressed, compressed_indices = (
                self._c4_rows(layer_id) if compress_ratio == 4 else self._c128(layer_id)
            )
            offset = rows[0].shape[0]
            rows.append(self.kernels.unpack_kv_rows(compressed, self.config.storage))
            indices.append(
                torch.where(compressed_indices < 0, -1, compressed_indices + offset).to(torch.int32)
            )
        return self.kernels.sparse_attention(
            q, torch.cat(rows), torch.cat(indices, 1), attn_sink.float(), self.softmax_scale
        )

    def _read(self, pages: torch.Tensor, layout: PageLayout, locations: torch.Tensor) -> torch.Tensor:
        return self.kernels.unpack_kv_rows(gather_rows(pages, layout, locations), self.config.storage)

    def _c128(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed rows of all C128 entries that the step's queries see, and each query's indices."""
        pool = self.token_to_kv_pool
        if self._c128_rows is None:
            self._c128_rows = list_rows(self.forward_metadata.core_attn_metadata.c128_page_indices)
        pages, layout = pool.compressed_pages(layer_id), pool.compressed_layout(layer_id)
        return gather_rows(pages, layout, self._c128_rows.locations), self._c128_rows.indices

    def _c4_rows(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed rows of the layer's selected entries, wherever they are, and each query's indices."""
        pool, chosen = self.token_to_kv_pool, self._selections[layer_id]
        selected = list_rows(chosen.entries)
        pages, layout = pool.compressed_pages(layer_id), pool.compressed_layout(layer_id)
        if self.tier is None:
            return gather_rows(pages, layout, selected.locations), selected.indices
        number = pool.c4_layer(layer_id)
        if chosen.slots is None:
            rows = self.tier.gather(number, selected.locations)
        else:
            self.tier.join(number)
            slots = torch.zeros_like(selected.locations)
            named = selected.indices >= 0
            slots[selected.indices[named].long()] = chosen.slots[named].long()
            rows = gather_rows(pages, layout, slots)
        if self.config.checks == "step":
            self.tier.verify_read(number, selected.locations, rows)
        return rows, selected.indices
