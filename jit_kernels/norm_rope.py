"""RMS norm and rotary embedding of queries and KV, with the signatures of SGLang's fused kernels.

The rotation is interleaved (pairs 2i, 2i+1 as complex numbers) over the last 64 dimensions. As in the
kernels, a normalised value is rounded to the tensor's dtype before it is rotated in fp32. Sources: sglang
0.5.17 `kernels/ops/attention/dsv4/elementwise.py` (signatures), `main_norm_rope.cuh`, `fused_norm_rope.cuh`,
`rope.cuh`.
"""

from __future__ import annotations

import torch

from .layouts import ROPE_DIM
from .numerics import rms_scale
from .registry import register


@register("rope", "torch")
def rope(
    x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Rotates pairs of the last dimension by the angle of the token's position.

    Args:
        x: float [T, ..., 64].
        freqs_cis: complex64 [S, 32], exp(i * position * frequency).
        positions: int [T], rows of `freqs_cis`.
        inverse: rotate back (complex conjugate).
    Returns: fp32, the shape of x.
    """
    # Written out in real numbers: torch's complex product rounds differently in its vector loop and in its
    # tail.
    angle = torch.view_as_real(freqs_cis[positions.long()])
    angle = angle.view(angle.shape[0], *(1,) * (x.dim() - 2), ROPE_DIM // 2, 2)
    cos, sin = angle[..., 0], angle[..., 1]
    if inverse:
        sin = -sin
    real, imag = x.to(torch.float32).unflatten(-1, (ROPE_DIM // 2, 2)).unbind(-1)
    return torch.stack([real * cos - imag * sin, real * sin + imag * cos], -1).flatten(-2)


@register("q_norm_rope", "torch")
def q_norm_rope(
    q_input: torch.Tensor,
    q_output: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """RMS norm without weight per (token, head), then rope; SGLang's `fused_q_norm_rope`.

    Args:
        q_input: float [T, H, 512].
        q_output: same shape and dtype; modified. It may be q_input.
        eps: added to the mean square.
        freqs_cis, positions: as for `rope`.
    """
    x = q_input.to(torch.float32)
    q_output.copy_(x * rms_scale(x, eps))
    _rotate_tail(q_output, freqs_cis, positions)


@register("norm_rope_inplace", "torch")
def norm_rope_inplace(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, freq_cis: torch.Tensor, positions: torch.Tensor
) -> None:
    """RMS norm with weight, then rope, in place; SGLang's `fused_norm_rope_inplace` (its table: freq_cis).

    Args:
        kv: float [T, 512]; modified.
        weight: float [512].
        eps, freq_cis, positions: as for `q_norm_rope`.
    """
    x = kv.to(torch.float32)
    kv.copy_(x * rms_scale(x, eps) * weight.to(torch.float32))
    _rotate_tail(kv, freq_cis, positions)


@register("rope_inplace", "torch")
def rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
) -> None:
    """Rotates q and, if given, k in place; SGLang's `fused_rope_inplace`.

    Args:
        q, k: float [T, H, 64], possibly a view of the tail of a wider tensor; modified.
        freqs_cis, positions, inverse: as for `rope`.
    """
    q.copy_(rope(q, freqs_cis, positions, inverse))
    if k is not None:
        k.copy_(rope(k, freqs_cis, positions, inverse))


def _rotate_tail(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> None:
    tail = x[..., -ROPE_DIM:]
    tail.copy_(rope(tail, freqs_cis, positions))
