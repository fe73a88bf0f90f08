"""Two pieces of the MoE block for which SGLang has only CUDA kernels: clamped SwiGLU and hash routing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .registry import register


class Routing(NamedTuple):
    """Experts of every token."""

    weights: torch.Tensor  # fp32 [T, k]
    ids: torch.Tensor  # i32 [T, k]


@register("silu_and_mul_clamp", "torch")
def silu_and_mul_clamp(input: torch.Tensor, output: torch.Tensor, swiglu_limit: float) -> None:
    """output = silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32, rounded once at the end.

    Source: sglang 0.5.17 `silu_and_mul_masked_post_quant.cuh`, whose signature this is.

    Args:
        input: float [T, 2 n], gate and then up.
        output: float [T, n]; modified.
        swiglu_limit: limit of both factors.
    """
    gate, up = input.to(torch.float32).chunk(2, -1)
    gate = torch.nn.functional.silu(gate.clamp(max=swiglu_limit))
    output.copy_(gate.mul_(up.clamp(-swiglu_limit, swiglu_limit)))


@register("hash_top_k", "torch")
def hash_top_k(
    router_logits: torch.Tensor, input_ids: torch.Tensor, tid2eid: torch.Tensor, scoring_func: str
) -> Routing:
    """Routing of the first layers: the token id names the experts, the router only weighs them.

    Weights are the scores of the named experts, divided by their sum (not for softmax). Source: sglang 0.5.17
    `srt/layers/moe/hash_topk.py` and `hash_topk.cuh`, without fused shared experts.

    Args:
        router_logits: float [T, experts].
        input_ids: int [T].
        tid2eid: int [vocabulary, k].
        scoring_func: "sqrtsoftplus" (DeepSeek-V4), "sigmoid" or "softmax".
    Raises: ValueError for another scoring function.
    """
    logits = router_logits.to(torch.float32)
    if scoring_func == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(logits).sqrt()
    elif scoring_func == "sigmoid":
        scores = logits.sigmoid()
    elif scoring_func == "softmax":
        scores = logits.softmax(-1)
    else:
        raise ValueError(f"unknown scoring function {scoring_func!r}: use sqrtsoftplus, sigmoid or softmax")
    ids = tid2eid[input_ids.long()]
    weights = scores.gather(1, ids.long())
    if scoring_func != "softmax":
        weights /= weights.sum(-1, keepdim=True)
    return Routing(weights, ids.to(torch.int32))
