"""How stock SGLang 0.5.17 sizes the same pools: its formula, with its rounding, for comparison.

Source: `srt/model_executor/pool_configurator.py: DSV4PoolConfigurator`, without speculation, online C128 compression,
pipeline stages and disaggregation. It charges SWA rows and C4 states at a share of the length, index keys at 132 B
whatever their type, C4 states twice, and no page padding; tests compare this module with the class itself.
"""

from __future__ import annotations

from typing import NamedTuple

from ..jit_kernels.layouts import HEAD_DIM, INDEX_HEAD_DIM, main_layout
from .byte_model import C4_STATE_RING, PAGE, c128_state_bytes
from .shape import WINDOW, CacheShape

DEFAULT_RATIO = 0.1
"""--swa-full-tokens-ratio that SGLang sets for DeepSeek-V4."""


class StockSizes(NamedTuple):
    """What stock would serve with."""

    tokens: int
    window_tokens: int
    ratio: float


def bytes_per_token(
    shape: CacheShape, ratio: float = DEFAULT_RATIO, shrink: int = 1, state_bytes: int = 4
) -> float:
    """What stock charges for a token. `shrink`: HiSparse's host_to_device_ratio, 1 without HiSparse."""
    row = main_layout(1).row_bytes
    index_row = INDEX_HEAD_DIM + INDEX_HEAD_DIM // 128 * 4
    state_rows = ratio * (C4_STATE_RING / WINDOW)
    return (
        ratio * row * shape.layers
        + 1 / (4 * shrink) * row * shape.c4_layers
        + 1 / 128 * row * shape.c128_layers
        + 1 / 4 * index_row * shape.c4_layers
        + state_rows * 2 * 2 * HEAD_DIM * state_bytes * shape.c4_layers
        + state_rows * 2 * 2 * INDEX_HEAD_DIM * state_bytes * shape.c4_layers
    )


def sizes(
    shape: CacheShape,
    budget: int,
    requests: int,
    *,
    ratio: float = DEFAULT_RATIO,
    shrink: int = 1,
    state_bytes: int = 4,
) -> StockSizes:
    """What stock makes of `budget` bytes for `requests` running requests (--max-running-requests)."""
    fixed = c128_state_bytes(shape, requests, state_bytes) if shape.c128_layers else 0
    tokens = int(max(budget - fixed, 0) / bytes_per_token(shape, ratio, shrink, state_bytes))
    tokens = tokens // PAGE * PAGE
    return StockSizes(tokens, int(tokens * ratio) // PAGE * PAGE, ratio)


def best_tuned(
    shape: CacheShape, budget: int, requests: int, window_tokens: int, *, state_bytes: int = 4
) -> StockSizes:
    """`sizes` at the lowest ratio whose SWA pool still holds `window_tokens`; at 1 when even that is too low.

    Solves ratio = window_tokens / tokens(ratio), whose right side rises with the ratio, by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = sizes(shape, budget, requests, ratio=middle, state_bytes=state_bytes)
        if found.window_tokens >= window_tokens:
            high = middle
        else:
            low = middle
    return sizes(shape, budget, requests, ratio=high, state_bytes=state_bytes)
