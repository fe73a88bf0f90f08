"""300 random operations through one real server with small pools, forced retraction and every check on.

Bug class: a location that changes hands (chunk, abort, retraction, fork, eviction, flush) with old bytes or tags left
behind, a page or request slot that is never given back, a request that never ends. Any of them ends the server:
`--dsv4x-checks step` compares every row that attention reads with a resident copy, checks all tables and bytes after
every step and poisons freed rows; SGLang's leak checks run at every step (SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY,
SGLANG_CHECK_KV_PAGE_INVARIANTS) and at idle.

DSV4X_TEST_RANDOM_SEEDS=1,2,3 in the environment runs the 300 operations once for each of these seeds instead of for
one; each takes as long again (about a minute).
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from sglang_dsv4x import configs
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

SEEDS = [int(seed) for seed in os.environ.get("DSV4X_TEST_RANDOM_SEEDS", "1").split(",")]
OPERATIONS = 300
CONCURRENCY = 8
CHUNK = 256
FETCH_UNIT = 1
HOT_ENTRIES = FETCH_UNIT * (CONCURRENCY * (64 + 2) + CHUNK // 4)  # the fewest that are accepted
LONGER_THAN_HOT = 4 * HOT_ENTRIES + 400
TOTAL_TOKENS = 8192
REQUEST_TIMEOUT_S = 300
"""A request that takes longer counts as stuck; none takes more than a few seconds on a machine of its own."""


class Answer(NamedTuple):
    tokens: list[int]
    log_probabilities: list[float]
    cached: int
    retractions: int
    aborted: bool


def small_model(folder: Path) -> Path:
    """Half the layers of `tiny`: every kind of layer once and C4 twice."""
    shape = {**configs.load("tiny"), "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}
    make_model({**shape, "num_hash_layers": 1}, folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("random")
    argv = [
        *("--model-path", str(small_model(folder / "model")), "--enable-dsv4x", "--skip-server-warmup"),
        *("--dsv4x-checks", "step", "--dsv4x-copy-delay-ms", "1", "--dsv4x-resume-memory-gb", "0.01"),
        *("--dsv4x-hot-entries", str(HOT_ENTRIES), "--dsv4x-fetch-unit", str(FETCH_UNIT)),
        *("--max-total-tokens", str(TOTAL_TOKENS), "--swa-full-tokens-ratio", "0.4"),
        *("--max-running-requests", str(CONCURRENCY), "--chunked-prefill-size", str(CHUNK)),
    ]
    switches = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "17",
    }
    with Server(argv, folder / "server.log", switches) as running:
        yield running


class Client:
    """Sends the operations, each in a thread of its own, and keeps what later ones build on."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.conversations: list[list[int]] = []
        self.seen: Counter[str] = Counter()
        self.names = 0
        self.executor = ThreadPoolExecutor(CONCURRENCY)
        self.running: set[Future[None]] = set()

    # Requests

    def send(self, body: dict[str, Any]) -> Answer:
        """Raises: AssertionError for a wrong answer, requests' errors when the server is gone or stuck."""
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": body.pop("max_new_tokens")}
        reply = requests.post(
            f"{self.server.base_url}/generate",
            json={**body, "sampling_params": sampling, "return_logprob": True, "stream": True},
            timeout=REQUEST_TIMEOUT_S,
            stream=True,
        )
        last: dict[str, Any] = {}
        for line in reply.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            last = json.loads(line.removeprefix(b"data: "))
            assert "meta_info" in last, last
            if body.get("abort_after") is not None and len(last["output_ids"]) >= body["abort_after"]:
                self.abort(body["rid"])
        meta = last["meta_info"]
        known = meta.get("output_token_logprobs") or []
        answer = Answer(
            last["output_ids"],
            [value for value, _, _ in known],
            meta.get("cached_tokens") or 0,  # absent where a request was aborted while waiting
            meta.get("num_retractions") or 0,
            meta["finish_reason"]["type"] == "abort",
        )
        assert all(math.isfinite(value) for value in answer.log_probabilities), answer
        assert answer.aborted or len(answer.tokens) == sampling["max_new_tokens"], last
        return answer

    def abort(self, name: str) -> None:
        requests.post(f"{self.server.base_url}/abort_request", json={"rid": name}, timeout=60)

    def spawn(self, work: Any, *arguments: Any) -> None:
        """Starts `work` as soon as fewer than CONCURRENCY run; an error of an earlier one is raised here."""
        while len(self.running) >= CONCURRENCY:
            self.collect()
        self.running.add(self.executor.submit(work, *arguments))

    def collect(self) -> None:
        done, self.running = wait(self.running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()

    def drain(self) -> None:
        while self.running:
            self.collect()

    def name(self) -> str:
        self.names += 1
        return f"operation-{self.names}-end"

    def fresh(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, 500) for _ in range(tokens)]

    def keep(self, tokens: list[int]) -> None:
        if 256 < len(tokens) < 1500:  # one whole page can be hit
            self.conversations.append(tokens)
            del self.conversations[:-12]

    # Operations

    def ask(self, prompt: list[int], output_tokens: int) -> None:
        def work() -> None:
            answer = self.send({"input_ids": prompt, "max_new_tokens": output_tokens})
            self.seen["hits"] += answer.cached > 0
            self.seen["retracted"] += answer.retractions
            self.keep(prompt + answer.tokens)

        self.spawn(work)

    def extend(self) -> None:
        self.ask(self.fresh(self.random.randint(300, 600)), self.random.randint(2, 6))

    def decode(self) -> None:
        """A short prompt and many tokens: past boundaries of four."""
        self.ask(self.fresh(self.random.randint(5, 60)), self.random.randint(10, 24))

    def go_on(self) -> None:
        if self.conversations:
            self.ask(
                self.random.choice(self.conversations) + self.fresh(self.random.randint(1, 90)),
                self.random.randint(2, 6),
            )

    def fork(self) -> None:
        if self.conversations:
            known = self.random.choice(self.conversations)
            cut = self.random.randint(1, len(known))
            self.ask(known[:cut] + self.fresh(self.random.randint(1, 90)), self.random.randint(2, 6))

    def first_token(self) -> None:
        self.ask(self.fresh(self.random.randint(40, 300)), 1)

    def same_phase(self) -> None:
        """As many requests as may run, equally long: all complete entries, and open pages, in the same steps."""
        tokens = self.random.choice([127, 128, 253, 255])
        same = self.fresh(tokens)
        for _ in range(CONCURRENCY):
            self.ask(self.random.choice([same, self.fresh(tokens)]), 6)
        self.seen["bursts"] += 1

    def longer_than_hot(self) -> None:
        self.ask(self.fresh(LONGER_THAN_HOT), 4)
        self.seen["longer than hot"] += 1

    def abort_in_decode(self) -> None:
        body = {
            "input_ids": self.fresh(self.random.randint(20, 300)),
            "max_new_tokens": 200,
            "rid": self.name(),
        }
        body["abort_after"] = self.random.randint(1, 9)

        def work() -> None:
            answer = self.send(body)
            assert answer.aborted
            self.seen["aborted in decode"] += len(answer.tokens) > 0

        self.spawn(work)

    def abort_whenever(self) -> None:
        """While waiting, between chunks, in a chunk or in decode, as it happens."""
        body = {
            "input_ids": self.fresh(self.random.randint(300, 1300)),
            "max_new_tokens": 4,
            "rid": self.name(),
        }
        delay = self.random.uniform(0.01, 1.5)

        def work() -> None:
            timer = threading.Timer(delay, self.abort, [body["rid"]])
            timer.start()
            self.send(body)
            timer.join()

        self.spawn(work)

    def abort_in_chunk(self) -> None:
        """Alone on the server, once its log says that a chunk is computed and at least two more are to come."""
        self.drain()
        body = {"input_ids": self.fresh(8 * CHUNK), "max_new_tokens": 4, "rid": self.name()}
        log = self.server.log_path.open("rb")
        log.seek(0, os.SEEK_END)
        self.spawn(lambda: self.expect_abort(body))
        deadline = time.monotonic() + 60
        with log:
            while time.monotonic() < deadline and self.server.ended() is None:
                line = log.readline().decode(errors="replace")
                if "Prefill batch" in line and pending_tokens(line) >= 2 * CHUNK:
                    break
                if not line:
                    time.sleep(0.01)
        self.abort(body["rid"])

    def expect_abort(self, body: dict[str, Any]) -> None:
        answer = self.send(body)
        self.seen["aborted in chunk"] += answer.aborted and not answer.tokens

    def flush(self) -> None:
        self.drain()
        assert self.try_flush() == 200
        self.seen["flushed"] += 1

    def flush_while_busy(self) -> None:
        """Refused, and nothing is lost; or done, where everything has just ended."""
        self.extend()
        assert self.try_flush() in (200, 400)

    def try_flush(self) -> int:
        return requests.post(
            f"{self.server.base_url}/flush_cache", params={"timeout": 0}, timeout=60
        ).status_code

    def state(self) -> dict[str, Any]:
        reply = requests.get(f"{self.server.base_url}/server_info", timeout=60)
        return reply.json()["internal_states"][0]["dsv4x"]


