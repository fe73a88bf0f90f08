"""What will be sent: conversations cut and scaled to the settings, each turn with the hit it could have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_dsv4x.replay.conversation import Agent, Branches, Conversation, Turn, first_turns
from sglang_dsv4x.replay.theory import InfinitePrefixCache
from sglang_dsv4x.replay.tokens import Scaling


@dataclass(frozen=True)
class PlannedTurn:
    """A turn with its number in the conversation (from 1, in running order) and its lengths in tokens.

    `theoretical_cached` is what an infinite prefix cache would serve of `input_tokens` if the turns ran in the
    order of their numbers.
    """

    number: int
    agent: str
    turn: Turn
    input_tokens: int
    output_tokens: int
    theoretical_cached: int


@dataclass(frozen=True)
class PlannedAgent:
    """An agent's steps in running order, after a pause in seconds."""

    steps: tuple[PlannedStep, ...]
    pause_s: float


@dataclass(frozen=True)
class PlannedBranches:
    """Agents that run beside each other; `turns_beside` as in `conversation.Branches`."""

    agents: tuple[PlannedAgent, ...]
    turns_beside: int | None


PlannedStep = PlannedTurn | PlannedAgent | PlannedBranches


@dataclass(frozen=True)
class PlannedConversation:
    """`token_scope` goes into the tokens: two copies of a conversation share nothing.

    `arrival_s` is as in `conversation.Conversation`.
    """

    name: str
    token_scope: str
    scaling: Scaling
    main: PlannedAgent
    arrival_s: float = 0.0


def make_plan(
    conversations: Sequence[Conversation],
    *,
    page_size: int,
    scale: float = 1.0,
    max_turns: int | None = None,
    output_tokens: int | None = None,
    copies: int = 1,
) -> list[PlannedConversation]:
    """Plans every conversation `copies` times, in the order given.

    `scale` multiplies context lengths, `max_turns` cuts each conversation, `output_tokens` replaces the
    trace's output lengths. A name that occurs more than once gets '#2', '#3' ... and tokens of its own,
    unless its hash ids are global.
    """
    cache = InfinitePrefixCache(page_size)
    seen: dict[str, int] = {}
    planned = []
    for conversation in [c for c in conversations for _ in range(copies)]:
        seen[conversation.name] = instance = seen.get(conversation.name, 0) + 1
        suffix = "" if instance == 1 else f"#{instance}"
        scope = conversation.token_scope and conversation.token_scope + suffix
        cut = conversation if max_turns is None else first_turns(conversation, max_turns)
        scaling = Scaling(conversation.block_size, scale)
        main = _Planner(cache, scaling, scope, output_tokens).agent(cut.main, cut.main.name)
        name = conversation.name + suffix
        planned.append(PlannedConversation(name, scope, scaling, main, conversation.arrival_s))
    return planned


class _Planner:
    def __init__(self, cache: InfinitePrefixCache, scaling: Scaling, scope: str, output_tokens: int | None):
        self._cache = cache
        self._scaling = scaling
        self._scope = scope
        self._output_tokens = output_tokens
        self._number = 0

    def agent(self, agent: Agent, path: str) -> PlannedAgent:
        steps: list[PlannedStep] = []
        for step in agent.steps:
            if isinstance(step, Turn):
                steps.append(self._turn(step, path))
            elif isinstance(step, Branches):
                agents = tuple(self.agent(each, f"{path}/{each.name}") for each in step.agents)
                steps.append(PlannedBranches(agents, step.turns_beside))
            else:
                steps.append(self.agent(step, f"{path}/{step.name}"))
        return PlannedAgent(tuple(steps), agent.pause_s)

    def _turn(self, turn: Turn, path: str) -> PlannedTurn:
        self._number += 1
        tokens = self._scaling.input_tokens(turn)
        cached = self._cache.add(self._scope, turn.blocks, self._scaling.block, tokens)
        output = turn.output_tokens if self._output_tokens is None else self._output_tokens
        return PlannedTurn(self._number, path, turn, tokens, max(1, output), cached)


def planned_turns(agent: PlannedAgent) -> Iterator[PlannedTurn]:
    """All turns of the agent and of those it starts, in the order of their numbers."""
    for step in agent.steps:
        if isinstance(step, PlannedTurn):
            yield step
            continue
        for inner in (step,) if isinstance(step, PlannedAgent) else step.agents:
            yield from planned_turns(inner)
