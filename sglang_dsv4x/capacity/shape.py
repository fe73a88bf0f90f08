"""What a DeepSeek-V4 configuration says about its caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..jit_kernels.layouts import HEAD_DIM, INDEX_HEAD_DIM, ROPE_DIM
from .errors import PlanError

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)
WINDOW = 128

_FIXED = {
    # Key -> the value that the byte layouts are made for.
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "index_head_dim": INDEX_HEAD_DIM,
    "num_key_value_heads": 1,
    "sliding_window": WINDOW,
}


@dataclass(frozen=True)
class CacheShape:
    """Layers by kind of cache. Window KV exists in every layer."""

    layers: int
    c4_layers: int
    c128_layers: int
    top_k: int
    """C4 entries that a query selects at most."""
    max_context: int
    """Tokens: `max_position_embeddings`."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> CacheShape:
        """From a Hugging Face `config.json`, whose compression ratios beyond the decoder layers belong to MTP blocks.

        Raises: PlanError, naming the key, for a configuration that is not DeepSeek-V4 or has other row layouts.
        """
        names = config.get("architectures") or []
        kind = config.get("model_type")
        if kind != MODEL_TYPE and not (kind is None and ARCHITECTURE in names):
            raise PlanError(
                f"This is not a DeepSeek-V4 configuration (model_type {kind!r}, architectures {names!r}): only "
                f"{MODEL_TYPE!r} has the caches that this plan counts."
            )
        for key, value in _FIXED.items():
            if config.get(key) != value:
                raise PlanError(
                    f"{key} is {config.get(key)!r}, but DeepSeek-V4's cache rows are laid out for {value}."
                )
        layers = _positive(config, "num_hidden_layers")
        ratios = config.get("compress_ratios")
        if not isinstance(ratios, list) or len(ratios) < layers:
            raise PlanError(f"compress_ratios must be a list with one ratio for each of the {layers} layers.")
        ratios = ratios[:layers]
        for ratio in ratios:
            if isinstance(ratio, bool) or ratio not in RATIOS:
                raise PlanError(f"compress_ratios holds {ratio!r}; a layer's ratio is one of 0, 4 and 128.")
        return cls(
            layers=layers,
            c4_layers=ratios.count(4),
            c128_layers=ratios.count(128),
            top_k=_positive(config, "index_topk"),
            max_context=_positive(config, "max_position_embeddings"),
        )


def _positive(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{key} is {value!r}; a DeepSeek-V4 configuration has a positive integer there.")
    return value
