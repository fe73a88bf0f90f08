"""Evidence that the tier changes nothing under concurrency, where CPU arithmetic itself changes the last bits.

A server with the tier off and one with it on get the same prompts in turns: one at a time, then 2, 4 and 8 at once, in
several arrival orders. Prompts are cached before, so that both servers start from the same bytes, and the hot cache is
so small that decode fetches.

Statistic. A run is one prompt in one round. Two runs of a prompt differ by the mean of |log-probability difference|
over the output tokens up to the first that differs, that one included (there both are the greatest log-probability,
which is continuous). A run's distance is what it differs by from the nearest tier-off run of its prompt in another
round of that concurrency, or alone. The distances of the tier-off server's runs are its own spread, measured first.
The tier-on server's distances must not rank above them: one-sided permutation test of the rank sum (20,000
permutations, no assumption about the distribution), failing at p < 0.001. One at a time the spread is nothing, and the
bits must be the same.

Power. Tried with one row of one layer swapped for another in every decode step, so that one of the requests in the
batch reads it: other bits at concurrency 1, and 16, 8 and 6 of 32 runs moved at 2, 4 and 8, by up to 0.12 nats, where
the tier-off server's spread was 0. At 4 and 8 that alone is p = 0.003 and 0.012, so all concurrencies are tested
together as well. A single wrong row in a single step does not show here: the shadow check of `--dsv4x-checks step`, on
in the tier-on server, compares every row that is read, and ends the server.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests

from sglang_dsv4x import configs
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

CONCURRENCIES = (2, 4, 8)
ROUNDS = 4
OUTPUT_TOKENS = 8
PROMPT_TOKENS = (520, 540, 560, 590, 620, 660, 700, 750)
CHUNK = 512
FETCH_UNIT = 1
HOT_ENTRIES = FETCH_UNIT * (
    8 * (64 + 2) + CHUNK // 4
)  # the fewest that are accepted: half of the prompts' entries
PERMUTATIONS = 20_000
SIGNIFICANT = 0.001

Output = list[tuple[int, float]]
"""Output tokens with their log-probabilities."""


class Runs(NamedTuple):
    alone: list[list[Output]]
    """Per round and prompt, one at a time."""
    together: dict[int, list[list[Output]]]
    """Per concurrency: per round and prompt."""


class Seen(NamedTuple):
    off: Runs
    on: Runs
    counters: dict[str, int]


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(10, 500) for _ in range(tokens)] for tokens in PROMPT_TOKENS]


def generate(url: str, prompt: list[int], output_tokens: int) -> Output:
    reply = requests.post(
        f"{url}/generate",
        json={
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
            "return_logprob": True,
        },
        timeout=300,
    )
    reply.raise_for_status()
    return [(token, value) for value, token, _ in reply.json()["meta_info"]["output_token_logprobs"]]


def one_round(url: str, concurrency: int, seed: int) -> list[Output]:
    order = list(range(len(PROMPT_TOKENS)))
    random.Random(seed).shuffle(order)
    known = prompts()
    with ThreadPoolExecutor(concurrency) as pool:
        outputs = list(pool.map(lambda i: generate(url, known[i], OUTPUT_TOKENS), order))
    return [output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])]


def in_turns(off: str, on: str) -> tuple[Runs, Runs]:
    """The servers take turns, round by round, so that both see the machine equally loaded."""
    for url in (off, on):
        for prompt in prompts():
            generate(url, prompt, 1)
    runs = {url: Runs([], {concurrency: [] for concurrency in CONCURRENCIES}) for url in (off, on)}
    for seed in range(2):
        for url in (off, on):
            runs[url].alone.append(one_round(url, 1, seed))
    for concurrency in CONCURRENCIES:
        for seed in range(ROUNDS):
            for url in (off, on):
                runs[url].together[concurrency].append(one_round(url, concurrency, seed))
    return runs[off], runs[on]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("concurrent")
    make_model(configs.load("tiny"), folder / "tiny", seed=0)
    common = [
        *("--model-path", str(folder / "tiny"), "--enable-dsv4x", "--skip-server-warmup", "--sleep-on-idle"),
        *("--max-total-tokens", "16384", "--swa-full-tokens-ratio", "0.5"),
        *("--max-running-requests", "8", "--chunked-prefill-size", str(CHUNK)),
    ]
    tier = [
        *("--dsv4x-hot-entries", str(HOT_ENTRIES), "--dsv4x-fetch-unit", str(FETCH_UNIT)),
        *("--dsv4x-checks", "step", "--dsv4x-copy-delay-ms", "1"),
    ]
    with (
        Server([*common, "--dsv4x-tier", "off"], folder / "off.log") as off,
        Server([*common, *tier], folder / "on.log") as on,
    ):
        runs = in_turns(off.base_url, on.base_url)
        state: dict[str, Any] = requests.get(f"{on.base_url}/server_info", timeout=60).json()
        yield Seen(*runs, state["internal_states"][0]["dsv4x"]["counters"])


def distance(output: Output, reference: Output) -> float:
    """Mean |difference| of log-probabilities, in nats, up to the first token that differs (included)."""
    differences = []
    for (token, value), (expected, known) in zip(output, reference, strict=True):
        differences.append(abs(value - known))
        if token != expected:
            break
    return float(np.mean(differences))


def distances(rounds: list[list[Output]], off: list[list[Output]], alone: list[Output]) -> np.ndarray:
    """[rounds * prompts], nats; round i is not compared with round i of `off`, so that `off` itself can be given."""
    return np.array(
        [
            min(distance(run, each[prompt]) for each in [alone, *off[:number], *off[number + 1 :]])
            for number, runs in enumerate(rounds)
            for prompt, run in enumerate(runs)
        ]
    )


def chance_of_greater(on: np.ndarray, off: np.ndarray) -> float:
    """Share of random splits of all distances whose first part has a rank sum at least `on`'s (ties: mean rank)."""
    both = np.concatenate([on, off])
    _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    shuffled = np.random.default_rng(0).permuted(np.tile(ranks, (PERMUTATIONS, 1)), axis=1)
    reached = shuffled[:, : len(on)].sum(1) >= ranks[: len(on)].sum()
    return float((reached.sum() + 1) / (PERMUTATIONS + 1))


