"""`sglang-dsv4x verify` against a real HTTP server with a prefix cache: what passes, and that every check can fail."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))
from wire_server import WireServer, serving

from sglang_dsv4x.verify import command
from sglang_dsv4x.verify.answers import Answer, distance
from sglang_dsv4x.verify.checks import tier_findings


@contextmanager
def served(server: WireServer) -> Iterator[str]:
    """The server in a thread of its own: the command runs an event loop itself."""
    ready, stop, urls = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def go() -> None:
        async with serving(server) as url:
            urls.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(go(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def run(server: WireServer, tmp_path: Path, *more: str) -> tuple[int, list[dict[str, str]]]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = tmp_path / "findings.json"
    with served(server) as url:
        code = command.run(parser.parse_args(["--base-url", url, "--json", str(out), *more]))
    return code, json.loads(out.read_text())["findings"]


def those(findings: list[dict[str, str]], status: str) -> set[str]:
    return {f["check"] for f in findings if f["status"] == status}


def test_a_server_that_caches_as_it_should_passes_everything(tmp_path: Path):
    code, findings = run(WireServer(tier=True), tmp_path)
    assert code == 0 and {f["status"] for f in findings} == {"pass"}
    names = [f["check"] for f in findings]
    assert names.count("repeat") == 3 and names.count("fork") == 6 and names.count("resume") == 3
    assert {"tier: selections", "tier: bytes to device", "tier: bytes to host", "tier: fetches"} <= set(names)


def test_a_stock_server_passes_and_the_tier_is_skipped_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, findings = run(WireServer(), tmp_path)
    assert code == 0 and those(findings, "skip") == {"tier"} and not those(findings, "fail")
    text = capsys.readouterr().out
    assert "SKIP  tier: a stock server" in text and "OK: 14 passed, 1 skipped" in text


def test_a_lost_tail_is_a_note_on_a_stock_server_and_a_failure_with_the_extension(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The field's commonest complaint: the data is there, the window is not, and nothing is hit."""
    code, findings = run(WireServer(lost_tails=900), tmp_path)
    assert code == 0 and {"repeat", "fork", "resume"} <= those(findings, "note")
    code, findings = run(WireServer(lost_tails=900, tier=True), tmp_path)
    assert code == 1 and {"repeat", "fork", "resume"} <= those(findings, "fail")
    assert "likely cause: the prefix's window (SWA) pages were evicted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "failed", "cause"),
    [
        (WireServer(radix=False), {"repeat", "fork", "resume"}, "--disable-radix-cache"),
        (WireServer(salted=False), {"spread"}, "extra_key is ignored"),
        (WireServer(tier=True, keep_outputs=False), {"resume"}, "window (SWA) pages"),
        (WireServer(wrong_hits=True), {"outputs", "fork", "resume"}, "the hit used wrong bytes"),
        (WireServer(tier=True, miscount={"selected": 1}), {"tier: selections"}, "lost or counted twice"),
        (WireServer(tier=True, miscount={"bytes_to_device": 8}), {"tier: bytes to device"}, "counted twice"),
        (WireServer(tier=True, moves=False), {"tier: fetches", "tier: bytes to host"}, "not in the path"),
        (WireServer(faults={14: "500"}), {"repeat"}, "the server's log has the reason"),
    ],
    ids=["radix off", "unsalted", "prompts only", "wrong", "selections", "bytes", "idle tier", "500"],
)
def test_every_check_fails_for_what_it_is_there_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: WireServer, failed: set[str], cause: str
):
    code, findings = run(server, tmp_path)
    assert code == 1 and those(findings, "fail") == failed
    text = capsys.readouterr().out
    assert cause in text and "FAILED: " in text
    assert all(f["expected"] and f["found"] and f["cause"] for f in findings if f["status"] == "fail")


def test_the_servers_own_spread_is_the_limit(tmp_path: Path):
    """A server that is noisy by itself is not blamed for noise of that size over hits."""
    code, findings = run(WireServer(noise=0.01), tmp_path)
    assert "outputs" not in those(findings, "fail"), findings
    code, findings = run(WireServer(noise=0.01, wrong_hits=True), tmp_path)
    assert code == 1 and "outputs" in those(findings, "fail")


def test_a_prompt_that_cannot_overflow_the_hot_cache_says_so(tmp_path: Path):
    code, findings = run(WireServer(tier=True), tmp_path, "--longest-prompt", "1000")
    assert code == 0 and those(findings, "skip") == {"tier: fetches"}


def test_a_server_that_is_not_there_or_is_not_sglang_ends_with_exit_code_1(
    capsys: pytest.CaptureFixture[str],
):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--base-url", "http://127.0.0.1:9"])) == 1
    assert "Cannot connect" in capsys.readouterr().err
    with served(WireServer(native=False)) as url:
        assert command.run(parser.parse_args(["--base-url", url])) == 1
    assert "GET /server_info: HTTP 404" in capsys.readouterr().err


def answer(*tokens: tuple[int, float, dict[int, float]]) -> Answer:
    return Answer(
        tuple(t for t, _, _ in tokens), tuple(x for _, x, _ in tokens), tuple(d for _, _, d in tokens), 0
    )


def test_distance_counts_a_near_tie_as_near_and_another_choice_as_far():
    a = answer((5, -0.5, {5: -0.5, 6: -0.51}), (7, -1.0, {7: -1.0}))
    tie = answer((6, -0.5, {6: -0.5, 5: -0.52}), (9, -3.0, {9: -3.0}))
    assert distance(a, a) == 0.0
    assert distance(a, tie) == pytest.approx((0.01 + 0.02) / 2), "what follows a split is not compared"
    other = answer((8, -0.1, {8: -0.1, 9: -4.0}), (7, -1.0, {7: -1.0}))
    assert distance(a, other) == pytest.approx((0.01 + 3.9) / 2), "below all listed: at least this far"
    moved = answer((5, -0.7, {5: -0.7}), (7, -1.0, {7: -1.0}))
    assert distance(a, moved) == pytest.approx(0.2)
    assert distance(a, answer((5, -0.5, {}))) == math.inf


def test_counters_that_stood_still_do_not_add_up():
    nothing = tier_findings({}, {}, 100)
    assert [f.status for f in nothing] == ["fail", "pass", "fail"]
