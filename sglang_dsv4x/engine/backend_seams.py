"""Seams around the attention backend: its registration, what our subclass overrides, and the metadata of its steps."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from ..config import load_published
from ..jit_kernels.registry import Kernels, select
from .backend import Dsv4xAttnBackend
from .hooks import Seam
from .pool import Dsv4xTokenToKVPool


@cache
def _kernels(device: torch.device) -> Kernels:
    """The choice of `--dsv4x-kernels`, which every step asks for."""
    return select(load_published().kernels, device)


def create_backend(model_runner: ModelRunner) -> Dsv4xAttnBackend:
    """What SGLang's attention registry calls for the name "dsv4"."""
    return Dsv4xAttnBackend(model_runner)


def plan_compression(
    compress_ratio: Literal[4, 128],
    *,
    is_prefill: bool,
    token_to_kv_pool: Dsv4xTokenToKVPool,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """In place of SGLang's `create_paged_compressor_data`: the torch compressor's plan of one step."""
    return _kernels(seq_lens.device).plan_compression(
        ratio=compress_ratio,
        seq_lens=seq_lens,
        extend_lens=extend_lens if is_prefill else torch.ones_like(seq_lens),
        req_pool_indices=req_pool_indices,
        req_to_token=req_to_token,
        full_to_swa=token_to_kv_pool.full_to_swa_index_mapping,
        swa_page_size=token_to_kv_pool.swa_page_size,
        ring_size=token_to_kv_pool.get_ring_size(compress_ratio=compress_ratio),
    )


def compression_metadata(*args: Any, **kwargs: Any) -> Any:
    """In place of SGLang's Triton `init_compression_metadata`, whose arguments and outputs these are."""
    seq_lens = args[0] if args else kwargs["seq_lens"]
    return _kernels(seq_lens.device).compression_metadata(*args, **kwargs)


def init_flashmla_related(original: Any, self: Any, is_prefill: bool = False) -> None:
    """SGLang's, without its bound on top-k (512 or 1,024: FlashMLA's shapes, which torch kernels do not have)."""
    if self.c4_sparse_topk in (512, 1024):
        original(self, is_prefill)
        return
    asked, self.c4_sparse_topk = self.c4_sparse_topk, 512
    try:
        original(self, is_prefill)
    finally:
        self.c4_sparse_topk = asked
    self.c4_sparse_topk_lengths = self.c4_topk_lengths_clamp1.clamp(max=asked)


def no_flashmla_metadata() -> None:
    """FlashMLA's tile schedule; the torch attention has none."""
    return None


_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"

SEAMS = [
    Seam(
        path="sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        signature="dict['dsv4']",
        kind="register",
        reason="SGLang forces the backend name 'dsv4' for this architecture; ours takes that name",
        hook=create_backend,
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.__init__",
        signature="(self, model_runner, skip_prefill=..., speculative_step_id=..., topk=..., "
        "speculative_num_steps=...)",
        kind="read",
        reason="base of our backend",
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.forward",
        signature="(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=..., attn_sink=..., **_)",
        kind="read",
        reason="overridden by our backend",
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.store_cache",
        signature="(self, layer_id, swa_k, forward_batch)",
        kind="read",
        reason="overridden by our backend",
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.init_forward_metadata",
        signature="(self, forward_batch)",
        kind="read",
        reason="overridden: a step of the tier begins where its metadata is built",
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.init_forward_metadata_indexer",
        signature="(self, core_attn_metadata, *, use_prefill_cuda_graph=...)",
        kind="read",
        reason="overridden: no DeepGEMM schedule",
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.forward_c4_indexer",
        signature="(self, x, q_lora, c4_indexer, forward_batch, alt_streams=..., enable_multi_stream=..., "
        "q_lora_ready=..., skip_compressor=...)",
        kind="read",
        reason="overridden: score and top-k on MXFP4 rows, and the selection that the tier resolves",
    ),
    Seam(
        path=f"{_BACKEND}.DeepseekV4AttnBackend.forward_unified",
        signature="(self, x, forward_batch, layer_id, compressor)",
        kind="read",
        reason="overridden: the compressor's store is the tier's write",
    ),
    Seam(
        path=f"{_BACKEND}._init_compression_metadata_triton",
        signature="(seq_lens, positions, raw_out_loc, page_table=..., page_size=..., compute_page_indices=...)",
        kind="replace",
        reason="the Triton kernel needs a GPU",
        hook=compression_metadata,
        only="torch",
    ),
    Seam(
        path=f"{_BACKEND}.create_paged_compressor_data",
        signature="(compress_ratio, *, is_prefill, token_to_kv_pool, req_to_token, req_pool_indices, seq_lens, "
        "extend_lens=..., seq_lens_cpu=..., extend_lens_cpu=..., use_prefill_cuda_graph=..., num_q_tokens=..., "
        "online_state_slot_offset=...)",
        kind="replace",
        reason="the CUDA planner's plan is for the CUDA compressor",
        hook=plan_compression,
        only="torch",
    ),
    Seam(
        path=f"{_BACKEND}._create_flashmla_metadata",
        signature="()",
        kind="replace",
        reason="FlashMLA's schedule needs sgl_kernel",
        hook=no_flashmla_metadata,
        only="torch",
    ),
    Seam(
        path=f"{_BACKEND}.DSV4AttnMetadata.init_flashmla_related",
        signature="(self, is_prefill=...)",
        kind="around",
        reason="torch kernels take any top-k that is a multiple of 64",
        hook=init_flashmla_related,
        only="torch",
    ),
]
