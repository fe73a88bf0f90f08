"""The sizes of a DeepSeek-V4 configuration, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import MakeModelError

RATIOS = (0, 4, 128)
"""Tokens per compressed entry of a layer; 0: the layer has a sliding window only."""


@dataclass(frozen=True)
class ModelShape:
    """What decides the tensors of a checkpoint; names follow the released `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    hc_mult: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModelShape:
        """Raises MakeModelError, naming the key, for a configuration that is not DeepSeek-V4 or does not add up."""
        if config.get("model_type") != "deepseek_v4":
            raise MakeModelError(
                f"model_type is {config.get('model_type')!r}; only 'deepseek_v4' checkpoints can be made."
            )
        if config.get("tie_word_embeddings"):
            raise MakeModelError(
                "tie_word_embeddings is true; DeepSeek-V4 has an output head of its own. Set it to false."
            )
        layers = _positive(config, "num_hidden_layers")
        shape = cls(
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=_positive(config, "hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=_positive(config, "num_attention_heads"),
            head_dim=_positive(config, "head_dim"),
            q_lora_rank=_positive(config, "q_lora_rank"),
            o_lora_rank=_positive(config, "o_lora_rank"),
            o_groups=_positive(config, "o_groups"),
            compress_ratios=_ratios(config, layers),
            index_n_heads=_positive(config, "index_n_heads"),
            index_head_dim=_positive(config, "index_head_dim"),
            hc_mult=_positive(config, "hc_mult"),
            moe_intermediate_size=_positive(config, "moe_intermediate_size"),
            n_routed_experts=_positive(config, "n_routed_experts"),
            n_shared_experts=_positive(config, "n_shared_experts"),
            num_experts_per_tok=_positive(config, "num_experts_per_tok"),
            num_hash_layers=_integer(config, "num_hash_layers", at_least=0),
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
        )
        if shape.num_attention_heads % shape.o_groups:
            raise MakeModelError(
                f"num_attention_heads {shape.num_attention_heads} is not a multiple of o_groups {shape.o_groups}."
            )
        if shape.num_experts_per_tok > shape.n_routed_experts:
            raise MakeModelError(
                f"num_experts_per_tok {shape.num_experts_per_tok} exceeds n_routed_experts {shape.n_routed_experts}."
            )
        return shape

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of each decoder layer, without the trailing ones of the MTP blocks."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts


def _integer(config: dict[str, Any], key: str, *, at_least: int) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise MakeModelError(f"{key} is {value!r}; give an integer of at least {at_least}.")
    return value


def _positive(config: dict[str, Any], key: str) -> int:
    return _integer(config, key, at_least=1)


def _ratios(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise MakeModelError(
            f"compress_ratios is {ratios!r}; give a list with one ratio for each of {layers} layers."
        )
    wrong = sorted({repr(ratio) for ratio in ratios if ratio not in RATIOS})
    if wrong:
        raise MakeModelError(f"compress_ratios holds {', '.join(wrong)}; choose each of {RATIOS}.")
    return tuple(ratios)
