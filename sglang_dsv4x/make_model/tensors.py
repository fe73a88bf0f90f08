"""Every tensor of a checkpoint in the released naming: name, shape, dtype and how it is filled.

Standard deviations are chosen so that random weights behave like trained ones where it matters to a cache: each
projection keeps the size of its input, a block adds about half a standard deviation to the residual streams,
attention scores have a standard deviation of 1.5 (so that some entries matter and others do not), sinks take a visible
share, and logits spread over a few nats. Gate and up projections stay near 1, far inside `swiglu_limit` (10): SGLang's
native MoE path does not clamp routed experts, transformers does, and inside the limit the two agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .shape import ModelShape


class Normal(NamedTuple):
    """Independent normal values."""

    std: float
    mean: float = 0.0


class StreamMix(NamedTuple):
    """Bias of a hyper-connection, [(2 + streams) * streams]: pre, post, then the streams x streams mixer, whose
    diagonal is raised so that the streams stay distinct instead of averaging out after a few layers."""

    streams: int
    diagonal: float = 4.0
    std: float = 0.8


class ExpertTable(NamedTuple):
    """Experts of each token id of a hash-routed layer, distinct within a row (SGLang's native MoE path miscounts a
    token that names one expert twice)."""

    experts: int


Fill = Normal | StreamMix | ExpertTable


class TensorSpec(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Fill

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


NORM = Normal(std=0.1, mean=1.0)
KV_NORM = Normal(std=0.1, mean=1.5)
SINK = Normal(std=1.0, mean=3.0)
POSITION_BIAS = Normal(std=0.5)
ROUTER_BIAS = Normal(std=0.05)
MIX_SCALE = Normal(std=0.1, mean=0.5)

ATTENTION_GAIN = 1.5
EXPERT_GAIN = 0.6
LOGIT_GAIN = 2.0


def checkpoint_tensors(shape: ModelShape, dtype: torch.dtype) -> Iterator[TensorSpec]:
    """All tensors in the order they are stored, the MTP blocks excepted.

    `dtype` is that of projections, embeddings and norms; sinks, position biases (`ape`), router biases and
    hyper-connections are float32 and hash tables int64 whatever it is, as in the released checkpoints.
    """
    hidden, streams = shape.hidden_size, shape.hc_mult
    yield TensorSpec("embed.weight", (shape.vocab_size, hidden), dtype, Normal(1.0))
    for layer, ratio in enumerate(shape.ratios):
        yield from _layer(f"layers.{layer}", shape, ratio, hashed=layer < shape.num_hash_layers, dtype=dtype)
    yield TensorSpec("norm.weight", (hidden,), dtype, NORM)
    yield TensorSpec("hc_head_fn", (streams, streams * hidden), torch.float32, _fan_in(streams * hidden))
    yield TensorSpec("hc_head_base", (streams,), torch.float32, Normal(0.3))
    yield TensorSpec("hc_head_scale", (1,), torch.float32, MIX_SCALE)
    yield TensorSpec("head.weight", (shape.vocab_size, hidden), dtype, _fan_in(hidden, LOGIT_GAIN))


def _fan_in(inputs: int, gain: float = 1.0) -> Normal:
    """Outputs have `gain` times the size of independent inputs."""
    return Normal(gain * inputs**-0.5)


def _projection(name: str, outputs: int, inputs: int, dtype: torch.dtype, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (outputs, inputs), dtype, _fan_in(inputs, gain))


def _layer(
    prefix: str, shape: ModelShape, ratio: int, *, hashed: bool, dtype: torch.dtype
) -> Iterator[TensorSpec]:
    for block in ("attn", "ffn"):
        yield from _hyper_connection(f"{prefix}.hc_{block}", shape)
        yield TensorSpec(f"{prefix}.{block}_norm.weight", (shape.hidden_size,), dtype, NORM)
    yield from _attention(f"{prefix}.attn", shape, ratio, dtype)
    yield from _experts(f"{prefix}.ffn", shape, hashed, dtype)


def _hyper_connection(prefix: str, shape: ModelShape) -> Iterator[TensorSpec]:
    streams = shape.hc_mult
    mixes, inputs = (2 + streams) * streams, streams * shape.hidden_size
    yield TensorSpec(f"{prefix}_fn", (mixes, inputs), torch.float32, _fan_in(inputs))
    yield TensorSpec(f"{prefix}_base", (mixes,), torch.float32, StreamMix(streams))
    yield TensorSpec(f"{prefix}_scale", (3,), torch.float32, MIX_SCALE)


def _attention(prefix: str, shape: ModelShape, ratio: int, dtype: torch.dtype) -> Iterator[TensorSpec]:
    hidden, heads, head_dim = shape.hidden_size, shape.num_attention_heads, shape.head_dim
    yield _projection(f"{prefix}.wq_a", shape.q_lora_rank, hidden, dtype)
    yield TensorSpec(f"{prefix}.q_norm.weight", (shape.q_lora_rank,), dtype, NORM)
    yield _projection(f"{prefix}.wq_b", heads * head_dim, shape.q_lora_rank, dtype)
    yield _projection(f"{prefix}.wkv", head_dim, hidden, dtype)
    yield TensorSpec(f"{prefix}.kv_norm.weight", (head_dim,), dtype, KV_NORM)
    yield TensorSpec(f"{prefix}.attn_sink", (heads,), torch.float32, SINK)
    inner = shape.o_groups * shape.o_lora_rank
    yield _projection(f"{prefix}.wo_a", inner, heads * head_dim // shape.o_groups, dtype)
    yield _projection(f"{prefix}.wo_b", hidden, inner, dtype, ATTENTION_GAIN)
    if ratio:
        yield from _compressor(f"{prefix}.compressor", hidden, head_dim, ratio, KV_NORM, dtype)
    if ratio == 4:
        index_dim = shape.index_head_dim
        yield _projection(f"{prefix}.indexer.wq_b", shape.index_n_heads * index_dim, shape.q_lora_rank, dtype)
        yield _projection(f"{prefix}.indexer.weights_proj", shape.index_n_heads, hidden, dtype)
        yield from _compressor(f"{prefix}.indexer.compressor", hidden, index_dim, ratio, NORM, dtype)


def _compressor(
    prefix: str, hidden: int, head_dim: int, ratio: int, norm: Normal, dtype: torch.dtype
) -> Iterator[TensorSpec]:
    """A C4 compressor has two halves per channel: one for the token's own block, one for the next (overlap)."""
    width = head_dim * (2 if ratio == 4 else 1)
    yield _projection(f"{prefix}.wkv", width, hidden, dtype)
    yield _projection(f"{prefix}.wgate", width, hidden, dtype)
    yield TensorSpec(f"{prefix}.ape", (ratio, width), torch.float32, POSITION_BIAS)
    yield TensorSpec(f"{prefix}.norm.weight", (head_dim,), dtype, norm)


def _experts(prefix: str, shape: ModelShape, hashed: bool, dtype: torch.dtype) -> Iterator[TensorSpec]:
    hidden, experts = shape.hidden_size, shape.n_routed_experts
    yield _projection(f"{prefix}.gate", experts, hidden, dtype)
    if hashed:
        table = (shape.vocab_size, shape.num_experts_per_tok)
        yield TensorSpec(f"{prefix}.gate.tid2eid", table, torch.int64, ExpertTable(experts))
    else:
        yield TensorSpec(f"{prefix}.gate.bias", (experts,), torch.float32, ROUTER_BIAS)
    for expert in range(experts):
        yield from _swiglu(f"{prefix}.experts.{expert}", hidden, shape.moe_intermediate_size, dtype)
    yield from _swiglu(f"{prefix}.shared_experts", hidden, shape.shared_intermediate_size, dtype)


def _swiglu(prefix: str, hidden: int, inner: int, dtype: torch.dtype) -> Iterator[TensorSpec]:
    yield _projection(f"{prefix}.w1", inner, hidden, dtype)
    yield _projection(f"{prefix}.w2", hidden, inner, dtype, EXPERT_GAIN)
    yield _projection(f"{prefix}.w3", inner, hidden, dtype)
