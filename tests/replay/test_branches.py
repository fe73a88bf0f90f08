"""Agents that run beside each other: who waits for whom, how many requests at once, what could be cached."""

from __future__ import annotations

import asyncio

import pytest
from wire_server import WireServer, serving

from sglang_dsv4x.replay.blocks import Blocks, common_blocks
from sglang_dsv4x.replay.conversation import Agent, Branches, Conversation, Turn, first_turns, turns
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import Settings, State, replay


class Silent:
    def begin(self, conversations: object, runs: object, settings: object) -> None: ...

    def turn(self, record: object) -> None: ...


def turn(blocks: list[int], pause_s: float = 0.0) -> Turn:
    return Turn(64 * len(blocks) + 1, 2, blocks, pause_s)


def agent(name: str, *prompts: list[int]) -> Agent:
    return Agent(name, tuple(map(turn, prompts)))


def conversation(*steps: Turn | Agent | Branches) -> Conversation:
    return Conversation("c", 64, "c", Agent("main", steps))


def replayed(server: WireServer, what: Conversation, pace: Pace | None = None) -> Run:
    state = State()

    async def go() -> None:
        async with serving(server) as url:
            settings = Settings(pace=pace or Pace(), timeout_s=5.0)
            await replay(url, [what], settings, state, Silent())

    asyncio.run(go())
    assert state.run is not None
    return state.run


def order(run: Run) -> list[str]:
    return [r.agent.rsplit("/", 1)[-1] for r in sorted(run.records, key=lambda r: r.started_s)]


PREFIX = list(range(8))


def forked(count: int, turns_beside: int | None, own_turns: int) -> Conversation:
    branches = tuple(agent(f"f{i}", [*PREFIX, 100 + i], [*PREFIX, 100 + i, 200 + i]) for i in range(count))
    own = [turn([*PREFIX, *range(50, 51 + i)]) for i in range(own_turns)]
    return conversation(turn(PREFIX), Branches(branches, turns_beside), *own)


def test_branches_that_are_waited_for_end_before_their_agent_goes_on():
    run = replayed(WireServer(), forked(2, 0, 2))
    assert order(run) == ["main", "f0", "f1", "f0", "f1", "main", "main"]


def test_the_agent_runs_its_turns_beside_branches_until_they_are_due():
    server = WireServer(token_delay_s=0.02)
    run = replayed(server, forked(1, 1, 3), Pace(concurrency=2))
    started = {(r.agent, r.number): r.started_s for r in run.records}
    ended = max(r.ended_s for r in run.records if r.agent == "main/f0")
    own = [at for (name, _), at in sorted(started.items(), key=lambda i: i[0][1]) if name == "main"]
    assert own[1] < ended < own[2]


def test_a_branch_nobody_waits_for_still_belongs_to_the_conversation():
    run = replayed(WireServer(token_delay_s=0.01), forked(3, None, 1))
    assert len(run.records) == run.planned_turns == 8


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_run_at_once_than_conversations_may(concurrency: int):
    server = WireServer(token_delay_s=0.01)
    run = replayed(server, forked(8, None, 2), Pace(concurrency=concurrency))
    assert server.most_running == concurrency and len(run.records) == 19


def test_theory_follows_the_order_in_which_branches_really_ran():
    """The first turns of both branches run before either's second: numbers alone would say otherwise."""
    shared = [7, 8, 9, 10]
    branches = (agent("a", PREFIX, shared), agent("b", shared, PREFIX))
    server = WireServer()
    run = replayed(server, conversation(Branches(branches)))
    assert [(r.agent[-1], r.theoretical_cached) for r in run.records] == [
        ("a", 0),
        ("b", 0),
        ("a", 256),
        ("b", 512),
    ]
    assert [r.completion.cached_tokens for r in run.records if r.completion] == [0, 0, 256, 512]


def test_a_branch_that_fails_is_a_record_and_the_others_go_on():
    run = replayed(WireServer(faults={2: "500"}), forked(2, 0, 1))
    assert [r.error_kind for r in run.records].count("http") == 1 and len(run.records) == 6


def test_the_end_of_the_duration_ends_branches_too():
    slow = Branches((Agent("f", (turn([1], pause_s=60.0),)),), None)
    run = replayed(WireServer(), conversation(turn([1]), slow), Pace(think_time_scale=1.0, duration_s=0.3))
    assert run.duration_reached and len(run.records) == 1 and run.wall_s < 5


def test_cutting_goes_through_branches():
    assert len(list(turns(first_turns(forked(3, 0, 2), 4).main))) == 4
    assert len(list(turns(forked(3, 0, 2).main))) == 9


def test_blocks_hold_what_they_were_given_however_they_were_made():
    chain, plain = Blocks([1, 2, 3]), [1, 2, 3]
    for i in range(300):
        keep = len(plain) - i % 3
        chain, plain = chain.extended([1000 + i, i], keep), [*plain[:keep], 1000 + i, i]
        assert list(chain) == plain and len(chain) == len(plain)
    again = Blocks(plain, base=chain)
    assert again == chain and again[5] == plain[5] and again[3:9] == tuple(plain[3:9])
    assert common_blocks(chain.array(), again.array()) == len(plain)
    assert list(Blocks([9, 9], base=chain)) == [9, 9] and list(Blocks()) == []


def test_a_conversation_begins_when_the_trace_says_at_the_chosen_scale():
    late = Conversation("c", 64, "c", agent("main", [1]), arrival_s=4.0)
    assert replayed(WireServer(), late, Pace(think_time_scale=0.1)).records[0].started_s >= 0.4
    assert replayed(WireServer(), late).records[0].started_s < 0.4
