"""Pool sizes follow from bytes: nothing is promised that does not fit, and the first limit is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dsv4x.hicache.host_memory import HostMemory

from sglang_dsv4x import configs
from sglang_dsv4x.capacity import stock
from sglang_dsv4x.capacity.byte_model import PAGE, Sizes, objects, total
from sglang_dsv4x.capacity.window import needed_window_tokens, smallest_window_tokens
from sglang_dsv4x.config import CONFIG_VARIABLE, Dsv4xConfig

pytest.importorskip("sglang")

from sglang_dsv4x.engine import sizing
from sglang_dsv4x.engine.allocated import AllocationError, check_allocation
from sglang_dsv4x.engine.sizing import Dsv4xPoolConfigurator, SizedPoolConfig, SizingError, describe

GIB = 1 << 30
CHUNK = 8192


def configurator(
    patch: pytest.MonkeyPatch,
    *,
    ratio: float | None = None,
    requests: int = 64,
    model: str = "flash",
    host: int = 4096 * GIB,
    **flags: Any,
) -> Dsv4xPoolConfigurator:
    """Ours, told what it asks SGLang's KVCacheConfigurator, on a machine with `host` bytes free. `flags` are fields of
    Dsv4xConfig."""
    patch.setenv(CONFIG_VARIABLE, Dsv4xConfig(enable=True, **flags).to_json())
    patch.setattr(sizing, "host_memory", lambda: HostMemory(host, host, None, None))
    shape = configs.load(model)
    arguments = SimpleNamespace(
        swa_full_tokens_ratio=0.1 if ratio is None else ratio,
        dsv4x_swa_ratio_given=ratio is not None,
        chunked_prefill_size=CHUNK,
        mem_fraction_static=0.9,
        speculative_algorithm=None,
        max_speculative_num_draft_tokens=None,
        max_running_requests=requests,
        disaggregation_mode="null",
        disaggregation_decode_extra_slots=None,
        enable_hisparse=False,
        disable_radix_cache=False,
    )
    return Dsv4xPoolConfigurator(
        SimpleNamespace(
            device="cuda",
            kv_cache_dtype_str="fp8_e4m3",
            model_config=SimpleNamespace(
                qk_nope_head_dim=448,
                qk_rope_head_dim=64,
                index_head_dim=128,
                context_len=1 << 17,
                compress_ratios=shape["compress_ratios"],
                window_size=128,
                hf_text_config=SimpleNamespace(index_topk=shape["index_topk"]),
            ),
            layer_info=SimpleNamespace(start_layer=0, end_layer=shape["num_hidden_layers"]),
            ps=SimpleNamespace(pp_size=1, attn_dp_size=1),
            server_args=arguments,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )
    )


def sized(found: Any) -> SizedPoolConfig:
    assert isinstance(found, SizedPoolConfig)
    return found


def device_bytes(chosen: Dsv4xPoolConfigurator, config: SizedPoolConfig, requests: int) -> int:
    sizes = Sizes(config.max_total_num_tokens, config.swa_max_total_num_tokens or 0, requests)
    return total(objects(chosen.shape, chosen.settings, sizes), "device")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(8 * GIB, 120 * GIB),
    st.integers(1, 128),
    st.one_of(st.none(), st.floats(0.005, 0.5)),
    st.sampled_from(("on", "off")),
    st.sampled_from(("flash", "pro")),
)
def test_the_tokens_fill_the_device_memory_and_no_more(
    device: int, requests: int, ratio: float | None, tier: str, model: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        chosen = configurator(
            patch, ratio=ratio, requests=requests, model=model, tier=tier, host_memory_gb=4000
        )
        try:
            found = sized(chosen.calculate_pool_sizes(device, PAGE))
        except SizingError as error:
            assert "--max-running-requests" in str(error) or "--swa-full-tokens-ratio" in str(error)
            return
    assert device_bytes(chosen, found, requests) <= device
    page_more = Sizes(found.max_total_num_tokens + PAGE, found.swa_max_total_num_tokens or 0, requests)
    # One more SWA page, which a share may add, and an SWA pool that is as large as there are tokens.
    grows = ratio is not None or found.swa_max_total_num_tokens == found.max_total_num_tokens
    slack = PAGE * 70_000 if grows else 0
    assert total(objects(chosen.shape, chosen.settings, page_more), "device") > device - slack
    assert "device memory (--mem-fraction-static 0.9)" in describe(found)


def test_window_tokens_follow_the_requests_and_not_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = configurator(monkeypatch, requests=16, host_memory_gb=4000)
    small = sized(chosen.calculate_pool_sizes(20 * GIB, PAGE))
    large = sized(chosen.calculate_pool_sizes(80 * GIB, PAGE))
    assert large.max_total_num_tokens > 4 * small.max_total_num_tokens
    assert small.swa_max_total_num_tokens == large.swa_max_total_num_tokens
    assert large.swa_max_total_num_tokens == needed_window_tokens(CHUNK, 16, tails=16)


def test_flash_gets_twelve_times_stocks_tokens_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every state ring once: SGLang's own sizing holds 16 rows where 8 are addressed."""
    chosen = configurator(monkeypatch, host_memory_gb=4000)
    found = sized(chosen.calculate_pool_sizes(64 * GIB, PAGE))
    assert found.max_total_num_tokens >= 12 * stock.sizes(chosen.shape, 64 * GIB, 64).tokens
    assert found.c4_state_pool_size == (found.swa_max_total_num_tokens or 0) // 256 * 8


