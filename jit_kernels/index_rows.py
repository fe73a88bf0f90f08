"""Index keys and queries of the lightning indexer: Hadamard rotation and the quantised grids.

Rows: MXFP4 64 B of nibbles (even element low) + 4 ue8m0 scales, one per 32 values; FP8 128 e4m3 + one fp32
scale; the debug storage `float32` 128 fp32. Sources: the paper's section 2.3 on the indexer (arXiv
2606.19348), DeepSeek's released `inference/kernel.py` (fp4_quant) for MXFP4, sglang 0.5.17
`main_norm_rope.cuh` for FP8.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .layouts import INDEX_HEAD_DIM, IndexDtype, Storage
from .numerics import E2M1_MAX, E4M3_MAX, divide, ue8m0_inverse, ue8m0_scale, ue8m0_values
from .registry import register

_GROUP = 32
_GROUPS = INDEX_HEAD_DIM // _GROUP
_FP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126
_FP8_AMAX_FLOOR = 1e-4
_FOLD_LIMIT = 100
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@register("hadamard", "torch")
def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x @ H_128 * 128^-0.5, H the Sylvester-ordered Hadamard matrix; float [..., 128] -> fp32 [..., 128].

    Butterflies in the order of SGLang's kernels (stride 1 first, scale last). A matrix product would sum in
    an order that depends on the number of rows, and an index key's bits would depend on the chunk.
    """
    shape = x.shape
    # Keys run along the last dimension, so that every butterfly is a long contiguous loop.
    y = x.reshape(-1, INDEX_HEAD_DIM).to(torch.float32).T.contiguous()
    half = 1
    while half < INDEX_HEAD_DIM:
        pairs = y.view(INDEX_HEAD_DIM // (2 * half), 2, half, -1)
        out = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        y = out
        half *= 2
    return y.view(INDEX_HEAD_DIM, -1).mul_(INDEX_HEAD_DIM**-0.5).T.reshape(shape)


@register("pack_index_rows", "torch")
def pack_index_rows(k: torch.Tensor, dtype: IndexDtype, storage: Storage) -> torch.Tensor:
    """Quantises index keys (already rotated by `hadamard`) to rows.

    MXFP4: scale 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) per 32 values, round to nearest, ties to the even
    code (SGLang 0.5.17 breaks ties towards zero and floors amax at 1e-4). FP8: scale max(amax, 1e-4) / 448.
    An inf or NaN makes its group (FP8: its key) read back as NaN.

    Args:
        k: fp32 [N, 128].
    Returns: u8 [N, 68] (fp4), [N, 132] (fp8) or [N, 512] (storage "float32").
    """
    if storage == "float32":
        return k.to(torch.float32).contiguous().view(torch.uint8)
    if dtype == "fp4":
        magnitude, exponent = _round_fp4(k)
        # Codes rise by one per half up to 2, per one up to 4, then per two.
        below2, below4 = magnitude.clamp_max(2.0), magnitude.clamp_max(4.0)
        code = (below2 + below4 + (magnitude - below4) * 0.5).to(torch.uint8)
        code = (code + (torch.signbit(k).view(code.shape).to(torch.uint8) << 3)).view(-1, INDEX_HEAD_DIM)
        return torch.cat([code[:, 0::2] + (code[:, 1::2] << 4), exponent.to(torch.uint8)], 1)
    values, scale = _round_fp8(k)
    return torch.cat([values.view(torch.uint8), scale.flatten().view(torch.uint8).view(-1, 4)], 1)


@register("unpack_index_rows", "torch")
def unpack_index_rows(rows: torch.Tensor, dtype: IndexDtype, storage: Storage) -> torch.Tensor:
    """Rows back to values: u8 [N, row_bytes] -> fp32 [N, 128]. A row of 0xFF bytes is NaN throughout."""
    if storage == "float32":
        return rows.contiguous().view(torch.float32)
    width = INDEX_HEAD_DIM // 2 if dtype == "fp4" else INDEX_HEAD_DIM
    return decode_index_keys(rows[:, :width], rows[:, width:], dtype, storage)


def decode_index_keys(
    values: torch.Tensor, scales: torch.Tensor, dtype: IndexDtype, storage: Storage
) -> torch.Tensor:
    """Value bytes u8 [N, 64 | 128 | 512] and scale bytes u8 [N, 4 | 4 | 0] -> fp32 [N, 128]."""
    if storage == "float32":
        return values.contiguous().view(torch.float32)
    if dtype == "fp4":
        # A double in the table is the pair of floats of one byte: half the look-ups.
        pairs = _nibble_pairs(values.device).index_select(0, values.flatten().to(torch.int32))
        scale = ue8m0_values(values.device).index_select(0, scales.flatten().to(torch.int32))
        return pairs.view(torch.float32).view(-1, _GROUP).mul_(scale.unsqueeze(-1)).view(-1, INDEX_HEAD_DIM)
    codes = _e4m3_values(values.device).index_select(0, values.flatten().to(torch.int32))
    return codes.view(-1, INDEX_HEAD_DIM).mul_(scales.contiguous().view(torch.float32))


@register("quantise_index_query", "torch")
def quantise_index_query(q: torch.Tensor, dtype: IndexDtype, storage: Storage) -> torch.Tensor:
    """Index queries (already rotated by `hadamard`) on the grid of the key format, dequantised.

    One FP8 scale, or four MXFP4 scales, per (token, head). The result is already times the scale,
    which SGLang's FP8 path folds into the head weights instead.

    Args:
        q: fp32 [T, H, 128].
    Returns: fp32 [T, H, 128].
    """
    if storage == "float32":
        return q.to(torch.float32)
    flat = q.reshape(-1, INDEX_HEAD_DIM)
    if dtype == "fp4":
        magnitude, exponent = _round_fp4(flat)
        scale = ue8m0_values(q.device)[exponent].unsqueeze(-1)
        return torch.copysign(magnitude.mul_(scale), flat.view(magnitude.shape)).view(q.shape)
    values, scale = _round_fp8(flat)
    return values.to(torch.float32).mul_(scale).view(q.shape)


@register("fold_index_query", "torch")
def fold_index_query(
    q: torch.Tensor, weights: torch.Tensor, dtype: IndexDtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries (already rotated by `hadamard`) as e4m3, with what is missing in the head weights.

    The scores are those of `quantise_index_query`: w * relu(q . k) = (w * s) * relu((q / s) . k) for s > 0. FP8: s is
    the scale. MXFP4: s is the power of two that brings the largest value of a head to at most 448; e4m3 then holds
    every value exactly whose group's scale is at most 14 powers of two below that of the largest group, and the rest
    to within 2^-17 of the head's largest value.

    Args:
        q: fp32 [T, H, 128].
        weights: fp32 [T, H].
    Returns: e4m3 [T, H, 128], fp32 [T, H]. An inf or NaN makes its head NaN (FP8: its value).
    """
    if dtype == "fp8":
        values, scale = _round_fp8(q.reshape(-1, INDEX_HEAD_DIM))
        return values.view(q.shape), weights * scale.view(weights.shape)
    grid = quantise_index_query(q, dtype, "released").view(-1, INDEX_HEAD_DIM)
    top = grid.abs().amax(-1)
    exponent = ue8m0_scale(top.clamp_min(E4M3_MAX * 2.0**-_FOLD_LIMIT), E4M3_MAX).clamp_max_(
        127 + _FOLD_LIMIT
    )
    folded = (grid * ue8m0_inverse(exponent).unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    folded.masked_fill_((top.isnan() | top.isinf()).unsqueeze(-1), float("nan"))
    scaled = weights * (exponent << 23).view(torch.float32).view(weights.shape)
    return folded.view(q.shape).to(torch.float8_e4m3fn), scaled


def _round_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, 128] -> e2m1 magnitudes fp32 [N, 4, 32] in units of the scale, exponents int32 [N, 4]."""
    magnitude = x.reshape(-1, _GROUPS, _GROUP).abs()
    exponent = ue8m0_scale(magnitude.amax(-1).clamp_min_(_FP4_AMAX_FLOOR), E2M1_MAX)
    magnitude.mul_(ue8m0_inverse(exponent).unsqueeze(-1)).nan_to_num_(0.0, E2M1_MAX).clamp_max_(E2M1_MAX)
    # e2m1 steps by a half below 2, by one below 4, then by two. torch.round is half-to-even, and in every
    # range an even number of steps is an even code.
    inverse_step = torch.where(magnitude < 2.0, 2.0, torch.where(magnitude < 4.0, 1.0, 0.5))
    return magnitude.mul_(inverse_step).round_().div_(inverse_step), exponent


def _round_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, 128] -> e4m3 [N, 128], fp32 scale [N, 1]. Multiplies by 1 / scale, as SGLang's kernel."""
    scale = divide(x.abs().amax(-1, keepdim=True).clamp_min_(_FP8_AMAX_FLOOR), E4M3_MAX)
    scaled = (x * scale.reciprocal()).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


@lru_cache
def _nibble_pairs(device: torch.device) -> torch.Tensor:
    """float64 [256] whose bits are the two fp32 values of one byte of MXFP4, the low nibble first."""
    signed = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([signed[byte & 15], signed[byte >> 4]], 1).view(torch.float64).flatten()


@lru_cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    """fp32 [256]: the value of every e4m3 byte."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)
