"""The client against a real HTTP server with faults, and the runner's order, pauses and counters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from wire_server import WireServer, serving

from sglang_dsv4x.replay.client import Client, Completion, RequestError, Sampling
from sglang_dsv4x.replay.conversation import Agent, Conversation, Turn
from sglang_dsv4x.replay.formats import load_trace, trace_path
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import PlanError, Settings, State, replay
from sglang_dsv4x.replay.summary import miss_share, summarise

PROMPT = list(range(3, 303))


class Silent:
    def begin(self, conversations: object) -> None: ...

    def turn(self, record: object) -> None: ...


def with_client(server: WireServer, work: Callable[[Client], Awaitable[Any]], timeout_s: float = 5.0) -> Any:
    async def go() -> Any:
        async with serving(server) as url, Client(url, timeout_s=timeout_s) as client:
            return await work(client)

    return asyncio.run(go())


def completed(server: WireServer, *, logprobs: bool = True) -> Completion:
    return with_client(server, lambda c: c.generate(PROMPT, 6, Sampling(logprobs=logprobs)))


def replayed(server: WireServer, conversations: list[Conversation], settings: Settings | None = None) -> Run:
    state = State()

    async def go() -> None:
        async with serving(server) as url:
            await replay(url, conversations, settings or Settings(timeout_s=5.0), state, Silent())

    asyncio.run(go())
    assert state.run is not None
    return state.run


def conversation(name: str, turns: int, pause_s: float = 0.0) -> Conversation:
    steps = tuple(Turn(64 * (i + 1) + 1, 4, tuple(range(i + 1)), pause_s) for i in range(turns))
    return Conversation(name, 64, name, Agent("main", steps))


def test_a_stream_gives_tokens_cache_hits_and_times():
    server = WireServer(token_delay_s=0.02)
    done = completed(server)
    assert len(done.output_ids) == 6 and done.cached_tokens == 0 and done.finish_reason == "length"
    assert len(done.gaps_s) == 5 and all(gap > 0.01 for gap in done.gaps_s)
    assert done.latency_s >= done.ttft_s + sum(done.gaps_s) > 0.1
    sampling = server.bodies[0]["sampling_params"]
    assert sampling == {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


def test_log_probabilities_arrive_with_all_their_bits():
    for server in (WireServer(), WireServer(incremental=True)):
        done = completed(server)
        assert done.logprobs is not None and len(done.output_ids) == 6
        assert [x.hex() for x in done.logprobs] == [x.hex() for x in server.sent_logprobs]
        assert any(float(f"{x:.15g}") != x for x in done.logprobs), "some need all their digits"
    assert completed(WireServer(), logprobs=False).logprobs is None


FAULTS = {
    "500": ("http", "HTTP 500: out of luck"),
    "close": ("connection", ""),
    "short": ("connection", "stream ended early, after 2 tokens"),
    "stall": ("timeout", "no end within 0.5 s, after 2 of 6 tokens"),
    "error-event": ("server", "prompt too long"),
    "abort": ("server", "retracted too often"),
    "no-usage": ("protocol", "cached_tokens is missing"),
    "wrong-prompt-count": ("protocol", "server counted 301 prompt tokens, 300 were sent"),
    "nan": ("protocol", "log-probability of output token 0 is None"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_an_error_of_its_kind(fault: str):
    kind, words = FAULTS[fault]
    server = WireServer(faults={1: fault})
    with pytest.raises(RequestError) as error:
        with_client(server, lambda c: c.generate(PROMPT, 6, Sampling(logprobs=True)), timeout_s=0.5)
    assert error.value.kind == kind and words in str(error.value)


def test_an_answer_that_is_not_json_is_a_protocol_error():
    with pytest.raises(RequestError) as error:
        with_client(WireServer(), lambda c: c.get_json("/health"))
    assert error.value.kind == "protocol"


def test_nobody_listening_is_a_connection_error():
    async def go() -> None:
        async with Client("http://127.0.0.1:9", timeout_s=1) as client:
            await client.generate(PROMPT, 1, Sampling())

    with pytest.raises(RequestError) as error:
        asyncio.run(go())
    assert error.value.kind == "connection"


def test_failed_turns_are_counted_and_the_run_goes_on():
    faults = {2: "500", 3: "close", 5: "no-usage", 6: "error-event"}
    run = replayed(WireServer(faults=faults), [conversation("c", 7)])
    assert [r.error_kind for r in run.records] == [
        None,
        "http",
        "connection",
        None,
        "protocol",
        "server",
        None,
    ]
    total = summarise(run)
    assert total.turns == 3 and total.failures == {"http": 1, "connection": 1, "protocol": 1, "server": 1}
    assert total.prompt_tokens == sum(run.records[i].prompt_tokens for i in (0, 3, 6))
    assert run.partial is None


def test_an_infinite_server_cache_achieves_exactly_the_theory():
    """Also the order of agents: a sub-agent sent out of turn would find other pages cached."""
    server = WireServer()
    run = replayed(server, load_trace(trace_path("small"), "weka"))
    assert [r.completion.cached_tokens for r in run.records if r.completion] == [
        r.theoretical_cached for r in run.records
    ]
    assert [r.number for r in run.records] == list(range(1, 17))
    assert [r.agent for r in run.records][3:9] == ["main", *["main/agent_001"] * 4, "main"]
    assert summarise(run).hit_rate == summarise(run).theoretical_hit_rate > 0.8
    assert [len(p) for p in server.prompts] == [r.prompt_tokens for r in run.records]


def test_settings_decide_what_is_sent():
    server = WireServer()
    settings = Settings(scale=0.5, max_turns=3, output_tokens=2, flush_cache=True, timeout_s=5.0)
    run = replayed(server, load_trace(trace_path("small"), "weka"), settings)
    assert len(run.records) == 3 and server.flushed == 1
    assert all(r.completion and len(r.completion.output_ids) == 2 for r in run.records)
    assert 0.45 < run.records[0].prompt_tokens / 2933 < 0.55
    assert run.server["version"] == "test"


def test_tier_counters_are_differences_per_turn_alone_and_totals_together():
    alone = replayed(WireServer(tier=True), [conversation("a", 3)])
    assert [r.tier for r in alone.records] == [{"selected": 400, "misses": 300, "hits": 100}] * 3
    assert alone.tier == {"selected": 1200, "misses": 900, "hits": 300}
    assert miss_share(alone.tier) == 0.75
    settings = Settings(pace=Pace(concurrency=2), timeout_s=5.0)
    together = replayed(WireServer(tier=True), [conversation("a", 3), conversation("b", 3)], settings)
    assert [r.tier for r in together.records] == [None] * 6
    assert together.tier == {"selected": 2400, "misses": 1800, "hits": 600}
    assert replayed(WireServer(), [conversation("a", 1)]).tier is None


def test_concurrency_runs_that_many_conversations_and_no_more():
    server = WireServer(token_delay_s=0.01)
    settings = Settings(pace=Pace(concurrency=3), copies=5, timeout_s=5.0)
    run = replayed(server, [conversation("c", 2)], settings)
    assert server.most_running == 3
    assert len(run.records) == 10 and len({r.prompt_digest for r in run.records}) == 10


def test_pauses_are_scaled_and_off_by_default():
    run = replayed(WireServer(), [conversation("c", 3, pause_s=1.0)])
    assert run.wall_s < 0.9
    slow = replayed(
        WireServer(), [conversation("c", 3, pause_s=1.0)], Settings(pace=Pace(think_time_scale=0.1))
    )
    assert 0.3 <= slow.wall_s < 0.9
    assert [r.waited_s for r in slow.records] == [0.1] * 3


def test_a_turn_too_long_for_the_server_is_refused_before_anything_is_sent():
    server = WireServer(longest=200)
    with pytest.raises(PlanError, match=r"c turn 4 takes 261 tokens.*--scale 0\.75"):
        replayed(server, [conversation("c", 4)])
    assert server.prompts == []