def pending_tokens(line: str) -> int:
    return int(line.split("#pending-token: ")[1].split(",")[0])


def known_answer(client: Client) -> Answer:
    """Of a fixed prompt, alone, with an empty cache."""
    client.drain()
    assert client.try_flush() == 200
    draw = random.Random(99)
    return client.send({"input_ids": [draw.randrange(10, 500) for _ in range(900)], "max_new_tokens": 12})


@pytest.mark.parametrize("seed", SEEDS)
def test_after_300_operations_the_server_answers_as_before_and_every_pool_is_whole(
    server: Server, seed: int
) -> None:
    client = Client(server, seed)
    operations = [
        (client.extend, 12),
        (client.decode, 14),
        (client.go_on, 22),
        (client.fork, 22),
        (client.first_token, 10),
        (client.abort_in_decode, 8),
        (client.abort_whenever, 5),
        (client.abort_in_chunk, 2),
        (client.same_phase, 2),
        (client.longer_than_hot, 1),
        (client.flush, 2),
        (client.flush_while_busy, 2),
    ]
    before = known_answer(client)
    started = client.state()["counters"]
    weights = [weight for _, weight in operations]
    try:
        for operation in client.random.choices([op for op, _ in operations], weights, k=OPERATIONS):
            operation()
        client.drain()
        busy = client.state()
        after = known_answer(client)
        client.flush()
    except requests.RequestException as error:
        time.sleep(2)  # a server that fails takes a moment to end
        raise AssertionError(f"{error!r}\n{server.ended()}\n{server.log_tail(60)}") from error
    finally:
        client.executor.shutdown(cancel_futures=True)
    empty = client.state()["pools"]
    print(dict(client.seen), busy["counters"])

    assert after == before
    for name in ("full", "swa"):
        pool = busy["pools"][name]
        assert pool["free"] + pool["evictable"] == pool["total"] and pool["protected"] == 0
        assert empty[name]["free"] == empty[name]["total"]
    assert busy["pools"]["requests"]["free"] == busy["pools"]["requests"]["total"]
    kinds = [
        "hits",
        "retracted",
        "aborted in decode",
        "aborted in chunk",
        "bursts",
        "longer than hot",
        "flushed",
    ]
    assert all(client.seen[kind] for kind in kinds), client.seen
    for name in ("misses", "hits", "replaced", "prefill_hot", "prefill_host"):
        assert busy["counters"][name] > started[name]
    assert "leak" not in server.log_path.read_text("utf-8", "replace").lower()
