"""Starting and ending a server's processes. A small HTTP server stands in for SGLang here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sglang_dsv4x.launch import LaunchError, Server

HERE = str(Path(__file__).parent)


@pytest.fixture
def make(tmp_path: Path):
    servers = []

    def build(*argv: str, **more: object) -> Server:
        server = Server(
            list(argv), tmp_path / "log", {"PYTHONPATH": HERE}, module="wire_server", **more
        )  # fmt: skip
        servers.append(server)
        return server

    yield build
    for server in servers:
        server.stop(1.0)


def test_a_server_is_ready_inside_the_block_and_gone_after_it(make):
    with make() as server:
        assert server.ended() is None
        with socket.create_connection(("127.0.0.1", server.port), timeout=5):
            pass
    assert server.ended() is not None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)


def test_environment_and_given_port_reach_the_server(tmp_path: Path, make):
    probe = tmp_path / "probe_module.py"
    probe.write_text("import os, sys; sys.exit(f'{os.environ[\"PROBE\"]} {sys.argv[1:]}')")
    server = Server(
        ["--port=5", "--host", "0.0.0.0"],
        tmp_path / "log",
        {"PROBE": "seen it", "PYTHONPATH": str(tmp_path)},
        module="probe_module",
    )
    assert server.base_url == "http://127.0.0.1:5"
    with pytest.raises(LaunchError, match=r"seen it \['--port=5', '--host', '0.0.0.0'\]"):
        server.start(30)


def test_a_server_that_dies_at_start_is_reported_with_exit_code_and_log(make):
    server = make("--die-at-start", "7")
    with pytest.raises(LaunchError) as error:
        server.start(30)
    assert "exit code 7" in str(error.value) and "RuntimeError: the pool does not fit" in str(error.value)


def test_a_server_that_never_serves_is_ended_after_the_time_out(tmp_path: Path):
    (tmp_path / "idle_module.py").write_text("import time; print('loading', flush=True); time.sleep(60)")
    server = Server([], tmp_path / "log", {"PYTHONPATH": str(tmp_path)}, module="idle_module")
    with pytest.raises(LaunchError, match=r"(?s)did not serve within 2 s.*loading"):
        server.start(2)
    assert server.ended() is not None


def test_stop_ends_children_also_those_that_left_the_group_and_one_that_ignores_sigterm(make):
    server = make("--children", "--ignore-sigterm")
    server.start(30)
    assert server._process is not None
    children = psutil.Process(server._process.pid).children(recursive=True)
    assert len({os.getpgid(child.pid) for child in children}) == 2
    began = time.monotonic()
    server.stop(timeout_s=1.0)
    assert time.monotonic() - began < 8
    for child in children:
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert server.ended() is not None
    server.stop()


def test_an_exception_inside_the_block_ends_the_server(make):
    with pytest.raises(ZeroDivisionError), make() as server:
        _ = 1 / 0
    assert server.ended() is not None


def test_a_log_in_a_missing_folder_is_made(tmp_path: Path):
    server = Server(
        ["--die-at-start", "1"], tmp_path / "a" / "b.log", {"PYTHONPATH": HERE}, module="wire_server"
    )
    with pytest.raises(LaunchError):
        server.start(30)
    assert "does not fit" in server.log_tail()


def test_the_module_imports_without_sglang():
    """Starting a server must work where only its own interpreter has SGLang's dependencies."""
    code = "import sys; sys.modules['sglang'] = None; import sglang_dsv4x.launch, sglang_dsv4x.replay.cli"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
