"""Main KV rows (SWA, C4, C128 alike): 448 nope values in FP8, 64 rope values in BF16, 7 power-of-two scales.

Row of the released storage, 584 bytes: [0, 448) e4m3; [448, 576) bf16; [576, 583) ue8m0, one per 64 nope
values; 583 zero. Source: sglang 0.5.17 `kernels/jit/csrc/deepseek_v4/fused_norm_rope_v2.cuh`
(fused_norm_rope_flashmla) and FlashMLA's MODEL1_FP8Sparse. The debug storage `float32` keeps 512 fp32 values.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .layouts import HEAD_DIM, NOPE_DIM, ROPE_DIM, Storage, main_layout
from .numerics import E4M3_MAX, ue8m0_inverse, ue8m0_scale, ue8m0_values
from .registry import register

_GROUP = 64
_GROUPS = NOPE_DIM // _GROUP
_SCALES = NOPE_DIM + 2 * ROPE_DIM
_AMAX_FLOOR = 1e-4


@register("pack_kv_rows", "torch")
def pack_kv_rows(kv: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Quantises rotated KV to rows.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)) per group of 64; values round to nearest even. The values are
    taken as they come: a caller who wants the bytes of SGLang's compressed path, which quantises from bf16,
    rounds first. A group with an inf or NaN gets scale 255 and reads back as NaN.

    Args:
        kv: float [N, 512], the last 64 rotated.
    Returns: u8 [N, 584], or u8 [N, 2048] for the storage "float32".
    """
    if storage == "float32":
        return kv.to(torch.float32).contiguous().view(torch.uint8)
    rows = torch.empty((kv.shape[0], main_layout(1).row_bytes), dtype=torch.uint8, device=kv.device)
    nope = kv[:, :NOPE_DIM].to(torch.float32).unflatten(1, (_GROUPS, _GROUP))
    exponent = ue8m0_scale(nope.abs().amax(-1).clamp_min_(_AMAX_FLOOR), E4M3_MAX)
    scaled = (nope * ue8m0_inverse(exponent).unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    rows[:, :NOPE_DIM] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rows[:, NOPE_DIM:_SCALES] = kv[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    rows[:, _SCALES : _SCALES + _GROUPS] = exponent
    rows[:, _SCALES + _GROUPS :] = 0
    return rows


@register("unpack_kv_rows", "torch")
def unpack_kv_rows(rows: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Rows back to values: bf16 [N, 512], or fp32 [N, 512] for the storage "float32".

    Lossless: an e4m3 value has 4 significant bits and its scale is a power of two. Scale 255 gives NaN for
    its group, and a row of 0xFF bytes is NaN throughout.

    Args:
        rows: u8 [N, 584] or [N, 2048], as `pack_kv_rows` returns them.
    """
    if storage == "float32":
        return rows.contiguous().view(torch.float32)
    kv = torch.empty((rows.shape[0], HEAD_DIM), dtype=torch.bfloat16, device=rows.device)
    scale = rows[:, _SCALES : _SCALES + _GROUPS].to(torch.int32) << 8
    code = rows[:, :NOPE_DIM].unflatten(1, (_GROUPS, _GROUP)) + scale.unsqueeze(-1)
    # One look-up of (scale, value) is a third of the time of torch's scalar FP8 conversion on CPU.
    kv[:, :NOPE_DIM] = _nope_values(rows.device).index_select(0, code.flatten()).view(-1, NOPE_DIM)
    kv[:, NOPE_DIM:] = rows[:, NOPE_DIM:_SCALES].contiguous().view(torch.bfloat16)
    return kv


@lru_cache
def _nope_values(device: torch.device) -> torch.Tensor:
    """bf16 [65536]: the value of every (scale byte, e4m3 byte)."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)
    return torch.outer(ue8m0_values(device), codes).to(torch.bfloat16).flatten()
