"""`sglang-dsv4x replay` from arguments to exit code, table and JSON; each run is a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from sglang_dsv4x.launch import Server
from sglang_dsv4x.replay import cli
from sglang_dsv4x.replay.report import json_schema

Command = Callable[..., tuple[int, str, str]]

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def launched_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """--launch starts the stand-in, which finds its module through PYTHONPATH."""
    monkeypatch.setitem(Server.__init__.__kwdefaults__, "module", "wire_server")
    monkeypatch.setenv("PYTHONPATH", HERE)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        capfd.readouterr()
        try:
            code = cli.run(parser.parse_args([str(word) for word in argv]))
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def start(*argv: object) -> subprocess.Popen[str]:
    """The same in a process of its own, for signals."""
    code = (
        "import argparse, sys; from sglang_dsv4x.replay import cli; from sglang_dsv4x.launch import Server; "
        "Server.__init__.__kwdefaults__['module'] = 'wire_server'; "
        "p = argparse.ArgumentParser(); cli.add_arguments(p); sys.exit(cli.run(p.parse_args()))"
    )
    words = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def wire(tmp_path: Path, *argv: str) -> Iterator[str]:
    with Server(list(argv), tmp_path / "wire.log", {"PYTHONPATH": HERE}, module="wire_server") as server:
        yield server.base_url


def test_a_run_prints_the_table_and_writes_the_report(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["sglang-dsv4x", "replay", "small"])
    out = tmp_path / "out.json"
    with wire(tmp_path, "--tier") as url:
        code, text, err = command("small", "--base-url", url, "--json", out, "--logprobs")
    assert code == 0, err
    assert "16 answered, 0 failed, of 16 planned" in text and "(over 16 turns)" in text
    assert "75.0 % of the entries that decode selected" in text
    assert "main/agent_001" in text
    report: dict[str, Any] = json.loads(out.read_text())
    jsonschema.validate(report, json_schema())
    [run] = report["runs"]
    assert report["schema"] == 2 and run["partial"] is None and len(run["turns"]) == 16
    assert report["settings"]["logprobs"] is True and report["settings"]["seed"] == 0
    assert run["server"]["version"] == "test" and report["command"] == ["sglang-dsv4x", "replay", "small"]
    assert run["totals"]["cached_tokens"] == run["totals"]["theoretical_cached_tokens"] > 0
    assert run["totals"]["ttft_s"]["samples"] == 16 and len(run["tier_samples"]) >= 16
    turn = run["turns"][0]
    assert len(turn["logprobs"]) == len(turn["output_ids"]) == 12


def test_comparing_finds_equal_and_different_bits(tmp_path: Path, command: Command):
    out = tmp_path / "first.json"
    common = ("small", "--max-turns", 4, "--logprobs", "--no-progress")
    with wire(tmp_path) as url:
        assert command(*common, "--base-url", url, "--json", out)[0] == 0
        code, text, _ = command(*common, "--base-url", url, "--flush-cache", "--against", out)
        assert code == 0
        assert "4 of 4 turns equal, 63 of 63 tokens equal, 63 of 63 log-probabilities bit-equal" in text
        code, text, _ = command(*common, "--base-url", url, "--seed", 1, "--against", out)
        assert code == 1 and "the prompts differ" in text
    # The last bit of a double near 1 is 2.2e-16.
    with wire(tmp_path, "--shift", "5e-16") as url:
        code, text, _ = command(*common, "--base-url", url, "--against", out)
    assert (
        code == 1 and "63 of 63 tokens equal" in text and "log-probabilities differ from output token" in text
    )


def test_two_servers_in_one_run_are_shown_side_by_side(tmp_path: Path, command: Command):
    out, html, png = (tmp_path / f"both.{suffix}" for suffix in ("json", "html", "png"))
    (tmp_path / "on").mkdir()
    with wire(tmp_path) as off, wire(tmp_path / "on", "--tier", "--openai-only") as on:
        argv = ("small", "--compare", f"off={off}", f"on={on}/v1", "--vocab-size", 900, "--max-turns", 3)
        code, text, err = command(*argv, "--json", out, "--html", html, "--png", png)
    assert code == 0, err
    assert re.search(r"turns answered +3 of 3 +3 of 3", text)
    assert "off and on: 3 of 3 turns equal" in text
    runs = json.loads(out.read_text())["runs"]
    assert [run["name"] for run in runs] == ["off", "on"]
    assert [run["server"]["api"] for run in runs] == ["sglang", "openai"]
    assert "Agent replay: off, on" in html.read_text() and png.read_bytes()[:4] == b"\x89PNG"


def test_a_killed_run_is_taken_up_again(tmp_path: Path, command: Command):
    """SIGKILL: nothing of the first run is left but its journal."""
    journal, out = tmp_path / "run.journal", tmp_path / "out.json"
    with wire(tmp_path, "--token-delay", "0.02") as url:
        argv = ("small", "--base-url", url, "--resume", journal, "--no-progress", "--max-turns", 8)
        process = start(*argv)
        wait_for(journal, '"number":3')
        process.kill()
        process.communicate(timeout=30)
        code, text, _ = command(*argv, "--json", out)
        sent = len(re.findall(r"^generate \d+$", (tmp_path / "wire.log").read_text(), re.M))
        assert command(*argv, "--seed", 1)[0] == 2
    assert code == 0 and "8 answered, 0 failed, of 8 planned" in text and "Taken up again at" in text
    assert [turn["number"] for turn in json.loads(out.read_text())["runs"][0]["turns"]] == list(range(1, 9))
    assert sent in (8, 9), "at most the turn that was on its way is sent twice"


def test_a_duration_is_no_failure_and_says_what_was_not_sent(tmp_path: Path, command: Command):
    with wire(tmp_path, "--token-delay", "0.02") as url:
        code, text, _ = command("small", "--base-url", url, "--duration", 0.8)
    assert code == 0
    assert "--duration ended the run" in text and "planned turns were not sent" in text


def test_the_key_of_the_environment_is_used_and_reported_nowhere(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out.json"
    with wire(tmp_path, "--api-key", "hush") as url:
        argv = ("small", "--base-url", url, "--max-turns", 1, "--json", out)
        code, _, err = command(*argv)
        assert code == 1 and "HTTP 401" in err
        monkeypatch.setenv("OPENAI_API_KEY", "hush")
        assert command(*argv)[0] == 0
        assert command(*argv, "--api-key", "other")[0] == 1
    assert "hush" not in out.read_text()


def test_failed_turns_make_the_exit_code_1_and_show_in_the_table(tmp_path: Path, command: Command):
    with wire(tmp_path, "--fault", "2", "500") as url:
        code, text, _ = command("small", "--base-url", url, "--max-turns", 3)
    assert code == 1
    assert "2 answered, 1 failed (1 http), of 3 planned" in text
    assert "failed: small-0 turn 2: http: HTTP 500: out of luck" in text


def test_a_warm_server_is_pointed_out(tmp_path: Path, command: Command):
    with wire(tmp_path) as url:
        command("small", "--base-url", url, "--max-turns", 2)
        _, text, _ = command("small", "--base-url", url, "--max-turns", 2)
    assert "2 turns hit more than this run can have cached" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["{tmp}/missing.json", "--base-url", "http://x"], "cannot be read"),
        (["{tmp}/short.json", "--base-url", "http://x"], "short.json: line 1, column 16: not JSON"),
        (
            ["small", "--base-url", "http://x", "--against", "{tmp}/empty.json"],
            "empty.json: kind: must be 'sglang-dsv4x replay'",
        ),
        (["small", "--base-url", "http://x", "--json", "{tmp}/no/dir.json"], "--json"),
        (["small", "--launch", "--a 'open"], "--launch: No closing quotation"),
        (["small"], "one of the arguments --base-url --compare --dry-run --launch is required"),
        (["small", "--base-url", "localhost:30000"], "is not a URL such as http://127.0.0.1:30000"),
        (["small", "--compare", "http://x"], "is not NAME=URL"),
        (["small", "--compare", "a=http://x", "a=http://y"], "the names a, a must differ"),
        (["small", "--base-url", "http://x", "--ca-file", "{tmp}/empty.json"], "--ca-file"),
        (["small", "--base-url", "http://x", "--ca-file", "{tmp}/none.pem"], "No such file"),
        (["small", "--base-url", "http://x", "--html", "{tmp}"], "--html"),
        (["small", "--base-url", "http://x", "--resume", "{tmp}/no/journal"], "--resume"),
        (["small", "--base-url", "http://x", "--retries", "-1"], "--retries"),
        (["small", "--base-url", "http://x", "--duration", "0"], "--duration"),
        (["small", "--base-url"], "expected one argument"),
        (["small", "--base-url", "http://x", "--scale", "-1"], "--scale"),
        (["small", "--base-url", "http://x", "--max-turns", "0"], "--max-turns"),
        (["small", "--base-url", "http://x", "--format", "other"], "--format"),
    ],
)
def test_wrong_arguments_and_traces_end_with_exit_code_2(
    tmp_path: Path, argv: list[str], words: str, command: Command
):
    (tmp_path / "short.json").write_text('{"block_size": ')
    (tmp_path / "empty.json").write_text("{}")
    code, out, err = command(*(word.format(tmp=tmp_path) for word in argv))
    assert code == 2 and words in err and out == ""


def test_a_server_that_does_not_answer_ends_with_exit_code_1(command: Command):
    code, _, err = command("small", "--base-url", "http://127.0.0.1:9")
    assert code == 1 and "Cannot connect to host" in err


@pytest.mark.parametrize("as_one_string", [True, False])
def test_a_launched_server_is_used_and_ended(tmp_path: Path, as_one_string: bool, command: Command):
    args = ["--tier", "--miss-share", "0.5"]
    log = tmp_path / "server.log"
    words = [" ".join(args)] if as_one_string else args
    code, text, err = command("small", "--max-turns", 2, "--launch-log", log, "--launch", *words)
    assert code == 0, err
    assert "50.0 % of the entries" in text
    assert not processes_with(str(port_in(err)))


def test_a_launched_server_that_dies_is_reported_with_its_log(tmp_path: Path, command: Command):
    code, _, err = command("small", "--launch-log", tmp_path / "log", "--launch", "--die-at-start", "4")
    assert code == 1 and "exit code 4" in err and "the pool does not fit" in err


def test_a_launched_server_that_dies_in_the_middle_makes_a_partial_report(tmp_path: Path, command: Command):
    out = tmp_path / "out.json"
    argv = ("small", "--json", out, "--launch-log", tmp_path / "log", "--launch", "--fault", "3", "die")
    code, text, _ = command(*argv)
    assert code == 1
    assert "PARTIAL: the server ended with exit code 3" in text
    report = json.loads(out.read_text())
    [run] = report["runs"]
    answered = [turn for turn in run["turns"] if turn["error"] is None]
    # How many turns fail before the server's end is noticed depends on the machine.
    assert "exit code 3" in run["partial"] and len(answered) in (2, 3) and len(run["turns"]) > len(answered)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_writes_the_partial_report_and_ends_the_server(tmp_path: Path, number: int, code: int):
    out, log = tmp_path / "out.json", tmp_path / "server.log"
    process = start(
        "small", "--json", out, "--no-progress", "--launch-log", log, "--launch", "--token-delay", "0.05"
    )
    assert process.stderr is not None
    port = port_in(process.stderr.readline())
    wait_for(log, "generate 2")
    process.send_signal(number)
    text, err = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in err
    assert "PARTIAL: interrupted after" in text
    report = json.loads(out.read_text())
    [run] = report["runs"]
    assert run["partial"] == "interrupted" and 0 < len(run["turns"]) < 16
    assert not processes_with(str(port))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_while_the_server_starts_ends_it(tmp_path: Path, number: int, code: int):
    log = tmp_path / "server.log"
    process = start("small", "--launch-log", log, "--launch", "--slow-start")
    assert process.stderr is not None
    port = port_in(process.stderr.readline())
    wait_for(log, "loading")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code and "interrupted before the first turn" in err and out == ""
    assert not processes_with(str(port))


def wait_for(log: Path, words: str) -> None:
    deadline = time.monotonic() + 30
    while words not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, f"{words!r} never came"
        time.sleep(0.1)


def port_in(stderr: str) -> int:
    return int(stderr.split("starting a server on port ")[1].split(",")[0])


def processes_with(argument: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if argument in process.cmdline():
                found.append(process)
    return found
