"""The simulated cache against SGLang's own, and what resume points change."""

from __future__ import annotations

import itertools
import random

import pytest
from sglang_cache import SglangCache

from sglang_dsv4x.replay.conversation import Agent, Branches, Conversation, Turn
from sglang_dsv4x.replay.formats import load_trace, trace_path
from sglang_dsv4x.replay.plan import PlannedConversation, make_plan, planned_turns
from sglang_dsv4x.replay.simulate import Service, Simulation, Totals
from sglang_dsv4x.replay.simulated_cache import (
    EVICTION_POLICIES,
    ResumePolicy,
    SimulatedCache,
    SwaPool,
)
from sglang_dsv4x.replay.tokens import PromptMaker, Vocabulary

PAGE = 256
VOCABULARY = Vocabulary(129280)


def simulated(
    plan: list[PlannedConversation], cache: SimulatedCache, page: int = PAGE, **options: object
) -> Totals:
    simulation = Simulation(cache, page, keep_turns=True, **options)  # type: ignore[arg-type]
    return simulation.run(plan)


def real(plan: list[PlannedConversation], cache: SglangCache) -> list[int]:
    """Cached tokens of each turn, one request at a time."""
    outputs = itertools.count(10**6)
    cached = []
    for conversation in plan:
        maker = PromptMaker(VOCABULARY, conversation.scaling, 0, conversation.token_scope)
        for turn in planned_turns(conversation.main):
            prompt = maker.prompt(turn.turn, turn.number).tolist()
            cached.append(cache.request(prompt, [next(outputs) for _ in range(turn.output_tokens)]))
            cache.check()
    return cached


def random_plan(rng: random.Random, turns: int) -> list[PlannedConversation]:
    """Prompts that grow, fork, shrink and come back, with tails and answers of all lengths."""
    fresh = itertools.count()
    prompts = [[next(fresh) for _ in range(rng.randrange(1, 24))]]
    steps = []
    for _ in range(turns):
        base = rng.choice(prompts[-6:] if rng.random() < 0.8 else prompts)
        keep = len(base) if rng.random() < 0.6 else rng.randrange(len(base) + 1)
        blocks = [*base[:keep], *(next(fresh) for _ in range(rng.randrange(0, 14)))][:44]
        if not blocks:
            continue
        prompts.append(blocks)
        tokens = 64 * len(blocks) + rng.randrange(-63, 64)
        steps.append(Turn(tokens, rng.choice([1, 2, 5, 60, 250, 300, 700]), blocks))
    return make_plan([Conversation("c", 64, "c", Agent("main", tuple(steps)))], page_size=PAGE)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("chunk", [None, 1024])
def test_it_hits_exactly_what_sglangs_radix_cache_hits(policy: str, chunk: int | None):
    """Evictions, splits, tombstones, recovered SWA rows and chunks, over random prompts and small pools."""
    hits = 0
    for seed in range(5):
        rng = random.Random(f"{policy} {chunk} {seed}")
        capacity, swa = rng.choice([(20, 18), (26, 16), (40, 17), (70, 24), (70, 70)])
        plan = random_plan(rng, 40)
        expected = real(plan, SglangCache(capacity * PAGE, swa * PAGE, PAGE, policy, chunk))
        totals = simulated(plan, SimulatedCache(capacity, policy, SwaPool(swa)), service=Service(chunk=chunk))
        assert list(totals.per_turn.values()) == expected, f"seed {seed}, {capacity} and {swa} pages"
        hits += sum(expected)
    assert hits > 40_000


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_without_limits_every_policy_serves_what_an_infinite_cache_would(policy: str):
    for seed in range(5):
        plan = random_plan(random.Random(seed), 60)
        totals = simulated(plan, SimulatedCache(None, policy, SwaPool(None)))
        assert totals.cached == totals.theoretical_cached > 0
        assert list(totals.per_turn.values()) == [t.theoretical_cached for t in planned_turns(plan[0].main)]


def alternating(sessions: int, turns: int, blocks: int = 64) -> list[PlannedConversation]:
    """Sessions of the same shape that share nothing."""
    conversations = []
    for s in range(sessions):
        steps = tuple(
            Turn(64 * blocks * (i + 1) + 1, 2, tuple(range(blocks * (i + 1)))) for i in range(turns)
        )
        conversations.append(Conversation(f"c{s}", 64, f"c{s}", Agent("main", steps)))
    return make_plan(conversations, page_size=PAGE)


def test_more_capacity_never_serves_less_when_sessions_take_turns():
    plan = alternating(8, 6)
    served = [
        simulated(plan, SimulatedCache(capacity, "lru"), concurrency=8).cached
        for capacity in (100, 200, 300, 500, 800, None)
    ]
    assert served == sorted(served) and served[0] < served[-1]
    assert served[-1] == simulated(plan, SimulatedCache(None)).theoretical_cached


def test_turns_that_never_fit_are_refused_and_counted():
    totals = simulated(alternating(2, 4), SimulatedCache(30))
    assert (totals.turns, totals.refused) == (2, 6)


