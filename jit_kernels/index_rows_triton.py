"""Triton backend of the index quantisers: the bits of the torch backend (`index_rows.py`), one program per few rows."""

# Triton reads annotations of its functions as its own.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import index_rows
from .layouts import INDEX_HEAD_DIM, IndexDtype, Storage
from .registry import register

_ROWS = 8
"""Rows of 128 per program."""


@triton.jit
def _butterfly(x, stride: tl.constexpr, rows: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (rows, 64 // stride, 2, stride)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (rows, 128))


@triton.jit
def _rotate(x, rows: tl.constexpr):
    # In the order of the torch backend: stride 1 first, the scale last.
    for log_stride in tl.static_range(7):
        x = _butterfly(x, 1 << log_stride, rows)
    return x * 0.08838834764831845


@triton.jit
def _round_fp4(x, rows: tl.constexpr):
    """fp32 [rows, 128] -> e2m1 codes int32 [rows, 4, 32] without sign, ue8m0 exponents int32 [rows, 4]."""
    magnitude = tl.reshape(x, (rows, 4, 32)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Integers order as the floats do, with NaN above infinity. 6 * 2^-126 is the reference's floor.
    top = tl.maximum(tl.max(magnitude, 2), 0x01C00000)
    exponent = (top >> 23) - 2 + ((top & 0x7FFFFF) > 0x400000).to(tl.int32)
    exponent = tl.where(top >= 0x7F800000, 255, exponent)
    inverse = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    value = magnitude.to(tl.float32, bitcast=True) * inverse[:, :, None]
    # Thresholds of nearest even: a tie goes up exactly where the code above is even.
    code = (value > 0.25).to(tl.int32) + (value >= 0.75).to(tl.int32) + (value > 1.25).to(tl.int32)
    code += (value >= 1.75).to(tl.int32) + (value > 2.5).to(tl.int32) + (value >= 3.5).to(tl.int32)
    code += (value > 5.0).to(tl.int32)
    return code, exponent


@triton.jit
def _fp4_value(code):
    """The magnitude of an e2m1 code, fp32."""
    normal = ((code >> 1) + 126 << 23 | (code & 1) << 22).to(tl.float32, bitcast=True)
    return tl.where(code == 1, 0.5, tl.where(code == 0, 0.0, normal))


@triton.jit
def _ue8m0_value(exponent):
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _signs(x):
    return x.to(tl.int32, bitcast=True) & -0x80000000


@triton.jit
def _rows_of(x_pointer, count, rows: tl.constexpr):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    element = tl.arange(0, 128)
    at = row[:, None].to(tl.int64) * 128 + element[None, :]
    return tl.load(x_pointer + at, mask=row[:, None] < count, other=0.0).to(tl.float32), row, at


@triton.jit
def _hadamard_kernel(x_pointer, out_pointer, count, rows: tl.constexpr):
    x, row, at = _rows_of(x_pointer, count, rows)
    tl.store(out_pointer + at, _rotate(x, rows), mask=row[:, None] < count)


@triton.jit
def _pack_fp4_kernel(x_pointer, out_pointer, count, rows: tl.constexpr):
    x, row, _at = _rows_of(x_pointer, count, rows)
    code, exponent = _round_fp4(x, rows)
    nibble = tl.reshape(code, (rows, 128)) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = tl.split(tl.reshape(nibble, (rows, 64, 2)))
    out = out_pointer + row[:, None].to(tl.int64) * 68
    mask = row[:, None] < count
    tl.store(out + tl.arange(0, 64)[None, :], (low | (high << 4)).to(tl.uint8), mask=mask)
    tl.store(out + 64 + tl.arange(0, 4)[None, :], exponent.to(tl.uint8), mask=mask)


@triton.jit
def _on_grid(x, rows: tl.constexpr):
    """fp32 [rows, 128] -> the nearest MXFP4 values, fp32; NaN in a group without a scale."""
    code, exponent = _round_fp4(x, rows)
    value = tl.reshape(_fp4_value(code) * _ue8m0_value(exponent)[:, :, None], (rows, 128))
    return (value.to(tl.int32, bitcast=True) | _signs(x)).to(tl.float32, bitcast=True)


@triton.jit
def _quantise_fp4_kernel(x_pointer, out_pointer, count, rows: tl.constexpr):
    x, row, at = _rows_of(x_pointer, count, rows)
    tl.store(out_pointer + at, _on_grid(x, rows), mask=row[:, None] < count)


@triton.jit
def _fold_fp4_kernel(x_pointer, weight_pointer, out_pointer, scaled_pointer, count, rows: tl.constexpr):
    x, row, at = _rows_of(x_pointer, count, rows)
    value = _on_grid(x, rows)
    top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    # 448 is 1.75 * 2^8; the exponent is kept within 2^-100 .. 2^100, as by the torch backend.
    exponent = (top >> 23) - 135 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    inverse = (127 - exponent << 23).to(tl.float32, bitcast=True)
    folded = tl.minimum(tl.maximum(value * inverse[:, None], -448.0), 448.0)
    byte = folded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    byte = tl.where(top[:, None] >= 0x7F800000, 0x7F, byte)
    mask = row < count
    tl.store(out_pointer + at, byte, mask=mask[:, None])
    scale = (127 + exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scaled_pointer + row, tl.load(weight_pointer + row, mask=mask, other=0.0) * scale, mask=mask)


def _grid(count: int) -> tuple[int]:
    return (triton.cdiv(count, _ROWS),)


@register("hadamard", "triton")
def hadamard(x: torch.Tensor) -> torch.Tensor:
    """`index_rows.hadamard`."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    if x.numel():
        count = x.numel() // INDEX_HEAD_DIM
        _hadamard_kernel[_grid(count)](x, out, count, _ROWS)
    return out


@register("pack_index_rows", "triton")
def pack_index_rows(k: torch.Tensor, dtype: IndexDtype, storage: Storage) -> torch.Tensor:
    """`index_rows.pack_index_rows`; FP8 and fp32 rows by the torch backend."""
    if dtype != "fp4" or storage != "released":
        return index_rows.pack_index_rows(k, dtype, storage)
    k = k.contiguous()
    rows = torch.empty(k.shape[0], INDEX_HEAD_DIM // 2 + 4, dtype=torch.uint8, device=k.device)
    if k.shape[0]:
        _pack_fp4_kernel[_grid(k.shape[0])](k, rows, k.shape[0], _ROWS)
    return rows


@register("quantise_index_query", "triton")
def quantise_index_query(q: torch.Tensor, dtype: IndexDtype, storage: Storage) -> torch.Tensor:
    """`index_rows.quantise_index_query`; FP8 and fp32 queries by the torch backend."""
    if dtype != "fp4" or storage != "released":
        return index_rows.quantise_index_query(q, dtype, storage)
    q = q.contiguous()
    out = torch.empty_like(q, dtype=torch.float32)
    if q.numel():
        count = q.numel() // INDEX_HEAD_DIM
        _quantise_fp4_kernel[_grid(count)](q, out, count, _ROWS)
    return out


@register("fold_index_query", "triton")
def fold_index_query(
    q: torch.Tensor, weights: torch.Tensor, dtype: IndexDtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`index_rows.fold_index_query`; FP8 queries by the torch backend."""
    if dtype != "fp4":
        return index_rows.fold_index_query(q, weights, dtype)
    q, weights = q.contiguous(), weights.contiguous()
    folded = torch.empty_like(q, dtype=torch.float8_e4m3fn)
    scaled = torch.empty_like(weights)
    if q.numel():
        count = q.numel() // INDEX_HEAD_DIM
        _fold_fp4_kernel[_grid(count)](q, weights, folded.view(torch.uint8), scaled, count, _ROWS)
    return folded, scaled
