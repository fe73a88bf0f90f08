"""Conversations written in each of the formats that replay reads, as far as the format can say what they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_dsv4x.replay.blocks import block_array, common_blocks
from sglang_dsv4x.replay.conversation import Agent, Branches, Conversation, Turn, turns
from sglang_dsv4x.replay.formats.options import CHARACTERS_PER_TOKEN, MOONCAKE_BLOCK
from sglang_dsv4x.replay.pages import page_keys

_CHARACTERS = int(CHARACTERS_PER_TOKEN)
# "\n<user>\n", which a loader puts before a message's text.
_HEADER_TOKENS = 2
# Formats with clocks need lengths of answers; a synthetic clock takes this.
_SECONDS_PER_OUTPUT_TOKEN = 0.02


class Writer(NamedTuple):
    """`write(conversations, path)` makes the file, or the folder of files, and returns how many turns it wrote;
    `lost` says what the format cannot express."""

    write: Callable[[Iterable[Conversation], Path], int]
    lost: str


def write_weka(conversations: Iterable[Conversation], folder: Path) -> int:
    """A file per conversation in `folder`, which is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for conversation in conversations:
        requests, _ = _weka_requests(conversation.main, conversation.block_size)
        value = {
            "id": conversation.name,
            "models": ["synthetic"],
            "block_size": conversation.block_size,
            "hash_id_scope": "local" if conversation.token_scope else "global",
            "requests": requests,
        }
        (folder / f"{conversation.name}.json").write_text(_line(value), encoding="utf-8")
        count += sum(1 for _ in turns(conversation.main))
    return count


def write_dag_jsonl(conversations: Iterable[Conversation], path: Path) -> int:
    """A line per session; a prompt that starts over is a new session, which its old one spawns at its end."""
    return _write_lines(conversations, path, lambda c: iter(_Dag(c).lines()))


def write_mooncake(conversations: Iterable[Conversation], path: Path) -> int:
    """A line per turn, in the order of their times."""
    rows = sorted(
        (
            (at, conversation.block_size, turn)
            for conversation in conversations
            for at, turn in _clocked(conversation.main, conversation.arrival_s)
        ),
        key=lambda row: row[0],
    )
    with path.open("w", encoding="utf-8") as file:
        for at, block_size, turn in rows:
            value = {
                "timestamp": round(1000 * at),
                "input_length": turn.input_tokens,
                "output_length": turn.output_tokens,
                "hash_ids": _coarse_ids(turn, block_size),
            }
            file.write(_line(value))
    return len(rows)


