"""Real servers that cannot go on: each ends by itself, says why, exits with a non-zero code and leaves no process.

Bug class: a half-started server, one that serves with uninitialised weights, one that stalls silently.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_dsv4x import configs
from sglang_dsv4x.launch import free_port
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PAGE, CHUNK, TOKENS = 256, 256, 4096
SMALLEST_SWA = (CHUNK // PAGE + 4) * PAGE
SMALL_POOLS = ("--max-total-tokens", str(TOKENS), "--chunked-prefill-size", str(CHUNK))
MISSING = "layers.1.attn.indexer.wq_b.weight"
COPY_TIMEOUT_S = 2.0


class Launched:
    """A server in a session of its own. Unlike `launch.Server` it ends nothing before `clean_up`."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.port = free_port()
        self.log_path = folder / "server.log"
        folder.mkdir()
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server", "--enable-dsv4x", "--skip-server-warmup"),
            *("--port", str(self.port), "--max-running-requests", "1", *argv),
        ]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def ready(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"http://127.0.0.1:{self.port}/health", timeout=30).status_code == 200
        return False

    def left(self) -> list[psutil.Process]:
        """Processes of its session that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ends_alone(self, timeout_s: float) -> int:
        """Its exit code, once no process of it is left. Fails the test when there is one after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.left() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.25)
        assert not self.left(), f"still running after {timeout_s:g} s: {self.left()}\n{self.log[-3000:]}"
        return self.process.wait(10)

    def clean_up(self) -> None:
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing") / "model"
    shape = {**configs.load("tiny"), "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}
    make_model({**shape, "num_hash_layers": 1}, folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def launched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launched]]:
    """All servers of this file, started at once: most of their time is imports."""
    folder = tmp_path_factory.mktemp("servers")
    incomplete = folder / "incomplete"
    make_incomplete(model, incomplete)
    too_few = (SMALLEST_SWA - 1) / TOKENS
    servers: dict[str, Launched] = {}
    try:
        servers["swa"] = Launched(
            folder / "swa", "--model-path", str(model), *SMALL_POOLS, "--swa-full-tokens-ratio", str(too_few)
        )
        servers["missing"] = Launched(folder / "missing", "--model-path", str(incomplete), *SMALL_POOLS)
        servers["hung"] = Launched(
            folder / "hung",
            *("--model-path", str(model), *SMALL_POOLS, "--swa-full-tokens-ratio", "0.5"),
            *("--dsv4x-hot-entries", str(64 + 2 + CHUNK // 4), "--dsv4x-fetch-unit", "1"),
            *("--dsv4x-copy-delay-ms", "600000", "--dsv4x-copy-timeout-s", str(COPY_TIMEOUT_S)),
        )
        yield servers
    finally:
        for server in servers.values():
            server.clean_up()


def make_incomplete(model: Path, folder: Path) -> None:
    """The checkpoint without one tensor."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    dropped = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        dropped += tensors.pop(MISSING, None) is not None
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    assert dropped == 1


def test_one_swa_token_fewer_than_a_request_can_need_is_refused_with_the_number_that_would_do(
    launched: dict[str, Launched],
) -> None:
    server = launched["swa"]
    assert server.ends_alone(240) != 0
    assert f"their product is at least {SMALLEST_SWA}" in server.log
    assert "--swa-full-tokens-ratio" in server.log


def test_a_checkpoint_with_a_missing_tensor_is_refused_by_its_name(launched: dict[str, Launched]) -> None:
    server = launched["missing"]
    assert server.ends_alone(240) != 0
    assert "The checkpoint is incomplete" in server.log
    assert "layers.1.self_attn.indexer.wq_b.weight" in server.log


def test_a_copy_worker_that_hangs_ends_the_server(launched: dict[str, Launched]) -> None:
    server = launched["hung"]
    deadline = time.monotonic() + 240
    while not server.ready():
        assert server.process.poll() is None and time.monotonic() < deadline, server.log[-3000:]
        time.sleep(0.5)
    draw = random.Random(0)
    with pytest.raises(requests.RequestException):
        requests.post(
            f"http://127.0.0.1:{server.port}/generate",
            json={
                "input_ids": [draw.randrange(10, 500) for _ in range(900)],  # 225 entries, 130 slots
                "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            },
            timeout=120,
        ).raise_for_status()
    assert server.ends_alone(60) != 0
    assert f"has not arrived after {COPY_TIMEOUT_S:g} s" in server.log
    assert "--dsv4x-copy-timeout-s" in server.log
