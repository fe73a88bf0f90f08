"""The client against a real HTTP server with faults, and the runner's order, pauses and counters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from wire_server import WireServer, serving

from sglang_dsv4x.replay.client import Completion, Connection, RequestError, Sampling, TurnClient
from sglang_dsv4x.replay.conversation import Agent, Conversation, Turn
from sglang_dsv4x.replay.formats import load_trace, trace_path
from sglang_dsv4x.replay.openai_client import OpenAiClient
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import PlanError, Settings, State, replay
from sglang_dsv4x.replay.sglang_client import SglangClient
from sglang_dsv4x.replay.summary import miss_share, prompt_tokens, summarise

PROMPT = list(range(3, 303))


class Silent:
    def begin(self, *_: object) -> None: ...

    def turn(self, record: object) -> None: ...


def client_of(api: str, url: str, connection: Connection, *, strict: bool = False) -> TurnClient:
    if api == "sglang":
        return SglangClient(url, connection)
    return OpenAiClient(url, connection, model="wire", strict=strict, chat=api == "openai-chat")


def with_client(
    server: WireServer,
    work: Callable[[TurnClient], Awaitable[Any]],
    timeout_s: float = 5.0,
    api: str = "sglang",
    strict: bool = False,
) -> Any:
    async def go() -> Any:
        async with (
            serving(server) as url,
            client_of(api, url, Connection(timeout_s), strict=strict) as client,
        ):
            return await work(client)

    return asyncio.run(go())


def completed(
    server: WireServer, *, logprobs: bool = True, api: str = "sglang", strict: bool = False
) -> Completion:
    work = lambda client: client.generate(PROMPT, 6, Sampling(logprobs=logprobs))  # noqa: E731
    return with_client(server, work, api=api, strict=strict)


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


APIS = pytest.mark.parametrize("api", ["sglang", "openai", "openai-chat"])


@APIS
def test_a_stream_gives_tokens_cache_hits_and_times(api: str):
    server = WireServer(token_delay_s=0.02)
    done = completed(server, api=api)
    assert done.output_tokens == 6 and (api == "openai-chat") == (done.output_ids is None)
    assert not done.cached_tokens and done.finish_reason == "length"
    assert done.prompt_tokens == len(server.prompts[0]) and (
        api == "openai-chat" or done.prompt_tokens == 300
    )
    # On a busy machine tokens are read late and together: only their end cannot come early.
    assert len(done.gaps_s) == 5 and all(gap >= 0 for gap in done.gaps_s)
    assert done.latency_s >= done.ttft_s + sum(done.gaps_s) >= 5 * 0.02 and done.gaps_exact
    body = server.bodies[0]
    if api == "sglang":
        assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    else:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("wire", 0.0, 6)
        assert body["ignore_eos"] is True
        assert body.get("prompt") == (PROMPT if api == "openai" else None)


def test_a_chats_prompts_share_the_text_of_the_ids_that_they_share():
    server = WireServer()
    settings = Settings(api="openai-chat", vocab_size=900, connection=Connection(5.0))
    run = replayed(server, [conversation("c", 12)], settings)
    texts = [body["messages"][0]["content"] for body in server.bodies]
    words = [text.split(" ") for text in texts]
    assert [len(each) for each in words] == [r.prompt_tokens for r in run.records]
    for before, after in pairwise(words):
        assert after[: len(before) - 1] == before[:-1], "all but the tail, which is in no block"
    total = summarise(run)
    assert total.recounted == 12 and 0 < (total.hit_rate or 0) < 1
    theory = sum(r.theoretical_cached for r in run.records) / sum(r.prompt_tokens for r in run.records)
    assert total.theoretical_hit_rate == theory


def test_both_interfaces_give_the_same_answer():
    ours, theirs = completed(WireServer()), completed(WireServer(), api="openai")
    assert ours.output_ids == theirs.output_ids and ours.logprobs == theirs.logprobs is not None


@APIS
def test_tokens_that_arrive_together_share_their_time(api: str):
    done = completed(WireServer(per_event=2, token_delay_s=0.02), api=api)
    assert done.output_tokens == 6 and len(done.gaps_s) == 4 and done.gaps_exact
    assert done.gaps_s[0] == done.gaps_s[1] > 0.005


def test_a_strict_openai_server_gets_only_openai_fields_and_its_events_are_not_taken_for_tokens():
    server = WireServer(strict=True, per_event=2)
    with pytest.raises(RequestError, match=r"HTTP 400.*--openai-strict"):
        completed(server, api="openai")
    done = completed(server, api="openai", strict=True, logprobs=False)
    assert not {"ignore_eos", "return_token_ids"} & set(server.bodies[-1])
    assert done.output_ids is None and done.text_digest and done.output_tokens == 6
    assert len(done.gaps_s) == 2 and not done.gaps_exact


def test_log_probabilities_arrive_with_all_their_bits():
    for server, api in (
        (WireServer(), "sglang"),
        (WireServer(incremental=True), "sglang"),
        (WireServer(), "openai"),
    ):
        done = completed(server, api=api)
        assert done.logprobs is not None and done.output_tokens == 6
        assert [x.hex() for x in done.logprobs] == [x.hex() for x in server.sent_logprobs]
        assert any(float(f"{x:.15g}") != x for x in done.logprobs), "some need all their digits"
    assert completed(WireServer(), logprobs=False).logprobs is None


FAULTS = {
    "500": ("http", "HTTP 500: out of luck"),
    "close": ("connection", ""),
    "short": ("connection", "stream ended early, after 2 tokens"),
    "stall": ("timeout", "no end within 0.5 s, after 2 of 6 tokens"),
    "error-event": ("server", "prompt too long"),
    "abort": ("server", ""),
    "garbage": ("protocol", "not JSON"),
    "nan": ("protocol", "log-probability of output token 0 is None"),
}


@APIS
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_an_error_of_its_kind(fault: str, api: str):
    kind, words = FAULTS[fault]
    server = WireServer(faults={1: fault})
    with pytest.raises(RequestError) as error:
        work = lambda client: client.generate(PROMPT, 6, Sampling(logprobs=True))  # noqa: E731
        with_client(server, work, timeout_s=0.5, api=api)
    assert error.value.kind == kind and words in str(error.value)


def test_a_prompt_that_sglang_counts_otherwise_is_an_error_and_another_servers_count_is_kept():
    with pytest.raises(RequestError, match="server counted 301 prompt tokens, 300 were sent"):
        completed(WireServer(faults={1: "wrong-prompt-count"}))
    assert completed(WireServer(faults={1: "wrong-prompt-count"}), api="openai").prompt_tokens == 301


@APIS
def test_an_answer_without_usage_is_an_answer_of_unknown_hits(api: str):
    done = completed(WireServer(faults={1: "no-usage"}), api=api)
    assert done.cached_tokens is None and done.output_tokens == 6 and len(done.gaps_s) == 5
    assert completed(WireServer(cache_report=False), api="openai").cached_tokens is None


@pytest.mark.parametrize("reported", [True, False])
def test_a_usage_that_leaves_out_a_zero_is_a_zero_unless_hits_are_never_reported(reported: bool):
    """Found on SGLang: a cold turn that counts as unknown drops out of the hit rate and flatters it."""
    settings = Settings(api="openai", vocab_size=900, connection=Connection(5.0))
    run = replayed(WireServer(cache_report=reported), [conversation("c", 9)], settings)
    hits = [r.completion.cached_tokens for r in run.records if r.completion]
    theory = [r.theoretical_cached for r in run.records]
    assert hits == (theory if reported else [None] * 9) and 0 in theory and max(theory) > 0
    assert summarise(run).without_usage == (0 if reported else 9)


def test_an_answer_that_is_not_json_is_a_protocol_error():
    with pytest.raises(RequestError) as error:
        with_client(WireServer(), lambda c: c.http.get_json("/health"))
    assert error.value.kind == "protocol"


@APIS
def test_nobody_listening_is_a_connection_error(api: str):
    async def go() -> None:
        async with client_of(api, "http://127.0.0.1:9", Connection(1.0)) as client:
            await client.generate(PROMPT, 1, Sampling())

    with pytest.raises(RequestError) as error:
        asyncio.run(go())
    assert error.value.kind == "connection"


@APIS
def test_failed_turns_are_counted_and_the_run_goes_on(api: str):
    faults = {2: "500", 3: "close", 5: "no-usage", 6: "error-event", 8: "stall"}
    settings = Settings(timeout_s=0.5, connection=Connection(0.5), api=api, vocab_size=900)
    run = replayed(WireServer(faults=faults), [conversation("c", 9)], settings)
    kinds = [None, "http", "connection", None, None, "server", None, "timeout", None]
    assert [r.error_kind for r in run.records] == kinds
    total = summarise(run)
    assert total.turns == 5 and total.failures == {"http": 1, "connection": 1, "server": 1, "timeout": 1}
    answered = [run.records[i] for i in (0, 3, 4, 6, 8)]
    lengths = {r.number: prompt_tokens(r, r.completion) for r in answered if r.completion}
    assert total.prompt_tokens == sum(lengths.values())
    assert total.ttft_s and total.ttft_s.samples == 5 and total.gap_s and total.gap_s.samples == 15
    assert total.without_usage == 1 and total.retries == {} and run.partial is None
    known = [r for r in answered if r.number != 5]
    assert (total.cached_tokens or 0) + (total.new_tokens or 0) == sum(lengths[r.number] for r in known)


def test_retries_are_off_by_default_and_counted_when_asked_for():
    settings = Settings(connection=Connection(5.0), pace=Pace(retries=2))
    server = WireServer(faults={1: "500", 2: "close", 4: "500", 5: "500", 6: "500"})
    run = replayed(server, [conversation("c", 2)], settings)
    first, second = run.records
    assert first.retried == ("http", "connection") and first.completion is not None
    assert second.retried == ("http", "http") and second.error_kind == "http"
    assert len(server.prompts) == 6
    assert summarise(run).retries == {"http": 3, "connection": 1} and summarise(run).failures == {"http": 1}
    assert first.completion.latency_s < 0.5, "only the last attempt is timed"


def test_what_cannot_pass_is_not_tried_again():
    settings = Settings(connection=Connection(5.0), pace=Pace(retries=3), api="openai", vocab_size=900)
    server = WireServer(strict=True)
    run = replayed(server, [conversation("c", 2)], settings)
    assert len(server.bodies) == 2 and [r.error_kind for r in run.records] == ["http", "http"]


def test_a_duration_ends_the_run_between_turns_and_within_pauses():
    server = WireServer(token_delay_s=0.03)
    settings = Settings(pace=Pace(concurrency=2, duration_s=0.5))
    run = replayed(server, [conversation("a", 100), conversation("b", 100)], settings)
    assert run.duration_reached and run.partial is None
    assert 2 < len(run.records) < 40 and run.not_sent == 200 - len(run.records)
    assert all(r.completion for r in run.records), "turns in flight are answered"
    assert run.wall_s < 1.5
    paused = replayed(
        WireServer(), [conversation("a", 5, pause_s=50.0)], Settings(pace=Pace(1, 1.0, duration_s=0.3))
    )
    assert paused.duration_reached and paused.records == [] and 0.3 <= paused.wall_s < 1.5


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


def own(counters: dict[str, int] | None) -> dict[str, int]:
    return {name: (counters or {})[name] for name in ("selected", "misses", "hits")}


def test_tier_counters_are_differences_per_turn_alone_and_totals_together():
    alone = replayed(WireServer(tier=True), [conversation("a", 3)])
    assert [own(r.tier) for r in alone.records] == [{"selected": 400, "misses": 300, "hits": 100}] * 3
    assert own(alone.tier) == {"selected": 1200, "misses": 900, "hits": 300}
    assert [sample.counters["selected"] for sample in alone.tier_samples][:3] == [400, 800, 1200]
    assert miss_share(alone.tier) == 0.75
    settings = Settings(pace=Pace(concurrency=2), timeout_s=5.0)
    together = replayed(WireServer(tier=True), [conversation("a", 3), conversation("b", 3)], settings)
    assert [r.tier for r in together.records] == [None] * 6
    assert own(together.tier) == {"selected": 2400, "misses": 1800, "hits": 600}
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
