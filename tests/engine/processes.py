"""Runs a command to its end in a session of its own, and says what it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

REAPED_WITHIN_S = 5.0


class Ended(NamedTuple):
    code: int
    output: str
    left: list[str]
    """Command lines of processes of the session that still ran after the command had ended."""
    seconds: float


def run_python(
    words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, timeout_s: float = 300
) -> Ended:
    """`python WORDS`, with `env` on top of ours. On a time-out everything is killed and TimeoutExpired is raised."""
    log, start = folder / "output.log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        try:
            code = process.wait(timeout_s)
            seconds = time.monotonic() - start
            left = _left_after(process.pid)
        finally:
            for survivor in _session(process.pid):
                survivor.send_signal(signal.SIGKILL)
            process.wait()
    return Ended(code, log.read_text("utf-8", "replace"), left, seconds)


def launch_server(
    words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, timeout_s: float = 300
) -> Ended:
    """A server that is expected to refuse: one that serves instead runs into the time-out."""
    fixed = [
        "-m",
        "sglang.launch_server",
        "--skip-tokenizer-init",
        "--load-format",
        "dummy",
        "--skip-server-warmup",
    ]
    return run_python([*fixed, *words], folder, env, timeout_s)


def _left_after(session: int) -> list[str]:
    """What is still there after a moment in which children that were told to end may do so."""
    deadline = time.monotonic() + REAPED_WITHIN_S
    while (running := _session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [" ".join(p.cmdline()) for p in running if p.is_running()]


def _session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found
