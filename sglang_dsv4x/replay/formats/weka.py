"""Traces of the public data set kv-cache-tester (Weka): one JSON object per conversation.

Fields used: `id`, `block_size`, `hash_id_scope` ("local": ids mean something within this conversation only,
"global": across files), and `requests`, each with `t` (s since the agent began), `type` "n" or "s" (answered
whole or streamed), `in` and `out` (tokens), `hash_ids` (one per whole block of the prompt), `think_time` and
`api_time` (s), or `type` "subagent" with `agent_id`, `t`, `duration_ms` and `requests` of its own, whose `t`
counts from its own start.
"""

from __future__ import annotations

from typing import Literal

from sglang_dsv4x.replay.conversation import MAIN_AGENT, Agent, Conversation, Turn, turns
from sglang_dsv4x.replay.formats.fields import Fields, parse_object

LARGEST_BLOCK = 65536


def load(text: str, source: str) -> list[Conversation]:
    """The one conversation of a file with content `text`. Raises TraceError naming `source` and the field."""
    top = parse_object(text, source)
    name = top.text("id")
    block_size = top.count("block_size", least=1)
    if block_size > LARGEST_BLOCK:
        raise top.error("block_size", f"is {block_size}; must be at most {LARGEST_BLOCK}")
    scope = top.text("hash_id_scope", default="local")
    if scope not in ("local", "global"):
        raise top.error("hash_id_scope", f"is {scope!r}; must be 'local' or 'global'")
    main = Agent(MAIN_AGENT, _steps(top, block_size))
    if next(turns(main), None) is None:
        raise top.error("requests", "holds no request")
    return [Conversation(name, block_size, name if scope == "local" else "", main)]


def _steps(parent: Fields, block_size: int) -> tuple[Turn | Agent, ...]:
    steps: list[Turn | Agent] = []
    free_at = 0.0  # when everything before has ended, on the agent's own clock
    after_subagent = False
    for request in parent.objects("requests"):
        start = request.seconds("t")
        from_clock = max(0.0, start - free_at)
        kind = request.text("type")
        if kind == "subagent":
            steps.append(Agent(request.text("agent_id"), _steps(request, block_size), from_clock))
            free_at = max(free_at, start + request.seconds("duration_ms", default=0.0) / 1000)
            after_subagent = True
            continue
        if kind not in ("n", "s"):
            raise request.error("type", f"is {kind!r}; must be 'n', 's' or 'subagent'")
        # think_time counts from the agent's own last turn: after a sub-agent it would count the sub-agent's
        # time twice.
        pause = from_clock if after_subagent else request.seconds("think_time", default=from_clock)
        steps.append(_turn(request, block_size, pause))
        free_at = max(free_at, start + request.seconds("api_time", default=0.0))
        after_subagent = False
    return tuple(steps)


def _turn(request: Fields, block_size: int, pause: float) -> Turn:
    blocks = request.counts("hash_ids")
    tokens = request.count("in", least=1)
    if not block_size * (len(blocks) - 1) < tokens < block_size * (len(blocks) + 1):
        raise request.error(
            "in", f"is {tokens} tokens, which {len(blocks)} hash_ids of {block_size} tokens cannot stand for"
        )
    kind: Literal["human", "tool"] = "human" if "text" in request.texts("input_types") else "tool"
    return Turn(tokens, request.count("out"), blocks, pause, kind)