def test_the_host_store_limits_the_tokens_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = configurator(monkeypatch, host_memory_gb=10)
    found = sized(chosen.calculate_pool_sizes(64 * GIB, PAGE))
    rows = 21 * (found.max_total_num_tokens // 4 + 64)
    assert rows * 584 <= 10 * GIB < (rows + 21 * 64) * 584
    assert "host memory (--dsv4x-host-memory-gb 10)" in describe(found)
    assert chosen.calculate_pool_sizes_from_max_tokens(1 << 40, PAGE) == found


@pytest.mark.parametrize(
    ("flags", "share", "words"),
    [
        ({}, 0.8, "20.00 GiB are available, 80% of it used"),
        ({"host_memory_gb": 100}, 1.0, "20.00 GiB are available, less than --dsv4x-host-memory-gb 100"),
    ],
)
def test_free_host_memory_limits_rows_and_resume_points_together(
    flags: dict[str, Any], share: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = configurator(monkeypatch, host=20 * GIB, **flags)
    found = sized(chosen.calculate_pool_sizes(64 * GIB, PAGE))
    assert words in describe(found)
    sizes = Sizes(found.max_total_num_tokens, found.swa_max_total_num_tokens or 0, 64)
    assert (
        0 <= share * 20 * GIB - total(objects(chosen.shape, chosen.settings, sizes), "host") < 21 * 64 * 584
    )


def test_a_given_ratio_and_given_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = configurator(monkeypatch, ratio=0.25, host_memory_gb=100)
    chosen.calculate_pool_sizes(64 * GIB, PAGE)
    found = sized(chosen.calculate_pool_sizes_from_max_tokens(100_000, PAGE))
    assert (found.max_total_num_tokens, found.swa_max_total_num_tokens) == (99_840, 24_832)
    assert "limited by --max-total-tokens" in describe(found)
    assert "--swa-full-tokens-ratio 0.25" in describe(found)


def test_with_device_memory_to_spare_the_window_pool_is_sglangs_share_and_no_less_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = configurator(monkeypatch, requests=2, host_memory_gb=100)
    chosen.calculate_pool_sizes(64 * GIB, PAGE)
    large = sized(chosen.calculate_pool_sizes_from_max_tokens(1_000_000, PAGE))
    assert large.swa_max_total_num_tokens == 99_840
    small = sized(chosen.calculate_pool_sizes_from_max_tokens(20_000, PAGE))
    assert small.swa_max_total_num_tokens == needed_window_tokens(CHUNK, 2, tails=2)


def test_a_given_ratio_that_is_too_low_is_refused_with_the_number_that_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = configurator(monkeypatch, ratio=0.01, host_memory_gb=100)
    with pytest.raises(SizingError, match=f"at least {smallest_window_tokens(CHUNK)}, or lower"):
        chosen.calculate_pool_sizes_from_max_tokens(100_000, PAGE)


@pytest.mark.parametrize(
    ("device", "flags", "words"),
    [
        (1 * GIB, {"host_memory_gb": 10}, "does not hold one page beside what 64 running requests take"),
        (
            64 * GIB,
            {"host_memory_gb": 0.0001},
            "is less than resume points .* GiB. and the C4 rows of one page",
        ),
        (64 * GIB, {"hot_entries": 100, "host_memory_gb": 10}, "--dsv4x-hot-entries is 100"),
    ],
)
def test_when_nothing_fits_the_flag_to_change_is_named(
    device: int, flags: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = configurator(monkeypatch, **flags)
    with pytest.raises(SizingError, match=words):
        chosen.calculate_pool_sizes(device, PAGE)


def test_less_than_a_page_of_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = configurator(monkeypatch, host_memory_gb=10)
    with pytest.raises(SizingError, match="--max-total-tokens is 255"):
        chosen.calculate_pool_sizes_from_max_tokens(255, PAGE)


def test_an_object_of_other_bytes_than_charged_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One index dtype charged and another allocated, or states held twice, would promise what is not there."""
    chosen = configurator(monkeypatch)
    predicted = objects(chosen.shape, chosen.settings, Sizes(1 << 20, 1 << 15, 64))
    held = {item.name: item.bytes for item in predicted if not item.staging}
    check_allocation(predicted, held)
    check_allocation(predicted, {**held, "C4 KV, tables": held["C4 KV, tables"] + 4})
    for change in ({"C4 index keys": held["C4 index keys"] * 132 // 68}, {"unknown": 1 << 20}):
        with pytest.raises(AllocationError, match=next(iter(change))):
            check_allocation(predicted, {**held, **change})
    del held["window KV"]
    with pytest.raises(AllocationError, match=r"window KV .* predicted, 0 allocated"):
        check_allocation(predicted, held)
