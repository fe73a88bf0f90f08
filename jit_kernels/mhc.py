"""Manifold-constrained hyper-connections: the weights that merge and spread residual streams."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .registry import register


class HyperConnection(NamedTuple):
    """Weights of one site; the leading dimensions are those of the mix logits."""

    pre: torch.Tensor  # fp32 [..., hc], streams into the layer's input
    post: torch.Tensor  # fp32 [..., hc], the layer's output into the streams
    comb: torch.Tensor  # fp32 [..., hc, hc], streams into streams, doubly stochastic


@register("hc_split_sinkhorn", "torch")
def hc_split_sinkhorn(
    mixes: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> HyperConnection:
    """Splits mix logits and projects the last part onto doubly stochastic matrices (Sinkhorn-Knopp).

    pre = sigmoid + eps, post = 2 sigmoid, comb = softmax over the last dimension + eps, then columns and rows
    divided by their sums + eps in turn, columns last. Source: sglang 0.5.17 `kernels/ops/layernorm/mhc.py`,
    whose signature this is, and transformers' DeepseekV4HyperConnection (the same values).

    Args:
        mixes: fp32 [..., (2 + hc) * hc].
        hc_scale: fp32 [3], for pre, post and comb.
        hc_base: fp32 [(2 + hc) * hc].
        hc_mult: number of residual streams.
        sinkhorn_iters: column normalisations.
        eps: see above.
    """
    hc = hc_mult
    pre, post, comb = mixes.to(torch.float32).split([hc, hc, hc * hc], -1)
    pre_base, post_base, comb_base = hc_base.to(torch.float32).split([hc, hc, hc * hc])
    pre = torch.sigmoid(pre * hc_scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * hc_scale[1] + post_base)
    comb = (comb * hc_scale[2] + comb_base).unflatten(-1, (hc, hc)).softmax(-1) + eps
    # Tokens run along the last dimension: sums over four numbers each are slow on a CPU, sums of four rows
    # are not.
    matrix = comb.flatten(0, -3).permute(1, 2, 0).contiguous()
    matrix /= matrix.sum(0, keepdim=True).add_(eps)
    for _ in range(sinkhorn_iters - 1):
        matrix /= matrix.sum(1, keepdim=True).add_(eps)
        matrix /= matrix.sum(0, keepdim=True).add_(eps)
    return HyperConnection(pre, post, matrix.permute(2, 0, 1).reshape(comb.shape))
