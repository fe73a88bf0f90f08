"""What a trace says, free of any file format: agents, their turns, the blocks of each prompt, pauses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

MAIN_AGENT = "main"


@dataclass(frozen=True)
class Turn:
    """One request to the model.

    `blocks` are the hash ids of the prompt's blocks, in order; equal ids at equal positions mean equal
    tokens. The prompt is their concatenation, cut to or continued up to `input_tokens`: tokens past the last
    block were in no block, so no other turn shares them. `pause_s` is the wait before the request, in
    seconds, counted from the end of the step before; `kind` is what it waited for.
    """

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    pause_s: float = 0.0
    kind: Literal["human", "tool"] = "tool"


@dataclass(frozen=True)
class Agent:
    """Turns and sub-agents in the order in which they ran. The agent goes on when its sub-agent has ended."""

    name: str
    steps: tuple[Turn | Agent, ...]
    pause_s: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """A main agent with everything it started.

    `token_scope` separates hash ids: the same id means the same tokens only within one scope.
    """

    name: str
    block_size: int
    token_scope: str
    main: Agent


def turns(agent: Agent) -> Iterator[Turn]:
    """All turns of the agent and of its sub-agents, in the order in which they run."""
    for step in agent.steps:
        if isinstance(step, Turn):
            yield step
        else:
            yield from turns(step)


def first_turns(conversation: Conversation, count: int) -> Conversation:
    """The conversation cut after its first `count` turns, those of sub-agents counted; empty agents go."""

    def cut(agent: Agent, left: int) -> tuple[Agent, int]:
        kept: list[Turn | Agent] = []
        for step in agent.steps:
            if left == 0:
                break
            if isinstance(step, Turn):
                kept.append(step)
                left -= 1
                continue
            shorter, left = cut(step, left)
            if shorter.steps:
                kept.append(shorter)
        return replace(agent, steps=tuple(kept)), left

    return replace(conversation, main=cut(conversation.main, count)[0])
