"""Streaming writer of safetensors shards: memory stays bounded by one slice, whatever the checkpoint's size.

Format: 8 bytes header length (little endian), JSON header {name: {dtype, shape, data_offsets}}, data
(https://github.com/huggingface/safetensors, "Format"). The library's own writer wants all tensors of a file in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from .tensors import TensorSpec

SHARD_BYTES = 4 << 30
INDEX_NAME = "model.safetensors.index.json"
_ALIGNMENT = 8
_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
}

Slices = Callable[[TensorSpec], Iterator[torch.Tensor]]


def write_shards(
    specs: Sequence[TensorSpec], folder: Path, slices: Slices, advance: Callable[[int], object]
) -> None:
    """Writes `specs` as `model.safetensors`, or as numbered shards of about SHARD_BYTES with an index.

    `slices` gives a tensor's values in order; `advance` is told the bytes written since it was last called.
    """
    shards = _split(specs)
    if len(shards) == 1:
        _write(shards[0], folder / "model.safetensors", slices, advance)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, folder / name, slices, advance)
        weight_map.update({spec.name: name for spec in shard})
    index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _write(specs: Sequence[TensorSpec], path: Path, slices: Slices, advance: Callable[[int], object]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        span = [offset, offset + spec.nbytes]
        header[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for spec in specs:
            written = 0
            for values in slices(spec):
                data = values.contiguous().view(torch.uint8).numpy()
                file.write(data.data)
                written += data.nbytes
                advance(data.nbytes)
            if written != spec.nbytes:
                raise RuntimeError(f"{spec.name}: {written} bytes were made, its shape needs {spec.nbytes}.")