def test_one_at_a_time_the_bits_are_those_of_the_server_without_the_tier(seen: Seen) -> None:
    assert seen.off.alone[0] == seen.off.alone[1]
    assert seen.on.alone == seen.off.alone


@pytest.mark.parametrize("concurrencies", [*((each,) for each in CONCURRENCIES), CONCURRENCIES], ids=str)
def test_log_probabilities_lie_within_the_spread_of_the_server_without_the_tier(
    seen: Seen, concurrencies: tuple[int, ...]
) -> None:
    off, on = [], []
    for concurrency in concurrencies:
        resident, alone = seen.off.together[concurrency], seen.off.alone[0]
        off.append(distances(resident, resident, alone))
        on.append(distances(seen.on.together[concurrency], resident, alone))
    one, other = np.concatenate(on), np.concatenate(off)
    chance = chance_of_greater(one, other)
    facts = (
        f"{concurrencies} at once: runs unlike every other tier-off run: off {np.count_nonzero(other)}, "
        f"on {np.count_nonzero(one)} of {len(one)}; largest distance: off {other.max():.2e}, on {one.max():.2e} nats; "
        f"p = {chance:.4f}"
    )
    print(facts)
    assert chance >= SIGNIFICANT, facts


def test_the_tier_was_used(seen: Seen) -> None:
    """Otherwise the test above compares a server with itself."""
    assert seen.counters["misses"] > seen.counters["selected"] / 10


def test_the_statistic_tells_a_shifted_sample_from_the_same_one() -> None:
    draw = np.random.default_rng(1)
    rare = np.where(draw.random(64) < 0.1, draw.random(64), 0.0)
    assert chance_of_greater(rare[:32], rare[32:]) > 0.05
    assert chance_of_greater(rare[:32] + 1e-6, rare[32:]) < SIGNIFICANT
    assert distance([(1, -1.0), (2, -2.0), (3, -9.0)], [(1, -1.0), (4, -1.5), (3, 0.0)]) == 0.25
