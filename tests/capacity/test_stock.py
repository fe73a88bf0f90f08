"""Our reproduction of stock SGLang's sizing equals SGLang's own class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4x import configs
from sglang_dsv4x.capacity import stock
from sglang_dsv4x.capacity.shape import CacheShape

GIB = 1 << 30


def stock_configurator(ratios: list[int], ratio: float, requests: int, shrink: int = 1) -> Any:
    """SGLang's DSV4PoolConfigurator, told what it asks its KVCacheConfigurator."""
    module = pytest.importorskip("sglang.srt.model_executor.pool_configurator")
    arguments = SimpleNamespace(
        swa_full_tokens_ratio=ratio,
        speculative_algorithm=None,
        max_speculative_num_draft_tokens=None,
        max_running_requests=requests,
        disaggregation_mode="null",
        disaggregation_decode_extra_slots=None,
        enable_hisparse=shrink > 1,
        hisparse_config=f'{{"host_to_device_ratio": {shrink}}}',
    )
    return module.DSV4PoolConfigurator(
        SimpleNamespace(
            kv_cache_dtype_str="fp8_e4m3",
            model_config=SimpleNamespace(
                qk_nope_head_dim=448,
                qk_rope_head_dim=64,
                index_head_dim=128,
                context_len=1 << 20,
                compress_ratios=[*ratios, 0],
                window_size=128,
            ),
            layer_info=SimpleNamespace(start_layer=0, end_layer=len(ratios)),
            ps=SimpleNamespace(pp_size=1, attn_dp_size=1),
            server_args=arguments,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )
    )


def shape_of(ratios: list[int]) -> CacheShape:
    tiny = configs.load("tiny")
    return CacheShape.of({**tiny, "num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0]})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=64),
    st.floats(0.001, 1.0),
    st.integers(1, 4096),
    st.integers(0, 200 * GIB),
    st.sampled_from((1, 2, 8)),
)
def test_tokens_and_window_tokens_are_those_of_sglangs_class(
    ratios: list[int], ratio: float, requests: int, budget: int, shrink: int
) -> None:
    theirs = stock_configurator(ratios, ratio, requests, shrink)
    shape = shape_of(ratios)
    assert stock.bytes_per_token(shape, ratio, shrink) == pytest.approx(
        theirs.bytes_per_full_token, rel=1e-12
    )
    ours = stock.sizes(shape, budget, requests, ratio=ratio, shrink=shrink)
    if ours.tokens == 0:
        with pytest.raises(RuntimeError, match="Not enough memory"):
            theirs.calculate_pool_sizes(budget, 256)
        return
    config = theirs.calculate_pool_sizes(budget, 256)
    assert (ours.tokens, ours.window_tokens) == (
        config.max_total_num_tokens,
        config.swa_max_total_num_tokens,
    )


@pytest.mark.parametrize(
    ("model", "ratio", "shrink", "price"),
    [
        ("flash", 0.1, 1, 7705.5),
        ("flash", 0.02, 1, 4621.3),
        ("flash", 0.1, 8, 5022.7),
        ("pro", 0.1, 1, 10993.8),
    ],
)
def test_price_of_a_token_at_known_settings(model: str, ratio: float, shrink: int, price: float) -> None:
    shape = CacheShape.of(configs.load(model))
    assert round(stock.bytes_per_token(shape, ratio, shrink), 1) == price


def test_the_best_tuned_ratio_is_the_lowest_whose_window_pool_is_large_enough() -> None:
    shape = CacheShape.of(configs.load("flash"))
    budget, requests, need = 50 * GIB, 64, 60_000
    best = stock.best_tuned(shape, budget, requests, need)
    assert best.window_tokens >= need
    assert best.tokens > stock.sizes(shape, budget, requests).tokens
    lower = stock.sizes(shape, budget, requests, ratio=best.ratio * 0.99)
    assert lower.window_tokens < need
