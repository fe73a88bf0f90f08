"""When a failure while SGLang loads the plug-in is fatal, and what is installed in which kind of process."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

from sglang_dsv4x import plugin
from sglang_dsv4x.config import CONFIG_VARIABLE, Dsv4xConfig
from sglang_dsv4x.engine import seams
from sglang_dsv4x.engine.hooks import SeamError


@pytest.fixture(autouse=True)
def stock_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "DIR"])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `register` does, without patching this process."""
    done: list[str] = []
    monkeypatch.setattr(seams, "install_command_line", lambda: done.append("command line"))
    monkeypatch.setattr(seams, "prepare_launch", lambda config: done.append("prepare launch"))
    monkeypatch.setattr(seams, "install_engine", lambda config: done.append("install engine"))
    return done


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SeamError("the command line has changed")

    monkeypatch.setattr(seams, "install_command_line", fail)


def test_without_the_flag_only_the_command_line_is_installed(steps: list[str]) -> None:
    plugin.register()
    assert steps == ["command line"]


def test_the_environment_prepares_a_launch_where_an_engine_may_be_made(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, Dsv4xConfig(enable=True).to_json())
    plugin.register()
    assert steps == ["command line", "prepare launch"]


def test_a_child_process_gets_the_whole_table(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, Dsv4xConfig(enable=True).to_json())
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    plugin.register()
    assert steps == ["command line", "prepare launch", "install engine"]


@pytest.mark.usefixtures("broken")
def test_a_failure_is_left_to_sglang_when_nobody_asked_for_the_extension() -> None:
    """SGLang logs it and serves as if the package were not there."""
    with pytest.raises(SeamError):
        plugin.register()


@pytest.mark.usefixtures("broken")
def test_a_failure_is_fatal_with_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang swallows exceptions of plug-ins but not SystemExit."""
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--enable-dsv4x"])
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 1
    assert "the command line has changed" in capsys.readouterr().err


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(
    "text", ["{", '{"enable": true, "tiers": "on"}', '{"enable": true, "hot_entries": 0}']
)
def test_a_configuration_that_cannot_be_read_is_fatal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """It may have been meant to enable the extension, so serving without it would be a silent change."""
    monkeypatch.setenv(CONFIG_VARIABLE, text)
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 1
    assert "sglang-dsv4x: " in capsys.readouterr().err
