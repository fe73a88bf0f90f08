"""A seeded coding-agent conversation in the Weka format: the package's own trace was made here.

Its shape follows the public traces: a long tool-and-system prefix, turns that add a few hundred tokens
(median about 700) and sometimes a whole file, one rewind, one sub-agent that forks from the system prompt,
tool pauses of seconds and human pauses of minutes. No recorded text or hash goes in. `python -m
sglang_dsv4x.replay.synthetic` prints it.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

BLOCK = 64
MODEL = "synthetic"


class _Writer:
    """Grows the prompts of one agent; `ids` are shared by all agents of the conversation."""

    def __init__(self, rng: random.Random, prefix: list[int], next_id: list[int]):
        self._rng = rng
        self._next_id = next_id
        self._clock = 0.0
        self.blocks = prefix
        self.requests: list[dict[str, Any]] = []

    def grow(self, tokens: int) -> None:
        """Adds whole blocks of new tokens to the prompt."""
        for _ in range(max(1, round(tokens / BLOCK))):
            self.blocks = [*self.blocks, self._next_id[0]]
            self._next_id[0] += 1

    def rewind(self, blocks: int) -> None:
        """Drops the last blocks, as an agent does that takes back an edit."""
        self.blocks = self.blocks[:-blocks]

    def wait(self, seconds: float) -> None:
        """Lets time pass that belongs to no turn."""
        self._clock += seconds

    def request(self, *, human: bool, last: bool = False) -> None:
        """Sends the prompt as it stands, after a pause."""
        think = 0.0 if not self.requests else round(self._rng.lognormvariate(5.0 if human else 1.4, 0.5), 2)
        api_time = round(self._rng.uniform(2.0, 9.0), 2)
        self._clock += think
        self.requests.append(
            {
                "t": round(self._clock, 2),
                "type": "s",
                "model": MODEL,
                "in": len(self.blocks) * BLOCK + self._rng.randrange(BLOCK),
                "out": self._rng.randrange(12, 21),
                "hash_ids": self.blocks,
                "input_types": ["text"] if human else ["tool_result"],
                "output_types": ["text"] if last else ["text", "tool_use"],
                "stop": "end_turn" if last else "tool_use",
                "api_time": api_time,
                "think_time": think,
            }
        )
        self._clock += api_time

    @property
    def clock(self) -> float:
        return round(self._clock, 2)


def make_trace(seed: int = 0) -> dict[str, Any]:
    """A conversation of 16 requests that grows to about 10K tokens, as JSON values; a function of `seed`."""
    rng = random.Random(seed)
    next_id = [1]
    main = _Writer(rng, [], next_id)
    main.grow(2560)  # tools and system prompt
    system = main.blocks
    main.grow(300)
    main.request(human=True)
    for tokens in (420, 1400, 260):
        main.grow(tokens)
        main.request(human=False)

    # The sub-agent has the same tools and system prompt, then a task of its own.
    child = _Writer(rng, system, next_id)
    child.grow(500)
    child.request(human=True)
    for tokens in (900, 330):
        child.grow(tokens)
        child.request(human=False)
    child.grow(200)
    child.request(human=False, last=True)
    main.wait(3.0)
    main.requests.append(
        {
            "t": main.clock,
            "type": "subagent",
            "agent_id": "agent_001",
            "subagent_type": "Explore",
            "duration_ms": round(1000 * child.clock),
            "status": "completed",
            "models": [MODEL],
            "requests": child.requests,
        }
    )
    main.wait(child.clock)
    for tokens in (640, 380, 1900):
        main.grow(tokens)
        main.request(human=False)
    main.rewind(6)
    main.grow(520)
    main.request(human=True)
    for i, tokens in enumerate((700, 450, 980, 350)):
        main.grow(tokens)
        main.request(human=False, last=i == 3)

    def tokens_of(requests: list[dict[str, Any]]) -> dict[str, int]:
        own = [r for r in requests if r["type"] != "subagent"]
        return {"input": sum(r["in"] for r in own), "output": sum(r["out"] for r in own)}

    parent, subagent = tokens_of(main.requests), tokens_of(child.requests)
    return {
        "id": f"small-{seed}",
        "models": [MODEL],
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "tool_tokens": 1920,
        "system_tokens": 640,
        "requests": main.requests,
        "totals": {
            "parent_tokens": parent,
            "subagent_tokens": subagent,
            "combined_tokens": {k: parent[k] + subagent[k] for k in parent},
            "subagent_count": 1,
        },
    }


def as_text(trace: dict[str, Any]) -> str:
    """The trace as the content of a file, one compact line."""
    return json.dumps(trace, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a synthetic coding-agent trace in the Weka format.")
    parser.add_argument(
        "--seed", type=int, default=0, help="same seed, same trace (default 0: the shipped one)"
    )
    print(as_text(make_trace(parser.parse_args().seed)), end="")


if __name__ == "__main__":
    main()
