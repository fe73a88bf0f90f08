"""Readers of bytes that share nothing with the packers under test: one byte or value at a time, by definition."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np


def e4m3(byte: int) -> float:
    """Value of one e4m3fn byte: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    """Value of one e2m1 nibble: 1 sign, 2 exponent (bias 1), 1 mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def ue8m0(byte: int) -> float:
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def bf16(low: int, high: int) -> float:
    return struct.unpack("<f", bytes([0, 0, low, high]))[0]


def power_of_two_scale(amax: float, largest: float) -> int:
    """Biased exponent of the smallest power of two that brings amax to at most `largest`, by trying."""
    exponent = -127
    while amax > largest * 2.0**exponent:
        exponent += 1
    return exponent + 127


def nearest_code(values: np.ndarray, decode: Callable[[int], float], codes: int) -> np.ndarray:
    """The non-negative code nearest to each |value|, ties to the even code; distances in float64 are exact here."""
    grid = np.array([decode(c) for c in range(codes)])
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - grid)
    best = distance.min(-1, keepdims=True)
    tied = distance == best
    first = tied.argmax(-1)
    two = tied.sum(-1) == 2
    return np.where(two & (first % 2 == 1), first + 1, first)