def write_mooncake_trace(conversations: Iterable[Conversation], path: Path) -> int:
    """A line per turn with what is new in it; a prompt that starts over begins a new session."""

    def lines(conversation: Conversation) -> Iterator[tuple[dict[str, Any], int]]:
        for thread in _threads(conversation):
            before: Turn | None = None
            for at, turn in thread.turns:
                start = 0 if before is None else before.input_tokens + before.output_tokens
                new = max(1, turn.input_tokens - start)
                row: dict[str, Any] = {"session_id": thread.name, "input_length": new}
                if before is None:
                    ids = _coarse_ids(turn, conversation.block_size)
                    row["timestamp"] = round(1000 * at)
                else:
                    ids = [_unique(turn, i) for i in range(-(-new // MOONCAKE_BLOCK))]
                    row["delay"] = round(1000 * turn.pause_s)
                yield {**row, "output_length": turn.output_tokens, "hash_ids": ids}, 1
                before = turn

    return _write_lines(conversations, path, lines)


def write_agentic_trace(conversations: Iterable[Conversation], path: Path) -> int:
    """One document; a prompt that starts over, and every sub-agent, is a conversation of its own."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"metadata":{"source":"sglang-dsv4x synthesize"},"conversations":[')
        for conversation in conversations:
            for thread in _threads(conversation):
                before: Turn | None = None
                steps = []
                for _, turn in thread.turns:
                    start = 0 if before is None else before.input_tokens + before.output_tokens
                    text = _text(turn, start + _HEADER_TOKENS, conversation.block_size)
                    message = {"role": "user", "content": text}
                    steps.append({"messages": [message], "prompt_tokens": turn.input_tokens})
                    before = turn
                file.write((",\n" if count else "\n") + _line(steps).rstrip())
                count += len(steps)
        file.write("\n]}\n")
    return count


WRITERS: dict[str, Writer] = {
    "weka": Writer(write_weka, "the times at which conversations began"),
    "dag_jsonl": Writer(
        write_dag_jsonl,
        "the times at which conversations began; a prompt that starts over is a spawned session",
    ),
    "mooncake": Writer(
        write_mooncake,
        "which turns belong together and wait for each other, sub-agents, what a pause was for",
    ),
    "mooncake_trace": Writer(
        write_mooncake_trace,
        "that agents wait for sub-agents and share their history with forks, what a pause was for",
    ),
    "agentic-trace": Writer(
        write_agentic_trace, "pauses, output lengths, sub-agents' places, times of beginning"
    ),
}


def _write_lines(
    conversations: Iterable[Conversation],
    path: Path,
    lines: Callable[[Conversation], Iterator[tuple[dict[str, Any], int]]],
) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for conversation in conversations:
            for value, turns_in_it in lines(conversation):
                file.write(_line(value))
                count += turns_in_it
    return count


def _weka_requests(agent: Agent, block_size: int) -> tuple[list[dict[str, Any]], float]:
    """The agent's requests on its own clock, and its length in seconds."""
    requests: list[dict[str, Any]] = []
    clock = 0.0
    for step in agent.steps:
        if isinstance(step, Turn):
            clock += step.pause_s
            api_time = round(_SECONDS_PER_OUTPUT_TOKEN * step.output_tokens, 3)
            requests.append(
                {
                    "t": round(clock, 3),
                    "type": "s",
                    "model": "synthetic",
                    "in": step.input_tokens,
                    "out": step.output_tokens,
                    "hash_ids": block_array(step.blocks).tolist(),
                    "input_types": ["text"] if step.kind == "human" else ["tool_result"],
                    "api_time": api_time,
                    "think_time": step.pause_s,
                }
            )
            clock = round(clock, 3) + api_time
            continue
        end = clock
        for each in (step,) if isinstance(step, Agent) else step.agents:
            inner, length = _weka_requests(each, block_size)
            start = clock + each.pause_s
            requests.append(
                {
                    "t": round(start, 3),
                    "type": "subagent",
                    "agent_id": each.name,
                    "duration_ms": round(1000 * length, 3),
                    "requests": inner,
                }
            )
            end = max(end, start + length)
        clock = end
    return requests, clock


@dataclass
class _Session:
    name: str
    turns: list[dict[str, Any]] = field(default_factory=list)


class _Dag:
    """One conversation as sessions; the text of a block is a function of its id."""

    def __init__(self, conversation: Conversation):
        self._conversation = conversation
        self._done: list[_Session] = []
        self._names: set[str] = set()

    def lines(self) -> list[tuple[dict[str, Any], int]]:
        self._agent(self._conversation.main, self._conversation.name, None)
        return [({"session_id": s.name, "turns": s.turns}, len(s.turns)) for s in self._done]

    def _open(self, name: str) -> _Session:
        while name in self._names:
            name += "'"
        self._names.add(name)
        session = _Session(name)
        self._done.append(session)
        return session

    def _agent(self, agent: Agent, name: str, forked_from: Turn | None) -> str:
        """Writes the agent's session, and those that it starts; returns its name."""
        session = self._open(name)
        first_name = session.name
        before = forked_from
        parts = 1
        for step in agent.steps:
            if isinstance(step, Turn):
                if before is not None and not _goes_on(before, step):
                    parts += 1
                    following = self._open(f"{name}~{parts}")
                    session.turns[-1].setdefault("spawns", []).append(following.name)
                    session, before = following, None
                session.turns.append(self._turn(step, before))
                before = step
                continue
            agents = (step,) if isinstance(step, Agent) else step.agents
            beside = 0 if isinstance(step, Agent) else step.turns_beside
            for each in agents:
                self._start(session, each, before, beside, name)
        return first_name

    def _start(
        self, session: _Session, child: Agent, before: Turn | None, beside: int | None, name: str
    ) -> None:
        if before is None:
            raise ValueError(f"{name}: dag_jsonl cannot start an agent before a session's first turn")
        first = next(turns(child), None)
        if first is None:
            return
        turn = session.turns[-1]
        if first.kind == "fork" and _goes_on(before, first):
            started = self._agent(child, f"{name}/{child.name}", before)
            # A fork that is waited for would end its parent: it runs beside it instead.
            turn.setdefault("forks", []).append({"child": started, "background": True})
            return
        started = self._agent(child, f"{name}/{child.name}", None)
        entry: Any = started
        if beside:
            entry = {"children": [started], "join_at": len(session.turns) + beside}
        turn.setdefault("spawns", []).append(entry)

    def _turn(self, turn: Turn, before: Turn | None) -> dict[str, Any]:
        start = 0 if before is None else before.input_tokens + before.output_tokens
        text = _text(turn, start + _HEADER_TOKENS, self._conversation.block_size)
        role = "tool" if turn.kind == "tool" else "user"
        value: dict[str, Any] = {
            "messages": [{"role": role, "content": text}],
            "max_tokens": max(1, turn.output_tokens),
        }
        if turn.pause_s:
            value["delay"] = 1000 * turn.pause_s
        return value


class _Thread(NamedTuple):
    name: str
    turns: list[tuple[float, Turn]]


def _threads(conversation: Conversation) -> list[_Thread]:
    """The conversation's turns with their times, cut where a prompt does not go on from the one before."""
    threads: list[_Thread] = []

    def cut(agent: Agent, name: str, begin_s: float) -> None:
        before: Turn | None = None
        mine = 0
        for at, step in _steps(agent, begin_s):
            if isinstance(step, Agent):
                cut(step, f"{name}/{step.name}", at)
            elif before is not None and _goes_on(before, step):
                threads[mine].turns.append((at, step))
                before = step
            else:
                mine = len(threads)
                before = step
                threads.append(_Thread(f"{name}~{mine}" if mine else name, [(at, step)]))

    cut(conversation.main, conversation.name, conversation.arrival_s)
    return threads


def _clocked(agent: Agent, begin_s: float) -> Iterator[tuple[float, Turn]]:
    for at, step in _steps(agent, begin_s):
        if isinstance(step, Agent):
            yield from _clocked(step, at)
        else:
            yield at, step


def _steps(agent: Agent, begin_s: float) -> Iterator[tuple[float, Turn | Agent]]:
    """The agent's turns and the agents that it starts, with the times at which they begin."""
    clock = begin_s
    for step in agent.steps:
        if isinstance(step, Turn):
            clock += step.pause_s
            yield clock, step
            clock += _SECONDS_PER_OUTPUT_TOKEN * step.output_tokens
            continue
        agents: Sequence[Agent] = (step,) if isinstance(step, Agent) else step.agents
        for each in agents:
            yield clock + each.pause_s, each
        if not (isinstance(step, Branches) and step.turns_beside != 0):
            clock = max([clock, *(clock + each.pause_s + _length(each) for each in agents)])


def _length(agent: Agent) -> float:
    clock = 0.0
    for at, step in _steps(agent, 0.0):
        if isinstance(step, Turn):
            clock = max(clock, at + _SECONDS_PER_OUTPUT_TOKEN * step.output_tokens)
        else:
            clock = max(clock, at + _length(step))
    return clock


def _goes_on(before: Turn, turn: Turn) -> bool:
    """Whether the prompt begins with all of the one before, and has room for its answer."""
    first, second = block_array(before.blocks), block_array(turn.blocks)
    whole = before.input_tokens + before.output_tokens
    return turn.input_tokens >= whole and common_blocks(first, second) == len(first)


def _coarse_ids(turn: Turn, block_size: int) -> list[int]:
    """Ids for blocks of MOONCAKE_BLOCK tokens: equal where all smaller blocks under them are."""
    keys = page_keys(turn.blocks, block_size, turn.input_tokens, MOONCAKE_BLOCK)
    ids = (np.frombuffer(keys, np.uint64) >> np.uint64(2)).tolist()
    missing = -(-turn.input_tokens // MOONCAKE_BLOCK) - len(ids)
    return [*ids, *(_unique(turn, i) for i in range(missing))]


def _text(turn: Turn, start: int, block_size: int) -> str:
    """Tokens [start, input_tokens) of the prompt as text; a block's text depends on its id alone."""
    parts = []
    at = min(start, turn.input_tokens)
    blocks = block_array(turn.blocks)
    while at < turn.input_tokens:
        index, offset = divmod(at, block_size)
        known = index < len(blocks)
        end = min(turn.input_tokens, (index + 1) * block_size)
        key = f"block {blocks[index]}" if known else f"tail {_unique(turn, index)}"
        parts.append(_block_text(key, block_size)[offset * _CHARACTERS : (offset + end - at) * _CHARACTERS])
        at = end
    return "".join(parts)


def _block_text(key: str, block_size: int) -> str:
    length = block_size * _CHARACTERS
    return hashlib.shake_128(key.encode()).hexdigest(-(-length // 2))[:length]


def _unique(turn: Turn, salt: object) -> int:
    """An id that no other place has: of 62 bits, while those of conversations are small."""
    last = block_array(turn.blocks)[-1:].tolist()
    words = f"{last} {turn.input_tokens} {turn.pause_s} {salt}"
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1 << 61


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
