"""Starts `python -m sglang.launch_server` in a process group of its own, waits for it, and ends all of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import requests

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.25
_TAIL_LINES = 30


class LaunchError(RuntimeError):
    """A server did not start. The message holds the reason, the log's path and its last lines."""


class Server:
    """One SGLang server with all its processes. A context manager: ready inside, gone after.

    Output of all processes goes to `log_path`. `stop` reaches processes that left the group as well, as long
    as their parent was alive.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        *,
        module: str = "sglang.launch_server",
    ):
        """`argv` are arguments of `module`; --host and --port are added unless given. `env` adds to ours."""
        self.port = int(_option(argv, "--port") or free_port())
        self.host = _option(argv, "--host") or HOST
        given = {flag: _option(argv, flag) is not None for flag in ("--host", "--port")}
        extra = [
            x
            for flag, value in (("--host", self.host), ("--port", str(self.port)))
            if not given[flag]
            for x in (flag, value)
        ]
        # env(1) adds variables without this package reading the environment itself.
        prefix = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
        self.command = [*prefix, sys.executable, "-m", module, *argv, *extra]
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._strays: list[psutil.Process] = []

    @property
    def base_url(self) -> str:
        reachable = HOST if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{reachable}:{self.port}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the server and returns once /health answers 200. On any failure nothing is left running.

        Raises LaunchError when it ends or when `timeout_s` pass first.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            self._wait_ready(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.stop()
            raise

    def ended(self) -> str | None:
        """Why the server is not running, or None while it is."""
        if self._process is None:
            return "the server was not started"
        code = self._process.poll()
        return None if code is None else f"the server ended with {_exit_name(code)}; log: {self.log_path}"

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends every process of the server: SIGTERM, and SIGKILL for what is left when that has worked or
        after `timeout_s`.

        Returns when none is left; may be called again.
        """
        process = self._process
        if process is None:
            return
        self._note_strays()
        # SIGTERM only to the main process, which ends its children: one that dies first looks like a crash to
        # it, and it waits for a diagnosis. It also waits for running requests, stalled ones for ever: hence
        # the time-out.
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        finally:  # an impatient Ctrl-C must not leave a server behind either
            self._note_strays()
            for left in self._alive():
                with contextlib.suppress(psutil.Error):
                    left.kill()
            process.wait()
            while self._alive():
                time.sleep(0.05)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the log, empty when there is none."""
        try:
            return "\n".join(self.log_path.read_text("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _wait_ready(self, deadline: float, timeout_s: float) -> None:
        while time.monotonic() < deadline:
            reason = self.ended()
            if reason is not None:
                raise LaunchError(self._failure(reason))
            # Not up yet is the normal case here, so connection errors only mean another round.
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.base_url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(_POLL_S)
        raise LaunchError(
            self._failure(f"the server did not serve within {timeout_s:g} s; log: {self.log_path}")
        )

    def _failure(self, reason: str) -> str:
        return f"{reason}\ncommand: {shlex.join(self.command)}\nlast lines of the log:\n{self.log_tail()}"

    def _alive(self) -> list[psutil.Process]:
        """Processes of the group, and noted strays, that still run (a zombie waits only for its parent)."""
        assert self._process is not None
        self._process.poll()
        found = {p.pid: p for p in self._strays if _runs(p)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == self._process.pid and _runs(process):
                    found[process.pid] = process
        return list(found.values())

    def _note_strays(self) -> None:
        """Remembers descendants, which may have left the group, while their parents can still be asked."""
        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            known = {p.pid for p in self._strays}
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._strays += [p for p in children if p.pid not in known]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _option(argv: Sequence[str], flag: str) -> str | None:
    """Value of a flag given as two arguments or with '='; the last one wins, as in argparse."""
    value = None
    for i, argument in enumerate(argv):
        if argument == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif argument.startswith(flag + "="):
            value = argument[len(flag) + 1 :]
    return value


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name} (exit code {code})"
    except ValueError:
        return f"exit code {code}"
