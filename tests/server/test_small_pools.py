"""One real server at the smallest sizes it accepts: host store, SWA pool, hot slots.

Bug class: a scheduler that waits for ever (stock's does with a small SWA pool, and for a prompt of nearly all tokens),
a clamp that is not said or not kept, gauges that say something else than /server_info, prefixes shared across
extra_key.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_dsv4x import configs
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PAGE = 256
CHUNK = 256
C4_LAYERS, ROW_BYTES = 2, 584
TOKENS = 4096
"""What the host store is given room for."""
HOST_GIB = (TOKENS // 4 + PAGE // 4) * C4_LAYERS * ROW_BYTES / 2**30 + 1e-6
"""Rows of TOKENS tokens and of SGLang's reserved page."""
SWA_TOKENS = (CHUNK // PAGE + 4) * PAGE  # the fewest that are accepted; test_failing_servers.py has one fewer
REQUESTS = 8
STUCK_S = 240
"""A request that takes longer counts as stuck; all of them together take some 20 s on a machine of its own."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("small")
    shape = {**configs.load("tiny"), "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}
    make_model({**shape, "num_hash_layers": 1}, folder / "model", seed=0)
    argv = [
        *("--model-path", str(folder / "model"), "--enable-dsv4x", "--skip-server-warmup"),
        *("--dsv4x-checks", "step", "--dsv4x-resume-memory-gb", "0.01"),
        *("--dsv4x-host-memory-gb", f"{HOST_GIB:.7f}", "--max-total-tokens", str(4 * TOKENS)),
        *("--swa-full-tokens-ratio", str(SWA_TOKENS / TOKENS)),
        *("--max-running-requests", str(REQUESTS), "--chunked-prefill-size", str(CHUNK)),
        *("--dsv4x-fetch-unit", "1", "--dsv4x-hot-entries", str(REQUESTS * (64 + 2) + CHUNK // 4)),
        *("--enable-metrics", "--decode-log-interval", "1", "--enable-cache-report"),
    ]
    switches = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
    with Server(argv, folder / "server.log", switches) as running:
        yield running


def fresh(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(tokens)]


def generate(server: Server, prompt: list[int], output_tokens: int, **more: Any) -> dict[str, Any]:
    """meta_info of a whole answer."""
    reply = requests.post(
        f"{server.base_url}/generate",
        json={
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
            **more,
        },
        timeout=STUCK_S,
    )
    assert reply.status_code == 200, reply.text
    meta: dict[str, Any] = reply.json()["meta_info"]
    assert meta["completion_tokens"] == output_tokens, meta
    return meta


def state(server: Server) -> dict[str, Any]:
    reply = requests.get(f"{server.base_url}/server_info", timeout=60)
    found: dict[str, Any] = reply.json()["internal_states"][0]["dsv4x"]
    return found


def flush(server: Server) -> None:
    requests.post(f"{server.base_url}/flush_cache", timeout=60).raise_for_status()


def test_tokens_are_clamped_to_the_host_store_and_the_banner_says_so(server: Server) -> None:
    found = state(server)
    assert found["pools"]["full"]["total"] == TOKENS
    assert found["bytes"]["host"] <= HOST_GIB * 2**30
    assert (
        found["bytes"]["host"] + PAGE // 4 * C4_LAYERS * ROW_BYTES > HOST_GIB * 2**30
    )  # not a page to spare
    log = server.log_path.read_text("utf-8", "replace")
    assert f"tier on: {TOKENS} tokens" in log
    assert re.search(r"tokens limited by .*--dsv4x-host-memory-gb", log)


def test_with_the_smallest_swa_pool_all_requests_end(server: Server) -> None:
    """More requests than may run, longer together than both pools, opening pages in decode, prefixes shared or not."""
    assert state(server)["pools"]["swa"]["total"] == SWA_TOKENS
    shared = fresh(0, 700)
    prompts = [fresh(i, 240 + 90 * i) for i in range(1, REQUESTS + 1)]
    prompts += [shared[: 200 * i] + fresh(20 + i, 50) for i in range(1, 4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: generate(server, prompt, 24), prompts))
    pools = state(server)["pools"]
    for name in ("full", "swa"):
        assert pools[name]["free"] + pools[name]["evictable"] == pools[name]["total"]
    assert pools["requests"]["free"] == pools["requests"]["total"] == REQUESTS


def test_the_longest_prompt_is_served_and_a_longer_one_refused_at_once(server: Server) -> None:
    """SGLang 0.5.17 admits the longer one into its queue and never schedules it, nor anything behind it."""
    longest = TOKENS - 2 * PAGE
    generate(server, fresh(1, longest), 8)
    reply = requests.post(
        f"{server.base_url}/generate",
        json={"input_ids": fresh(2, longest + 1), "sampling_params": {"max_new_tokens": 8}},
        timeout=STUCK_S,
    )
    assert reply.status_code == 400
    assert f"{longest + 1} tokens" in reply.text
    generate(server, fresh(3, 10), 2)


def test_extra_key_and_cache_salt_separate_prefixes(server: Server) -> None:
    flush(server)
    prompt = fresh(4, 600)
    cached = [
        generate(server, prompt, 1, extra_key=key)["cached_tokens"]
        for key in ("one", "other", "one", "third")
    ]
    assert cached == [0, 0, 512, 0]
    assert generate(server, prompt, 1)["cached_tokens"] == 0

    def completion(salt: str) -> int:
        reply = requests.post(
            f"{server.base_url}/v1/completions",
            json={"model": "x", "prompt": prompt, "max_tokens": 1, "cache_salt": salt},
            timeout=STUCK_S,
        )
        details = reply.json()["usage"]["prompt_tokens_details"]
        return details["cached_tokens"] if details else 0

    assert [completion(salt) for salt in ("a", "b", "a")] == [0, 0, 512]


def test_the_gauges_on_metrics_agree_with_server_info(server: Server) -> None:
    """They are set when SGLang sets its own: at a step that it reports, and at least every 30 s."""
    generate(server, fresh(5, 700), 16)
    counters = state(server)["counters"]
    deadline = time.monotonic() + 90
    while (gauges := tier_gauges(server)) != counters and time.monotonic() < deadline:
        time.sleep(0.5)
    assert gauges == counters
    assert counters["selected"] > 0 and counters["bytes_to_host"] > 0


def tier_gauges(server: Server) -> dict[str, int]:
    text = requests.get(f"{server.base_url}/metrics", timeout=60).text
    found = re.findall(r"^sglang:dsv4x_(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    assert len({name for name, _ in found}) == len(found), "one series per counter"
    return {name: int(float(value)) for name, value in found}