def test_requests_that_do_not_fit_beside_each_other_wait():
    service = Service(prefill_tokens_per_s=1000.0, decode_tokens_per_s=10.0)
    plan = alternating(4, 1)
    together = simulated(plan, SimulatedCache(None), concurrency=4, service=service)
    waiting = simulated(plan, SimulatedCache(20), concurrency=4, service=service)
    assert together.ends_at_s == pytest.approx(4097 / 1000 + 2 / 10)
    assert waiting.ends_at_s == pytest.approx(4 * together.ends_at_s) and waiting.turns == 4


def test_pauses_and_arrivals_pass_at_the_chosen_scale():
    steps = (Turn(300, 1, (1, 2, 3, 4)), Turn(300, 1, (1, 2, 3, 4), pause_s=10.0))
    late = Conversation("c", 64, "c", Agent("main", steps), arrival_s=100.0)
    plan = make_plan([late], page_size=PAGE)
    assert simulated(plan, SimulatedCache(None)).ends_at_s == 0
    assert simulated(plan, SimulatedCache(None), think_time_scale=0.5).ends_at_s == 55.0


def test_branches_run_beside_each_other_and_are_waited_for():
    prefix = tuple(range(16))
    branches = tuple(
        Agent(f"f{i}", (Turn(64 * 20 + 1, 2, (*prefix, *range(100 * (i + 1), 100 * (i + 1) + 4))),))
        for i in range(1200)
    )
    after = Turn(64 * 16 + 1, 2, prefix, kind="resume")
    main = Agent("main", (Turn(64 * 16 + 1, 2, prefix), Branches(branches), after))
    plan = make_plan([Conversation("c", 64, "c", main)], page_size=PAGE)
    service = Service(prefill_tokens_per_s=1000.0)
    totals = simulated(plan, SimulatedCache(None), service=service, concurrency=1200)
    assert totals.turns == 1202 and totals.cached == totals.theoretical_cached
    assert totals.ends_at_s == pytest.approx((1025 + 257 + 1) / 1000)


class TestResumePoints:
    """A parked session's SWA rows are turned over by others; its prompt is still in the tree."""

    PARKED = Agent("main", (Turn(64 * 64 + 1, 2, tuple(range(64))),))
    FORKS = tuple(Turn(64 * 64 + 1, 2, (*range(44), *range(1000 * i, 1000 * i + 20))) for i in range(1, 4))

    def served(self, resume: ResumePolicy, *, again: tuple[Turn, ...] | None = None) -> list[int]:
        longer = Turn(64 * 70 + 1, 2, tuple(range(70)))
        noise = Agent("main", (Turn(64 * 120 + 1, 2, tuple(range(120))),))
        conversations = [Conversation("s", 64, "s", self.PARKED)]
        for i, turn in enumerate(again or (longer,)):
            conversations.append(Conversation(f"n{i}", 64, f"n{i}", noise))
            conversations.append(Conversation(f"s{i}", 64, "s", Agent("main", (turn,))))
        cache = SimulatedCache(400, "lru", SwaPool(32), resume)
        totals = simulated(make_plan(conversations, page_size=PAGE), cache, service=Service(chunk=2048))
        return [totals.per_turn[(f"s{i}", 1)] for i in range(len(again or (longer,)))]

    def test_without_points_everything_that_lost_its_swa_rows_is_computed_again(self):
        assert self.served(ResumePolicy()) == [0]

    def test_a_point_at_the_prompts_end_saves_it_all(self):
        assert self.served(ResumePolicy(prompt_end=True)) == [4096]

    def test_a_point_at_the_outputs_end_is_at_the_last_whole_page(self):
        assert self.served(ResumePolicy(output_end=True)) == [4096]

    @pytest.mark.parametrize(("interval", "hit"), [(1, 2816), (3, 2304), (8, 2048), (12, 0)])
    def test_a_fork_goes_on_from_the_deepest_regular_point_before_it(self, interval: int, hit: int):
        """The fork is after 44 blocks, 11 pages."""
        assert self.served(ResumePolicy(interval=interval), again=self.FORKS[:1]) == [hit]

    def test_the_first_fork_leaves_a_point_for_the_next_ones(self):
        assert self.served(ResumePolicy(fork=True), again=self.FORKS) == [0, 2816, 2816]

    def test_the_point_unused_longest_goes_when_there_are_too_many(self):
        assert self.served(ResumePolicy(prompt_end=True, most=1)) == [0]
        assert self.served(ResumePolicy(prompt_end=True, most=2)) == [4096]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_shipped_trace_needs_no_more_than_it_has(scale: float):
    plan = make_plan(load_trace(trace_path("small")), page_size=PAGE, scale=scale)
    totals = simulated(plan, SimulatedCache(None, "lru", SwaPool(None)))
    assert list(totals.per_turn.values()) == [t.theoretical_cached for t in planned_turns(plan[0].main)]
