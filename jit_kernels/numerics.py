"""Arithmetic that several ops share and that must not depend on the shape of the batch or on the device."""

from __future__ import annotations

from functools import lru_cache

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
UE8M0_NAN = 255
_EXPONENT_BITS = 23
_MANTISSA = (1 << _EXPONENT_BITS) - 1
_INFINITY = 0x7F800000


def ue8m0_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Biased exponent b of the smallest power of two 2^(b-127) with amax / 2^(b-127) <= largest.

    That is ceil(log2(amax / largest)), on the bits: a floating-point log2 can be off by one at powers of two.

    Args:
        amax: fp32, normal and positive (clamped by the caller); inf and NaN give 255, which reads as NaN.
        largest: the largest value of the format.
    Returns: int32, same shape.
    """
    bits = amax.view(torch.int32)
    top = int(torch.tensor(largest, dtype=torch.float32).view(torch.int32))
    exponent = (bits >> _EXPONENT_BITS) - (top >> _EXPONENT_BITS) + 127
    exponent += (bits & _MANTISSA) > (top & _MANTISSA)
    return exponent.masked_fill_(bits >= _INFINITY, UE8M0_NAN)


def ue8m0_inverse(exponent: torch.Tensor) -> torch.Tensor:
    """2^(127-b) as fp32 for biased exponents b in 1..253; int32 in, same shape out. Others give 2^-126."""
    return ((254 - exponent).clamp_min_(1) << _EXPONENT_BITS).view(torch.float32)


@lru_cache
def ue8m0_values(device: torch.device) -> torch.Tensor:
    """fp32 [256]: the value of every ue8m0 byte (OCP MX: 2^(b-127), 255 is NaN)."""
    values = [2.0 ** (b - 127) for b in range(UE8M0_NAN)]
    return torch.tensor([*values, float("nan")], dtype=torch.float32, device=device)


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded on CUDA too, where torch divides by a number as a product."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` (its size a power of two) by halving, dim dropped.

    Every step is elementwise, so the bits of one sum depend on its own terms only, whatever the shape of the
    tensor, the number of threads or the device; torch.sum promises no order. Entries of the compressed cache must
    be the same bits however a prompt was cut into chunks.
    """
    size = x.shape[dim]
    while size > 1:
        size //= 2
        x = x.narrow(dim, 0, size) + x.narrow(dim, size, size)
    return x.squeeze(dim)


def rms_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, a power of two: fp32 [..., n] -> [..., 1]."""
    mean = tree_sum(x.square(), -1).div_(x.shape[-1])
    return torch.rsqrt(mean.add_(eps)).unsqueeze(-1)
