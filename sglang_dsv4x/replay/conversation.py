"""What a trace says, free of any file format: sessions, their agents and turns, the blocks of each prompt, pauses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAIN_AGENT = "main"

# What a turn waited for: a person; a tool's result; nothing, as it is the first of an agent whose prompt continues
# another agent's whole history; or the agents that its own agent had started.
Kind = Literal["human", "tool", "fork", "resume"]


@dataclass(frozen=True)
class Turn:
    """One request to the model.

    `blocks` are the hash ids of the prompt's blocks, in order (`Blocks` holds them compactly); equal ids at
    equal positions mean equal tokens. The prompt is their concatenation, cut to or continued up to
    `input_tokens`: tokens past the last block were in no block, so no other turn shares them. `pause_s` is
    the wait before the request, in seconds, counted from the end of the step before.
    """

    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    pause_s: float = 0.0
    kind: Kind = "tool"


@dataclass(frozen=True)
class Agent:
    """Turns and other agents in the order in which they ran; see `Step`."""

    name: str
    steps: tuple[Step, ...]
    pause_s: float = 0.0


@dataclass(frozen=True)
class Branches:
    """Agents that start at once and run beside each other, as forks and spawns do.

    The agent that starts them runs its next `turns_beside` turns beside them and then waits for all of them;
    None: it never waits. A fork's prompts begin with its parent's, a spawn's with nothing in particular: the
    blocks say so, and need no word of their own here.
    """

    agents: tuple[Agent, ...]
    turns_beside: int | None = 0


# An agent runs a Turn, waits for an Agent (a sub-agent) to end, or starts Branches. Before each step it waits for the
# branches that are due. A conversation has ended when all of its agents have.
Step = Turn | Agent | Branches


@dataclass(frozen=True)
class Conversation:
    """A main agent with everything it started: one session.

    `token_scope` separates hash ids: the same id means the same tokens only within one scope. `arrival_s` is
    when it began, in seconds after the recording's first; 0 where the trace does not say.
    """

    name: str
    block_size: int
    token_scope: str
    main: Agent
    arrival_s: float = 0.0


def turns(agent: Agent) -> Iterator[Turn]:
    """All turns of the agent and of those it starts, in the order of the steps."""
    for step in agent.steps:
        if isinstance(step, Turn):
            yield step
            continue
        for inner in (step,) if isinstance(step, Agent) else step.agents:
            yield from turns(inner)


def first_turns(conversation: Conversation, count: int) -> Conversation:
    """The conversation cut after its first `count` turns, those of other agents counted; empty agents go."""
    left = count

    def cut(agent: Agent) -> Agent:
        nonlocal left
        kept: list[Step] = []
        for step in agent.steps:
            if left == 0:
                break
            if isinstance(step, Turn):
                kept.append(step)
                left -= 1
            elif isinstance(step, Agent):
                shorter = cut(step)
                kept += [shorter] if shorter.steps else []
            else:
                agents = tuple(a for a in map(cut, step.agents) if a.steps)
                kept += [replace(step, agents=agents)] if agents else []
        return replace(agent, steps=tuple(kept))

    return replace(conversation, main=cut(conversation.main))
