"""What `sglang-dsv4x plan` says: limits that hold, comparisons with stock, warnings, and refusals in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4x import cli, configs
from sglang_dsv4x.capacity import stock
from sglang_dsv4x.capacity.byte_model import PAGE, Settings, objects, total
from sglang_dsv4x.capacity.fit import HOST, Budget, Fitter
from sglang_dsv4x.capacity.machine import LINK, default_mem_fraction
from sglang_dsv4x.capacity.shape import CacheShape

GIB = 1 << 30
FLASH, PRO = (CacheShape.of(configs.load(name)) for name in ("flash", "pro"))


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def variant(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(v for v in answer["variants"] if v["name"] == name)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((FLASH, PRO)),
    st.booleans(),
    st.sampled_from(("fp4", "fp8")),
    st.integers(4 * GIB, 120 * GIB),
    st.one_of(st.none(), st.integers(0, 400 * GIB)),
    st.integers(1, 1 << 20),
)
def test_what_fits_fits_and_one_more_does_not(
    shape: CacheShape, tier: bool, dtype: Any, device: int, host: int | None, context: int
) -> None:
    fitter = Fitter(shape, Settings(tier=tier, index_dtype=dtype), Budget(device, host))
    fit = fitter.most_requests(context)
    most = fitter.most_tokens(max(1, fit.requests))
    for requests, tokens in ((fit.requests, fit.tokens), (max(1, fit.requests), most.tokens)):
        if requests and tokens:
            found = objects(shape, fitter.settings, fitter.sizes(tokens, requests))
            assert total(found, "device") <= device
            assert host is None or total(found, "host") <= host
    assert fit.requests == 0 or most.tokens >= fit.tokens
    assert fitter.limit(fit.tokens + -(-context // PAGE) * PAGE, fit.requests + 1) == fit.limit
    assert fitter.limit(most.tokens + PAGE, max(1, fit.requests)) == most.limit


@pytest.mark.parametrize("requests", [16, 64])
def test_flash_with_fp4_keys_has_twelve_times_stocks_tokens_and_seven_times_its_best(requests: int) -> None:
    """At the same device bytes and running requests; stock's formula is held against SGLang's class elsewhere."""
    budget = 64 * GIB
    fitter = Fitter(FLASH, Settings(), Budget(budget, None))
    tokens = fitter.most_tokens(requests).tokens
    best = stock.best_tuned(FLASH, budget, requests, fitter.needed_window(requests))
    assert tokens >= 12 * stock.sizes(FLASH, budget, requests).tokens
    assert tokens >= 7 * best.tokens


def test_a_million_tokens_of_flash_on_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys, "--model", "flash", "--context", "1048576", "--gpu", "h200")
    assert answer["machine"]["gpus"] == 2  # 148.7 GiB of weights do not fit one
    assert answer["model"]["payload_bytes_per_request"] / GIB == pytest.approx(3.435, abs=5e-4)
    on, off = variant(answer, "tier on"), variant(answer, "tier off")
    assert on["requests"] > 6 * off["requests"] > 6 * variant(answer, "stock SGLang")["requests"]
    # Padded C128 pages, MXFP4 keys, per unit of two entries a tag in each layer and two claims of the kernels, the
    # SWA location of every token, a free list.
    per_unit = 21 * 4 + 16
    assert on["device_bytes_per_token"] == 20 * 1728 / 256 + 21 * 68 / 4 + per_unit / 8 + 8 + 8 / 256
    point = 43 * 128 * 584 + 21 * 4 * (8192 + 2048)
    store, points = 21 * 584 * (on["requests"] * (1 << 18) + 64), 4 * GIB // point * point
    assert answer["host_bytes_needed_node"] == 2 * (store + points)
    assert (
        sum(o["bytes"] for o in answer["objects"] if o["where"] == "device")
        <= answer["machine"]["device_budget_bytes"]
    )


def test_replicas_and_attention_groups_share_weights_and_host_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ("--context", "131072", "--host-memory-gb", "800")
    replicas = plan(capsys, *common, "--tp-size", "2", "--dp-size", "4")["machine"]
    groups = plan(capsys, *common, "--tp-size", "8", "--dp-size", "8", "--enable-dp-attention")["machine"]
    assert (replicas["gpus"], groups["gpus"]) == (8, 8)
    assert plan(capsys, *common, "--gpus", "8", "--dp-size", "4")["machine"] == replicas
    assert replicas["weight_bytes_per_gpu"] == pytest.approx(4 * groups["weight_bytes_per_gpu"], abs=4)
    assert replicas["host_budget_bytes"] == groups["host_budget_bytes"] == 100 * GIB


def test_short_contexts_gain_nothing_and_the_plan_says_from_where_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = plan(capsys, "--context", "4096")
    at = short["break_even_context"]
    assert any("The tier buys nothing" in text and "too short" in text for text in short["warnings"])
    assert 4096 < at < 16384
    longer = plan(capsys, "--context", str(at))
    assert variant(longer, "tier on")["requests"] > variant(longer, "tier off")["requests"]


def test_host_memory_that_limits_is_named_with_what_would_not(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys, "--context", "131072", "--host-memory-gb", "20")
    assert (answer["limit"], answer["token_limit"]) == (HOST, HOST)
    few = plan(capsys, "--context", "131072", "--host-memory-gb", "20", "--max-running-requests", "2")
    assert (few["limit"], few["token_limit"]) == ("running requests (--max-running-requests)", HOST)
    assert any("Host memory is the limit" in text for text in answer["warnings"])
    assert any("buys nothing" in text and "host memory is too small" in text for text in answer["warnings"])
    enough = answer["host_bytes_to_fill_device_node"] / GIB + 0.1
    again = plan(capsys, "--context", "131072", "--host-memory-gb", str(enough))
    assert again["limit"] == "device memory"


def test_a_link_that_cannot_keep_up_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    slow = plan(capsys, "--context", "131072", "--link-gb-per-s", "5", "--miss-rate", "0.5")
    assert any("The link is too slow" in text for text in slow["warnings"])
    assert slow["traffic"]["share"] > 1
    calm = plan(capsys, "--context", "131072", "--requests", "1", "--max-running-requests", "16")
    assert not any("link" in text for text in calm["warnings"])


@pytest.mark.parametrize(
    ("rows", "microseconds"), [(69, 6.6), (276, 13.6), (1104, 41.8), (4416, 151), (8192, 269), (32768, 931)]
)
def test_the_link_model_is_near_what_was_measured(rows: int, microseconds: float) -> None:
    """Gathers of single contiguous rows of an 8 GiB store, cold L2, one H200."""
    assert LINK.seconds(rows, 584) * 1e6 == pytest.approx(microseconds, rel=0.18)


def test_the_default_memory_fraction_is_sglangs() -> None:
    assert default_mem_fraction(139 * GIB, 8192, 1) == 0.909
    assert default_mem_fraction(139 * GIB, 2048, 8) == 0.928  # at least 10 GiB stay free


def test_given_hot_entries_limit_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys, "--context", "131072", "--hot-entries", "20000")
    # 2 * (n * 514 + 8192 / 4) <= 20000
    assert (variant(answer, "tier on")["requests"], answer["limit"]) == (15, "hot entries (--hot-entries)")


def test_a_config_file_and_its_weights_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.load("tiny")))
    (tmp_path / "model-00001.safetensors").write_bytes(b"\0" * 4096)
    answer = plan(capsys, "--model", str(tmp_path), "--gpu-memory", "16")
    assert answer["machine"]["weight_bytes"] == 4096
    assert answer["context"] == 65536


def test_the_table_names_every_object_and_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--context", "131072", "--host-memory-gb", "400"]) == 0
    text = capsys.readouterr().out
    for item in objects(FLASH, Settings(), Fitter(FLASH, Settings(), Budget(0, None)).sizes(PAGE, 1)):
        assert item.name in text
    for words in ("tier on", "stock, best SWA ratio", "limited by", "Host memory needed", "link busy"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "a100x"], "--gpu a100x is unknown; choose one of b200, h100, h200"),
        (["--model", "nowhere"], "'nowhere' is neither a known shape"),
        (["--tp-size", "1"], "leave no memory"),
        (["--tp-size", "0"], "--tp-size 0"),
        (["--gpus", "8", "--tp-size", "4"], "--gpus 8 does not agree"),
        (["--gpus", "8", "--dp-size", "3"], "--gpus 8 does not agree"),
        (["--gpus", "0"], "--tp-size 0"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static is 1.5"),
        (["--context", "2000000"], "longer than the model's 1048576 positions"),
        (["--context", "0"], "--context is 0"),
        (["--requests", "500", "--tp-size", "2"], "500 requests of 1048576 tokens need"),
        (["--requests", "4", "--host-memory-gb", "10"], "of host memory (2 ranks) and 10.00 GiB are given"),
        (["--host-memory-gb", "1"], "of host memory (2 ranks) and 1.00 GiB are given"),
        (["--host-memory-gb", "-3"], "--host-memory-gb is -3"),
        (["--requests", "9", "--max-running-requests", "8"], "cannot run at once"),
        (["--hot-entries", "100"], "--dsv4x-hot-entries is 100, fewer than one step can need"),
        (["--weights", "0"], "--weights is 0"),
        (["--weights", "nan"], "--weights is nan"),
        (["--host-memory-gb", "inf"], "--host-memory-gb is inf"),
        (["--miss-rate", "2"], "--miss-rate is 2"),
        (["--miss-rate", "nan"], "--miss-rate is nan"),
        (["--step-ms", "0"], "--step-ms"),
        (["--link-gb-per-s", "nan"], "--link-gb-per-s"),
        (["--gpu-memory", "0"], "--gpu-memory is 0"),
        (["--gpu-memory", "1"], "smaller than what SGLang leaves free"),
        (["--chunked-prefill-size", "-1"], "--chunked-prefill-size is -1"),
        (["--tp-size", "4", "--dp-size", "3", "--enable-dp-attention"], "to divide --tp-size 4"),
        (["--plot", "/nowhere/plan.png"], "/nowhere/plan.png cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_an_exit_code(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert cli.main(["plan", *arguments]) == 1
    out, err = capsys.readouterr()
    assert words in err and out == ""
    assert err.startswith("sglang-dsv4x plan: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v41"}, "not a DeepSeek-V4 configuration"),
        ({"compress_ratios": [0, 0, 128, 128, 128, 128, 128]}, "no C4 layer"),
    ],
)
def test_another_model_is_one_sentence_and_an_exit_code(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**configs.load("tiny"), **change}))
    assert cli.main(["plan", "--model", str(file), "--weights", "1"]) == 1
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_the_plot_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plan", "--context", "65536", "--plot", str(tmp_path / name)]) == 0
    assert (tmp_path / name).stat().st_size > 5000


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plan", "--plot", str(tmp_path / "plan.png")]) == 1
    assert "pip install 'sglang-dsv4x[plot]'" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error() -> None:
    """`sglang-dsv4x plan | head -1`."""
    command = f"set -o pipefail; {sys.executable} -m sglang_dsv4x.cli plan --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")
