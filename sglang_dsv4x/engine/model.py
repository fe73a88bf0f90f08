"""Seams: SGLang's DeepSeek-V4 model. Its CUDA-only ops by name, YaRN in window-only layers, and what it loads.

The classes stay SGLang's. On a machine without a GPU the ops that exist only as CUDA kernels are replaced, in the
model's own namespace, by our torch references.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..config import load_published
from ..jit_kernels import mhc, moe, norm_rope
from .hooks import Seam


class MissingWeightsError(RuntimeError):
    """The checkpoint lacks tensors that the model needs; SGLang would serve with uninitialised memory."""


class MhcOps(NamedTuple):
    """The three hyper-connection ops that SGLang's model asks for; the fused and NPU forms are not used here."""

    hc_split_sinkhorn: Callable[..., Any]
    mhc_fused_post_pre: None
    npu_hc_pre: None


def mhc_ops() -> MhcOps:
    return MhcOps(mhc.hc_split_sinkhorn, None, None)


def hc_head(
    self: Any, x: torch.Tensor, hc_fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor
) -> torch.Tensor:
    """SGLang's torch form of the head's stream mix, instead of its Triton kernel."""
    from sglang.srt.models.deepseek_v4 import hc_head_torch

    return hc_head_torch(x, hc_fn, hc_scale, hc_base, norm_eps=self.norm_eps, hc_eps=self.hc_eps)


def hash_top_k(
    self: Any, router_logits: torch.Tensor, input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """HashTopK's torch form; SGLang's own gathers with int32 indices, which torch refuses."""
    if self.num_fused_shared_experts:
        raise ValueError(
            "Fused shared experts need SGLang's CUDA kernel: pass --disable-shared-experts-fusion."
        )
    weights, ids = moe.hash_top_k(router_logits, input_ids, self.tid2eid, self.score_func)
    return weights, ids


def build_attention(
    original: Callable[..., None], self: Any, config: Any, layer_id: int, *args: Any, **kw: Any
) -> None:
    """Without YaRN in window-only layers, as DeepSeek's reference has it (SGLang's fault, fixed by its #34788)."""
    ratio = kw.get("compress_ratio")
    if ratio is None:
        ratio = config.compress_ratios[layer_id]
    if ratio == 0 and load_published().yarn_fix == "on":
        kw.setdefault("rope_original_seq_len", 0)
    original(self, config, layer_id, *args, **kw)


class _MissingWeights(logging.Filter):
    """Catches the warning with which SGLang goes on after an incomplete checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "not initialized from checkpoints" in text:
            self.found = text
        return True


def load_weights(original: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> Any:
    """SGLang's loader, but an incomplete checkpoint is an error.

    Raises: MissingWeightsError naming the missing parameters.
    """
    watch = _MissingWeights()
    log = logging.getLogger("sglang.srt.models.deepseek_v4")
    log.addFilter(watch)
    try:
        result = original(self, *args, **kw)
    finally:
        log.removeFilter(watch)
    if watch.found:
        raise MissingWeightsError(
            f"The checkpoint is incomplete: {watch.found} Check that every shard of --model-path is there and that "
            "its config.json belongs to it."
        )
    return result


def post_load_weights(original: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> Any:
    """With the fp32 debug storage, also the weights that SGLang keeps in bf16 whatever --dtype says."""
    if load_published().storage == "float32":
        for parameter in self.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
    return original(self, *args, **kw)


_MODEL = "sglang.srt.models.deepseek_v4"

SEAMS = [
    Seam(
        path=f"{_MODEL}.MqaAttentionBase.__init__",
        signature="(self, config, layer_id, quant_config, prefix, *, attn_tp_rank=..., attn_tp_size=..., "
        "compress_ratio=..., fuse_wqa_wkv=..., wo_a_fp8=..., wo_a_keeps_quant_config=..., "
        "wo_b_reduce_results=..., rope_original_seq_len=...)",
        kind="around",
        reason="0.5.17 applies YaRN to window-only layers, where the reference does not",
        hook=build_attention,
    ),
    Seam(
        path=f"{_MODEL}.DeepseekV4ForCausalLM.load_weights",
        signature="(self, weights, is_nextn=...)",
        kind="around",
        reason="0.5.17 serves an incomplete checkpoint with a warning",
        hook=load_weights,
    ),
    Seam(
        path=f"{_MODEL}.DeepseekV4ForCausalLM.post_load_weights",
        signature="(self, is_nextn=..., weight_names=...)",
        kind="around",
        reason="--dsv4x-storage float32 keeps every weight in fp32",
        hook=post_load_weights,
    ),
    Seam(
        path=f"{_MODEL}.fused_q_norm_rope",
        signature="(q_input, q_output, eps, freqs_cis, positions)",
        kind="replace",
        reason="CUDA only",
        hook=norm_rope.q_norm_rope,
        only="torch",
    ),
    Seam(
        path=f"{_MODEL}.fused_norm_rope_inplace",
        signature="(kv, weight, eps, freq_cis, positions)",
        kind="replace",
        reason="CUDA only",
        hook=norm_rope.norm_rope_inplace,
        only="torch",
    ),
    Seam(
        path=f"{_MODEL}.fused_rope_inplace",
        signature="(q, k, freqs_cis, positions, inverse=...)",
        kind="replace",
        reason="CUDA only",
        hook=norm_rope.rope_inplace,
        only="torch",
    ),
    Seam(
        path=f"{_MODEL}._get_mhc_ops",
        signature="()",
        kind="replace",
        reason="TileLang only",
        hook=mhc_ops,
        only="torch",
    ),
    Seam(
        path=f"{_MODEL}.DeepseekV4Model.hc_head",
        signature="(self, x, hc_fn, hc_scale, hc_base)",
        kind="replace",
        reason="Triton only",
        hook=hc_head,
        only="torch",
    ),
    Seam(
        path="sglang.srt.models.deepseek_v2.silu_and_mul_clamp",
        signature="(input, output, swiglu_limit)",
        kind="replace",
        reason="CUDA only",
        hook=moe.silu_and_mul_clamp,
        only="torch",
    ),
    Seam(
        path="sglang.srt.layers.moe.hash_topk.HashTopK._forward_torch",
        signature="(self, router_logits, input_ids)",
        kind="replace",
        reason="0.5.17's torch form gathers with int32 indices, which torch refuses",
        hook=hash_top_k,
        only="torch",
    ),
]
