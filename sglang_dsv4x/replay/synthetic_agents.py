"""Seeded coding agents with the shape that was measured over real ones, as conversations of the internal model.

The numbers are those of 739 recorded Claude Code conversations (Weka kv-cache-tester; 47,948 pairs of turns): new
tokens of a turn, pauses, and the share of turns that keep less than half of the prompt before. Turns per conversation
follow their median and mean, outputs a published median. Everything between is a guess, named where it is made.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_dsv4x.replay.blocks import Blocks
from sglang_dsv4x.replay.conversation import MAIN_AGENT, Agent, Branches, Conversation, Kind, Step, Turn

# (share of turns, value): measured quantiles, with ends that were not published.
NEW_TOKENS = ((0.0, 40), (0.1, 230), (0.5, 705), (0.9, 4077), (0.99, 65_875), (1.0, 130_000))
PAUSE_S = ((0.0, 1), (0.1, 4), (0.5, 10), (0.9, 170), (0.99, 3039), (1.0, 14_400))
# The share of turns that keep less than half of the prompt before. They are the ones with the most new tokens.
RESTARTS = 0.02
# Median and mean of turns per conversation give the spread of a log-normal.
MEDIAN_TURNS, MEAN_TURNS = 43, 80
MOST_TURNS = 2000
# The median is published, the spread is a guess.
MEDIAN_OUTPUT, OUTPUT_SPREAD = 444, 0.9
# Pauses this long are a person's. A guess, as are the sub-agents' numbers.
HUMAN_FROM_S = 60.0
SUBAGENT_TURNS = (3, 16)
MOST_BESIDE = 3

Quantiles = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Shape:
    """`shared_prefix` tokens of tools and system prompt begin every prompt of every conversation. `subagents`: share of
    turns after which some are started; `forks`: share of those that go on from the whole history. `turns`: of every
    conversation (None: as measured). `max_context` tokens: a prompt that would be longer starts over.
    `begin_every_s`: mean time between two conversations' beginnings."""

    block_size: int = 64
    shared_prefix: int = 12_000
    subagents: float = 0.02
    forks: float = 0.25
    turns: int | None = None
    max_context: int = 200_000
    begin_every_s: float = 0.0


def conversations(seed: int, shape: Shape) -> Iterator[Conversation]:
    """Conversations without end, a function of `seed` and `shape`. Their hash ids mean the same in all of them."""
    ids = _Ids(math.ceil(shape.shared_prefix / shape.block_size))
    begin_s = 0.0
    number = 0
    while True:
        rng = random.Random(f"{seed}/{number}")
        turns = shape.turns or _turns(rng)
        writer = _Agent(rng, shape, ids, Blocks(range(ids.shared)))
        main = Agent(MAIN_AGENT, tuple(writer.steps(turns)))
        yield Conversation(f"agent-{seed}-{number:05d}", shape.block_size, "", main, begin_s)
        number += 1
        if shape.begin_every_s:
            begin_s += rng.expovariate(1 / shape.begin_every_s)


def quantile(points: Quantiles, share: float) -> float:
    """The value that `share` of all are below, on straight lines between the points in logarithms."""
    for (low, a), (high, b) in itertools.pairwise(points):
        if share <= high:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * (share - low) / (high - low))
    return points[-1][1]


class _Ids:
    """Hands out hash ids; the first `shared` are the common prefix's."""

    def __init__(self, shared: int):
        self.shared = shared
        self._next = shared

    def fresh(self, count: int) -> range:
        self._next += count
        return range(self._next - count, self._next)


class _Agent:
    """Writes one agent's steps; `prompt` is what it begins with, `tokens` what its first prompt is longer than."""

    def __init__(
        self, rng: random.Random, shape: Shape, ids: _Ids, prompt: Blocks, *, depth: int = 0, tokens: int = 0
    ):
        self._rng = rng
        self._shape = shape
        self._ids = ids
        self._prompt = prompt
        self._depth = depth
        self._tokens = tokens
        self._owed = 0  # restarts that were forced, and are saved later

    def steps(self, turns: int, first: Kind = "human") -> Iterator[Step]:
        """`turns` turns with sub-agents between them."""
        last: Turn | None = None
        started = False
        for number in range(turns):
            before = self._prompt
            self._grow(first=last is None)
            if last is not None:
                # The answer is part of what is new in the next prompt.
                room = max(1, self._tokens - last.input_tokens)
                last = replace(last, output_tokens=min(last.output_tokens, room))
                yield last
                if started:
                    yield self._subagents(last, before)
            last = self._turn(first if number == 0 else None, started)
            started = self._depth == 0 and number + 1 < turns and self._rng.random() < self._shape.subagents
        if last is not None:
            yield last

    def _grow(self, *, first: bool) -> None:
        """Makes the next prompt."""
        size = self._shape.block_size
        share = self._rng.random() * (1 - RESTARTS if first else 1.0)
        new = round(quantile(NEW_TOKENS, share))
        kept = len(self._prompt)
        restart = share > 1 - RESTARTS
        if restart and self._owed:
            self._owed -= 1
            restart = False
            new = round(quantile(NEW_TOKENS, self._rng.random() * (1 - RESTARTS)))
        if not first and not restart and kept * size + new > self._shape.max_context:
            restart = True
            self._owed += 1
            new = round(quantile(NEW_TOKENS, 1 - RESTARTS * self._rng.random()))
        if restart:
            kept = min(self._ids.shared, int(kept * self._rng.uniform(0.05, 0.45)))
        else:
            # What lay behind the last whole block is no longer than the prompt that goes on from it.
            new = max(new, self._tokens - kept * size + 2)
        self._tokens = kept * size + min(new, self._shape.max_context - kept * size)
        self._prompt = self._prompt.extended(self._ids.fresh(self._tokens // size - kept), kept)

    def _turn(self, kind: Kind | None, after_subagents: bool) -> Turn:
        pause_s = 0.0 if kind else round(quantile(PAUSE_S, self._rng.random()), 3)
        output = round(self._rng.lognormvariate(math.log(MEDIAN_OUTPUT), OUTPUT_SPREAD))
        if kind is None:
            kind = "resume" if after_subagents else "human" if pause_s >= HUMAN_FROM_S else "tool"
        return Turn(self._tokens, max(1, output), self._prompt, pause_s, kind)

    def _subagents(self, last: Turn, prompt: Blocks) -> Step:
        agents = []
        whole = last.input_tokens + last.output_tokens
        for i in range(self._rng.choice([1, 1, 2, MOST_BESIDE])):
            fork = self._rng.random() < self._shape.forks and whole < 0.95 * self._shape.max_context
            start = prompt if fork else Blocks(range(self._ids.shared))
            inner = _Agent(
                self._rng, self._shape, self._ids, start, depth=self._depth + 1, tokens=whole if fork else 0
            )
            turns = self._rng.randint(*SUBAGENT_TURNS)
            agents.append(Agent(f"agent_{i:03d}", tuple(inner.steps(turns, "fork" if fork else "human"))))
        return agents[0] if len(agents) == 1 else Branches(tuple(agents))


def _turns(rng: random.Random) -> int:
    spread = math.sqrt(2 * math.log(MEAN_TURNS / MEDIAN_TURNS))
    return min(MOST_TURNS, max(1, round(rng.lognormvariate(math.log(MEDIAN_TURNS), spread))))
