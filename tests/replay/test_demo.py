"""The demonstration's flow and verdict, with a stand-in for the servers: the real one is what `make demo` runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from sglang_dsv4x import demo
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import MakeModelError

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in reads no checkpoint."""
    monkeypatch.setattr(demo, "make_model", lambda config, out, **_: None)


def run(
    out: Path, off: tuple[str, ...] = (), on: tuple[str, ...] = ("--tier",), turns: int | None = 3
) -> int:
    def serve(argv: list[str], log: Path) -> Server:
        tier = argv[argv.index("--dsv4x-tier") + 1]
        return Server(on if tier == "on" else off, log, {"PYTHONPATH": HERE}, module="wire_server")

    args = argparse.Namespace(out=out, max_turns=turns, no_progress=True)
    return demo.run_demo(args, serve)


def test_equal_bits_with_most_reads_missing_is_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, turns=None) == 0
    text = capsys.readouterr().out
    assert "equal turns             16 of 16" in text
    assert "equal log-probabilities 263 of 263, bit for bit" in text
    assert "75.0 %" in text and "OK: the tier changed no output bit." in text
    for tier in ("off", "on"):
        assert len(json.loads((tmp_path / f"{tier}.json").read_text())["runs"][0]["turns"]) == 16


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (("--tier", "--shift", "1e-15"), "log-probabilities differ from output token"),
        (("--tier", "--miss-share", "0.4"), "only 40.0 % of the selected entries missed"),
        ((), "publishes no tier counters"),
    ],
)
def test_what_shows_nothing_or_differs_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on: tuple[str, ...], words: str
):
    assert run(tmp_path, on=on) == 1
    text = capsys.readouterr().out
    assert "FAILED: " in text and words in text and "OK" not in text


def test_a_failed_turn_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, off=("--fault", "2", "500")) == 1
    assert "tier off: turn 2 failed: HTTP 500" in capsys.readouterr().err


def test_a_server_that_dies_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, on=("--die-at-start", "9")) == 1
    assert "exit code 9" in capsys.readouterr().err


def test_a_model_that_cannot_be_made_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: object, **__: object) -> None:
        raise MakeModelError("disk full")

    monkeypatch.setattr(demo, "make_model", full)
    assert run(tmp_path) == 1
    assert "disk full" in capsys.readouterr().err


def test_the_hot_cache_is_as_small_as_it_may_be():
    argv = demo.server_arguments(Path("m"), "on")
    # 2 (unit) * (2 requests * (64 selected + 2) + 256 / 4)
    assert argv[argv.index("--dsv4x-hot-entries") + 1] == "392"
