"""Real `launch_server` processes on the tiny model: the tier changes where bytes are, and no output bit.

Bug it would show: any stale, misplaced, unfetched or early-read C4 row. The server with the tier on runs with
`--dsv4x-checks step`, so a wrong row is an error of that step even where it changes no token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from sglang_dsv4x import configs
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

OUTPUT_TOKENS = 24
FETCH_UNIT = 1
SMALLEST_SLOTS = FETCH_UNIT * (1 * (64 + 2) + 256 // 4)  # unit * (requests * (top_k + 2) + chunk / 4)
# Contexts have 650 entries, five times the slots: most of what decode selects is not there.


class Answer(NamedTuple):
    tokens: list[int]
    log_probabilities: list[float]
    cached: int


class Conversation(NamedTuple):
    first: Answer
    again: Answer
    longer: Answer
    fork: Answer
    after_flush: Answer


def arguments(model: Path, *extra: str) -> list[str]:
    return [
        *("--model-path", str(model), "--enable-dsv4x", "--skip-server-warmup"),
        *("--max-total-tokens", "16384", "--swa-full-tokens-ratio", "0.5"),
        *("--max-running-requests", "1", "--chunked-prefill-size", "256"),
        *extra,
    ]


def generate(url: str, ids: list[int]) -> Answer:
    reply = requests.post(
        f"{url}/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        },
        timeout=300,
    )
    reply.raise_for_status()
    body = reply.json()
    meta = body["meta_info"]
    return Answer(body["output_ids"], [x[0] for x in meta["output_token_logprobs"]], meta["cached_tokens"])


def converse(url: str) -> Conversation:
    """A prompt, the same again, the conversation continued, a fork in its middle, and the start after a flush."""
    draw = random.Random(7)
    prompt = [draw.randrange(10, 500) for _ in range(2600)]
    first = generate(url, prompt)
    again = generate(url, prompt)
    longer = generate(url, prompt + first.tokens + [draw.randrange(10, 500) for _ in range(300)])
    fork = generate(url, prompt[:2048] + [draw.randrange(10, 500) for _ in range(300)])
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    return Conversation(first, again, longer, fork, generate(url, prompt))


def tier_state(url: str) -> dict[str, Any]:
    return requests.get(f"{url}/server_info", timeout=60).json()["internal_states"][0]["dsv4x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    make_model(configs.load("tiny"), out, seed=0)
    return out


@pytest.fixture(scope="module")
def resident(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    log = tmp_path_factory.mktemp("off") / "server.log"
    with Server(arguments(model, "--dsv4x-tier", "off"), log) as server:
        assert tier_state(server.base_url)["counters"] == {}
        return converse(server.base_url)


@pytest.fixture(scope="module")
def tiered(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Conversation, dict[str, Any]]]:
    log = tmp_path_factory.mktemp("on") / "server.log"
    slots = str(SMALLEST_SLOTS)
    extra = (
        *("--dsv4x-hot-entries", slots, "--dsv4x-fetch-unit", str(FETCH_UNIT)),
        *("--dsv4x-checks", "step", "--dsv4x-copy-delay-ms", "2"),
    )
    with Server(arguments(model, *extra), log) as server:
        yield converse(server.base_url), tier_state(server.base_url)


def test_tier_on_and_off_give_the_same_bits(
    resident: Conversation, tiered: tuple[Conversation, dict[str, Any]]
) -> None:
    assert tiered[0] == resident


def test_at_least_half_of_the_selected_entries_miss_and_the_counters_add_up(
    tiered: tuple[Conversation, dict[str, Any]],
) -> None:
    counters = tiered[1]["counters"]
    assert counters["selected"] == counters["hits"] + counters["misses"] + counters["pending"]
    assert counters["misses"] >= counters["selected"] / 2
    assert counters["bytes_to_device"] > 0 and counters["bytes_to_host"] > 0


def test_a_repeated_prompt_hits_all_its_whole_pages_and_gives_the_same_bits(
    tiered: tuple[Conversation, dict[str, Any]],
) -> None:
    seen = tiered[0]
    assert (seen.first.cached, seen.again.cached) == (0, 2599 // 256 * 256)
    assert seen.again[:2] == seen.first[:2]


def test_a_continued_conversation_and_a_fork_hit_what_they_share(
    tiered: tuple[Conversation, dict[str, Any]],
) -> None:
    assert tiered[0].longer.cached == 2560
    assert tiered[0].fork.cached > 0


def test_a_flush_empties_the_cache_and_changes_no_bit(tiered: tuple[Conversation, dict[str, Any]]) -> None:
    assert tiered[0].after_flush == tiered[0].first
