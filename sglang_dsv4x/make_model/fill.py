"""Random values of one tensor, in slices of bounded size.

Every tensor has a generator of its own, seeded from the checkpoint's seed and the tensor's name, so that its values do
not depend on the order of tensors, on sharding, or on which other tensors exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from .tensors import ExpertTable, Normal, StreamMix, TensorSpec

SLICE_ELEMENTS = 1 << 22
"""Elements made at once: 16 MiB of float32."""


def slices(spec: TensorSpec, seed: int) -> Iterator[torch.Tensor]:
    """The tensor's values in order, as one-dimensional CPU tensors of `spec.dtype`."""
    generator = torch.Generator().manual_seed(_tensor_seed(spec.name, seed))
    fill = spec.fill
    if isinstance(fill, ExpertTable):
        yield from _expert_rows(spec, fill, generator)
    elif isinstance(fill, StreamMix):
        yield _stream_mix(fill, generator).to(spec.dtype)
    else:
        yield from _normal(spec, fill, generator)


def _tensor_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _normal(spec: TensorSpec, fill: Normal, generator: torch.Generator) -> Iterator[torch.Tensor]:
    left = spec.nbytes // spec.dtype.itemsize
    while left:
        count = min(left, SLICE_ELEMENTS)
        values = torch.randn(count, generator=generator)
        yield values.mul_(fill.std).add_(fill.mean).to(spec.dtype)
        left -= count


def _stream_mix(fill: StreamMix, generator: torch.Generator) -> torch.Tensor:
    n = fill.streams
    values = torch.randn((2 + n) * n, generator=generator) * fill.std
    values[2 * n :].view(n, n).diagonal().add_(fill.diagonal)
    return values


def _expert_rows(spec: TensorSpec, fill: ExpertTable, generator: torch.Generator) -> Iterator[torch.Tensor]:
    rows, per_token = spec.shape
    step = max(1, SLICE_ELEMENTS // fill.experts)
    for start in range(0, rows, step):
        keys = torch.rand((min(step, rows - start), fill.experts), generator=generator)
        yield keys.argsort(dim=-1)[:, :per_token].to(spec.dtype).flatten()
