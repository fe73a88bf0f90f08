"""Attention over the rows that each query names: one softmax over window and compressed entries, K = V.

s[h, j] = scale * q[t, h] . kv[j]; o[t, h] = sum_j exp(s - m) kv[j] / (sum_j exp(s - m) + exp(sink[h] - m)).
Source: DeepSeek's released `inference/kernel.py` (sparse_attn); FlashMLA's flash_mla_sparse_fwd is the same.
"""

from __future__ import annotations

import torch

from .registry import register

# Rows of one query block, in fp32: they are read twice and should still be in the cache the second time.
_BLOCK_BYTES = 2 << 20
# Below this a probability changes no bit of an fp32 sum with a term near 1, and subnormal factors slow a
# CPU's matrix product ten times.
_NEGLIGIBLE = 1e-35


@register("sparse_attention", "torch")
def sparse_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of every query to its own list of rows, in fp32.

    The bits of the result depend on q, on the values of the rows in the order of `indices`, and on T and K;
    not on where the rows lie in `kv`. Rows that no index names are never part of the arithmetic, so they may
    hold NaN.

    Args:
        q: float [T, H, d].
        kv: bf16 or fp32 [N, d].
        indices: int32 [T, K], rows of `kv`; -1, anywhere, is none.
        sink: fp32 [H], in the denominator only.
        scale: applied to the scores.
    Returns: [T, H, d] in q's dtype; zeros for a query without any row.
    """
    queries, wanted = indices.shape
    if kv.shape[0] > queries * wanted:
        # A workspace with more rows than are read: converting all of it would cost more than gathering these.
        flat = indices.flatten()
        kv = kv.index_select(0, flat.clamp_min(0))
        named = torch.arange(flat.shape[0], dtype=indices.dtype, device=indices.device).view_as(indices)
        indices = torch.where(indices < 0, -1, named)
    none = kv.shape[0]
    rows = torch.zeros((none + 1, kv.shape[1]), dtype=torch.float32, device=kv.device)
    rows[:none] = kv
    # The last column is the sink: a row of zeros whose score is the bias alone, so that it joins the softmax and
    # adds nothing. A missing row is the same row of zeros with a bias of -inf.
    absent = indices < 0
    indices = torch.cat([torch.where(absent, none, indices), indices.new_full((queries, 1), none)], 1)
    missing = rows.new_zeros((queries, 1, wanted + 1))
    missing[:, 0, :wanted].masked_fill_(absent, float("-inf"))
    sinks = torch.nn.functional.pad(sink.to(torch.float32).unsqueeze(1), (wanted, 0))
    out = torch.empty_like(q)
    step = max(1, _BLOCK_BYTES // ((wanted + 1) * kv.shape[1] * 4))
    block_rows = rows.new_empty((min(step, queries) * (wanted + 1), kv.shape[1]))
    for i in range(0, queries, step):
        block = indices[i : i + step]
        some = block_rows[: block.numel()]
        some = torch.index_select(rows, 0, block.flatten(), out=some).view(*block.shape, -1)
        bias = missing[i : i + step] + sinks
        scores = torch.baddbmm(bias, q[i : i + step].to(torch.float32), some.transpose(1, 2), alpha=scale)
        weights = torch.nn.functional.hardshrink(scores.softmax(-1), _NEGLIGIBLE)
        out[i : i + step] = torch.bmm(weights, some)
    return out
