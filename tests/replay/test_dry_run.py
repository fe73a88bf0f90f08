"""`replay --dry-run`: its table, its JSON report, its speed, and that a real server counts what it says."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from wire_server import WireServer, serving

from sglang_dsv4x import cli
from sglang_dsv4x.replay.formats import load_trace, trace_path
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import Settings, State, replay


class Silent:
    def begin(self, conversations: object, runs: object, settings: object) -> None: ...

    def turn(self, record: object) -> None: ...


def dry(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    try:
        code = cli.main(["replay", *map(str, argv), "--dry-run", "--no-progress"])
    except SystemExit as error:
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def report(capsys: pytest.CaptureFixture[str], path: Path, *argv: object) -> dict[str, Any]:
    code, _, err = dry(capsys, *argv, "--json", path)
    assert code == 0, err
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_without_limits_it_serves_what_a_server_that_never_forgets_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """The replay's own numbers against a server with an infinite prefix cache: theory, achieved and simulated."""
    state = State()

    async def go() -> None:
        async with serving(WireServer()) as url:
            await replay(url, load_trace(trace_path("small")), Settings(timeout_s=5.0), state, Silent())

    asyncio.run(go())
    assert state.run is not None
    counted = sum(r.completion.cached_tokens or 0 for r in state.run.records if r.completion)
    [cache] = report(capsys, tmp_path / "r.json", "small")["caches"]
    assert cache["cached_tokens"] == cache["theoretical_cached_tokens"] == counted > 0
    assert cache["turns"] == len(state.run.records) == 16
    assert cache["prompt_tokens"] == sum(r.prompt_tokens for r in state.run.records)


def test_a_row_for_each_capacity_and_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    argv = (
        "small",
        "--copies",
        6,
        "--concurrency",
        6,
        "--capacity",
        "16K",
        "40000",
        "1M",
        "--eviction",
        "lru",
        "lfu",
    )
    code, out, err = dry(capsys, *argv)
    assert code == 0 and "96 turns" in out and "6 at a time" in out and "6 caches" in err
    rows = [line.split() for line in out.splitlines() if line.lstrip()[:2] in ("16", "40", "1,")]
    assert [(row[0], row[1]) for row in rows] == [
        (capacity, policy) for capacity in ("16,000", "40,000", "1,000,000") for policy in ("lru", "lfu")
    ]
    value = report(capsys, tmp_path / "r.json", *argv)
    served = [each["cached_tokens"] for each in value["caches"] if each["eviction"] == "lru"]
    assert served == sorted(served) and served[0] < served[-1]
    assert value["kind"] == "sglang-dsv4x dry run" and value["settings"]["concurrency"] == 6


def test_resume_points_serve_what_a_small_swa_pool_loses(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    argv = ("small", "--copies", 12, "--concurrency", 12, "--chunk", 2048, "--swa-tokens", "12K")

    def served(*more: object) -> dict[str, Any]:
        [cache] = report(capsys, tmp_path / "r.json", *argv, *more)["caches"]
        return dict(cache)

    lost, ends, every = served(), served("--resume-at", "prompt", "fork"), served("--resume-interval", 256)
    assert lost["cached_tokens"] < ends["cached_tokens"] <= every["cached_tokens"]
    assert every["cached_tokens"] == every["theoretical_cached_tokens"] and every["unresumable_tokens"] == 0
    assert lost["unresumable_tokens"] > 0 == lost["resume_points_used"] and ends["resume_points_used"] > 0


def test_turns_that_do_not_fit_are_named_in_the_table(capsys: pytest.CaptureFixture[str]):
    code, out, _ = dry(capsys, "small", "--capacity", "4K")
    assert code == 0 and "refused: turns that do not fit" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--capacity", "none"], "--capacity"),
        (["--capacity", "0"], "is not a number of tokens such as"),
        (["--eviction", "oldest"], "--eviction"),
        (["--html", "{tmp}/x.html"], "--html needs a server"),
        (["--retries", "2"], "--retries needs a server"),
        (["--resume-at", "prompt"], "change nothing without --swa-tokens"),
        (
            ["--swa-tokens", "1M", "--resume-interval", "100"],
            "--resume-interval 100 must be whole pages of 256",
        ),
        (["--swa-tokens", "1M", "--resume-points", "4"], "--resume-points limits points"),
        (["--swa-tokens", "4K"], "--swa-tokens 4000 cannot hold a prefill step: at least 8704"),
        (["--chunk", "100"], "--chunk 100 is less than a page"),
        (["--base-url", "http://x"], "not allowed with"),
        (["--json", "{tmp}/no/r.json"], "--json"),
    ],
)
def test_arguments_that_do_not_go_together_end_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], words: str
):
    code, out, err = dry(capsys, "small", *(word.format(tmp=tmp_path) for word in argv))
    assert code == 2 and words in err and out == ""


def synthesize(out: Path, *argv: object) -> None:
    assert cli.main(["synthesize", "--out", str(out), *map(str, argv)]) == 0


def test_ten_thousand_turns_take_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The whole set of 739 conversations with 60,000 turns must take less than a minute; a sixth of it, a fourth."""
    synthesize(tmp_path / "agents", "--total-turns", 10_000)
    files = sorted((tmp_path / "agents").iterdir())
    began = time.process_time()
    value = report(
        capsys, tmp_path / "r.json", *files, "--capacity", "2M", "--swa-tokens", "200K", "--concurrency", 16
    )
    assert time.process_time() - began < 15
    [cache] = value["caches"]
    assert cache["turns"] >= 10_000 and 0 < cache["cached_tokens"] < cache["theoretical_cached_tokens"]


def test_a_fork_heavy_dag_is_simulated_as_it_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "forks.jsonl"
    shape = ("--turns", 6, "--subagents", 0.8, "--forks", 1, "--shared-prefix", 1500, "--max-context", 9000)
    synthesize(path, "--format", "dag_jsonl", "--conversations", 2, *shape)
    state = State()

    async def go() -> None:
        async with serving(WireServer()) as url:
            settings = Settings(pace=Pace(concurrency=1), output_tokens=2, timeout_s=10.0)
            await replay(url, load_trace(path), settings, state, Silent())

    asyncio.run(go())
    assert state.run is not None
    records = state.run.records
    assert [r.completion.cached_tokens for r in records if r.completion] == [
        r.theoretical_cached for r in records
    ]
    assert sum(r.kind == "fork" for r in records) > 4
    [cache] = report(capsys, tmp_path / "r.json", path, "--output-tokens", 2)["caches"]
    assert cache["turns"] == len(records)
    assert cache["cached_tokens"] == sum(r.theoretical_cached for r in records)


def test_an_interrupt_ends_it_without_a_traceback(tmp_path: Path):
    synthesize(tmp_path / "agents", "--total-turns", 8000)
    files = [str(file) for file in sorted((tmp_path / "agents").iterdir())]
    command = [sys.executable, "-m", "sglang_dsv4x.cli", "replay", *files, "--dry-run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
