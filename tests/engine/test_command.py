"""The console script and `sglang-dsv4x check`."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from processes import run_python

from sglang_dsv4x import __version__, check, cli
from sglang_dsv4x.engine import seams
from sglang_dsv4x.engine.hooks import Seam

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(autouse=True)
def unfiltered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)


def problems() -> list[str]:
    return check.inspect_installation().problems


def test_this_installation_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == 0
    text = capsys.readouterr().out
    assert f"sglang {metadata.version('sglang')}" in text and "OK: " in text
    rows = len([*seams.argument_seams(), *seams.engine_seams()])
    assert f"{rows} of {rows} as expected" in text


def test_json_holds_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["problems"] == []
    assert report["versions"]["sglang-dsv4x"] == __version__
    assert {"sglang", "torch", "triton", "python"} <= set(report["versions"])
    assert report["device"]["type"] in ("cpu", "cuda")
    assert all(seam["ok"] and seam["reason"] for seam in report["seams"])
    assert {"sparse_attention", "select_top_k"} <= {row["op"] for row in report["kernels"]}
    assert report["host_memory"]["free_bytes"] > 0


def test_a_seam_that_is_off_is_a_problem_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = Seam(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache", "(self, renamed)", "read", "a reason"
    )
    rows = [*seams.engine_seams(), changed]
    monkeypatch.setattr(seams, "engine_seams", lambda: rows)
    assert cli.main(["check"]) == 1
    text = capsys.readouterr().out
    assert "OFF read" in text and "expected (self, renamed) (a reason): install sglang==0.5.17" in text


def test_a_plug_in_that_sglang_would_skip_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this command can notice: a plug-in that is never called cannot complain."""
    monkeypatch.setenv("SGLANG_PLUGINS", "another,dsv4x_cpu")
    assert [p for p in problems() if "SGLANG_PLUGINS=another,dsv4x_cpu leaves dsv4x out" in p]
    monkeypatch.setenv("SGLANG_PLUGINS", "another, dsv4x, dsv4x_cpu")
    assert problems() == []


@WITHOUT_GPU
def test_a_platform_that_sglang_would_skip_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "dsv4x")
    assert [p for p in problems() if "leaves the platform dsv4x_cpu out" in p]
    monkeypatch.setenv("SGLANG_PLATFORM", "dsv4x_cpu")
    assert problems() == []
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert [p for p in problems() if "SGLANG_PLATFORM=another" in p]


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("sglang.srt.plugins", "No entry point 'dsv4x'"),
        ("sglang.srt.platforms", "the platform for that is not installed"),
    ],
)
@WITHOUT_GPU
def test_what_is_not_installed_is_a_problem(monkeypatch: pytest.MonkeyPatch, group: str, words: str) -> None:
    known = check._entry_points
    monkeypatch.setattr(check, "_entry_points", lambda name: {} if name == group else known(name))
    assert [p for p in problems() if words in p]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_arguments_a_function_and_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = cli.COMMANDS[name]
    module = importlib.import_module(f"sglang_dsv4x.{command.module}")
    assert callable(module.add_arguments) and callable(getattr(module, command.function))
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert command.help.split()[0] in capsys.readouterr().out.lower()


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["paint"])
    assert stopped.value.code == 2


def test_the_help_needs_neither_torch_nor_sglang(tmp_path: Path) -> None:
    program = (
        "import sys; from sglang_dsv4x import cli; code = cli.main([]);"
        "sys.exit(3 if {'torch', 'sglang'} & set(sys.modules) else code)"
    )
    assert run_python(["-c", program], tmp_path).code == 2


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"sglang-dsv4x {__version__}"
