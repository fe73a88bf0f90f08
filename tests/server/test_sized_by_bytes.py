"""A real `launch_server` on the tiny model accepts the tokens that its bytes allow, and holds the bytes it was charged.

Bugs it would show: a pool that is charged other bytes than it allocates (the server would not start), an SWA pool sized
by need that is too small for the requests it was sized for (a request would wait for ever), a limit that the banner
does not name.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dsv4x import configs
from sglang_dsv4x.capacity.byte_model import PAGE
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

REQUESTS, CHUNK, PROMPT, OUTPUT = 4, 256, 1500, 300
HOST_GIB = 0.0045


def generate(url: str, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    reply = requests.post(
        f"{url}/generate",
        json={
            "input_ids": [draw.randrange(10, 500) for _ in range(PROMPT)],
            "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True},
        },
        timeout=300,
    )
    reply.raise_for_status()
    return reply.json()["meta_info"]  # type: ignore[no-any-return]


def test_the_host_store_sets_the_tokens_and_all_requests_run_at_once(tmp_path: Path) -> None:
    """Four requests that fill the tokens, decoding across SWA pages, from a pool without one page to spare."""
    model, log = tmp_path / "tiny", tmp_path / "server.log"
    make_model(configs.load("tiny"), model, seed=0)
    argv = [
        *("--model-path", str(model), "--enable-dsv4x", "--skip-server-warmup"),
        *("--max-total-tokens", "100000000", "--dsv4x-host-memory-gb", str(HOST_GIB)),
        *("--max-running-requests", str(REQUESTS), "--chunked-prefill-size", str(CHUNK)),
    ]
    with Server(argv, log) as server:
        info = requests.get(f"{server.base_url}/server_info", timeout=60).json()
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(lambda seed: generate(server.base_url, seed), range(REQUESTS)))
        text = log.read_text("utf-8", "replace")
    entries = HOST_GIB * 2**30 // (3 * 584)
    assert info["max_total_num_tokens"] == (entries - 64) * 4 // PAGE * PAGE
    assert 0.6 * info["max_total_num_tokens"] < REQUESTS * (PROMPT + OUTPUT)
    assert "tokens limited by host memory (--dsv4x-host-memory-gb 0.0045)" in text
    assert "4608 tokens: what 4 running requests and a chunk need; allocated bytes as predicted" in text
    assert f"#running-req: {REQUESTS}" in text and "Retract" not in text
    assert [answer["completion_tokens"] for answer in answers] == [OUTPUT] * REQUESTS
