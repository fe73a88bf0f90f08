"""Traces of the public data set kv-cache-tester (Weka): one JSON object per conversation.

Fields used: `id`, `block_size`, `hash_id_scope` ("local": ids mean something within this conversation only,
"global": across files), and `requests`, each with `t` (s since the agent began), `type` "n" or "s" (answered
whole or streamed), `in` and `out` (tokens), `hash_ids` (one per whole block of the prompt), `think_time` and
`api_time` (s), or `type` "subagent" with `agent_id`, `t`, `duration_ms` and `requests` of its own, whose `t`
counts from its own start.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dsv4x.replay.blocks import Blocks, common_blocks
from sglang_dsv4x.replay.conversation import (
    MAIN_AGENT,
    Agent,
    Branches,
    Conversation,
    Kind,
    Step,
    Turn,
    turns,
)
from sglang_dsv4x.replay.formats.fields import Fields, parse_object
from sglang_dsv4x.replay.formats.options import DEEPEST_AGENT, LARGEST_BLOCK, LoadOptions
from sglang_dsv4x.replay.formats.source import TraceFile


def read(file: TraceFile, options: LoadOptions) -> Iterator[Conversation]:
    """The one conversation of a file."""
    yield from load(file.document(), str(file.path))


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
    main = Agent(MAIN_AGENT, _Agent(block_size, Blocks(), 0).steps(top))
    if next(turns(main), None) is None:
        raise top.error("requests", "holds no request")
    return [Conversation(name, block_size, name if scope == "local" else "", main)]


class _Agent:
    """Reads the requests of one agent; `before` is the prompt of the turn that started it."""

    def __init__(self, block_size: int, before: Blocks, depth: int):
        self._block_size = block_size
        self._last = before
        self._depth = depth
        self._first = depth > 0

    def steps(self, parent: Fields) -> tuple[Step, ...]:
        steps: list[Step] = []
        free_at = 0.0  # when everything before has ended, on the agent's own clock
        after_subagent = False
        requests = parent.objects("requests")
        at = 0
        while at < len(requests):
            request = requests[at]
            start = request.seconds("t")
            from_clock = max(0.0, start - free_at)
            if request.text("type") == "subagent":
                group, until = _together(requests, at)
                at += len(group)
                beside = [_turns_before(requests[at:], _end(each)) for each in group]
                for turns_beside in sorted(set(beside), reverse=True):
                    agents = tuple(
                        self._subagent(each, from_clock + each.seconds("t") - start)
                        for each, own in zip(group, beside, strict=True)
                        if own == turns_beside
                    )
                    alone = len(group) == 1 and turns_beside == 0
                    steps.append(agents[0] if alone else Branches(agents, turns_beside))
                if not any(beside):
                    free_at = max(free_at, until)
                    after_subagent = True
                continue
            # think_time counts from the agent's own last turn: after a sub-agent it would count the sub-agent's
            # time twice.
            pause = from_clock if after_subagent else request.seconds("think_time", default=from_clock)
            steps.append(self._turn(request, pause, after_subagent))
            free_at = max(free_at, start + request.seconds("api_time", default=0.0))
            after_subagent = False
            at += 1
        return tuple(steps)

    def _subagent(self, request: Fields, pause: float) -> Agent:
        if self._depth == DEEPEST_AGENT:
            raise request.error("requests", f"agents start agents more than {DEEPEST_AGENT} deep")
        inner = _Agent(self._block_size, self._last, self._depth + 1)
        return Agent(request.text("agent_id"), inner.steps(request), max(0.0, pause))

    def _turn(self, request: Fields, pause: float, after_subagent: bool) -> Turn:
        kind = request.text("type")
        if kind not in ("n", "s"):
            raise request.error("type", f"is {kind!r}; must be 'n', 's' or 'subagent'")
        ids = request.counts("hash_ids")
        tokens = request.count("in", least=1)
        size = self._block_size
        if not size * (len(ids) - 1) < tokens < size * (len(ids) + 1):
            raise request.error(
                "in", f"is {tokens} tokens, which {len(ids)} hash_ids of {size} tokens cannot stand for"
            )
        blocks = Blocks(ids, base=self._last)
        waited_for: Kind = "human" if "text" in request.texts("input_types") else "tool"
        if self._first and len(self._last) and _common(blocks, self._last) == len(self._last):
            waited_for = "fork"
        elif after_subagent and waited_for == "tool":
            waited_for = "resume"
        self._last, self._first = blocks, False
        return Turn(tokens, request.count("out"), blocks, pause, waited_for)


def _together(requests: list[Fields], at: int) -> tuple[list[Fields], float]:
    """The sub-agents from `at` on that started before the ones before them had ended, and when the last ended."""
    group = [requests[at]]
    until = _end(requests[at])
    for request in requests[at + 1 :]:
        if request.text("type") != "subagent" or request.seconds("t") >= until:
            break
        group.append(request)
        until = max(until, _end(request))
    return group, until


def _turns_before(requests: list[Fields], end: float) -> int:
    """How many of the agent's own next turns started before `end`."""
    count = 0
    for request in requests:
        if request.seconds("t") >= end:
            break
        count += request.text("type") != "subagent"
    return count


def _end(subagent: Fields) -> float:
    return subagent.seconds("t") + subagent.seconds("duration_ms", default=0.0) / 1000


def _common(first: Blocks, second: Blocks) -> int:
    return common_blocks(first.array(), second.array())
