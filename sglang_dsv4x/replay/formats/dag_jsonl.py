"""AIPerf's `dag_jsonl`: a session per line, with turns that fork and spawn other sessions.

`{"session_id", "turns": [{"messages", "max_tokens", "tools", "extra", "forks", "spawns", "delay"}]}`; delay in ms. A
fork's prompts begin with everything of its parent's up to the fork, the answer included; a spawn begins with nothing.
A fork ends its parent, unless it is in the background; a spawn is waited for before turn `join_at` (the next one by
default; never, after the last turn). A session that no other one names is a conversation.

The schema and its rules are those of AIPerf 0.13 (aiperf/dataset/loader/dag_jsonl_models.py), which refuses fields that
it does not know. Prompts are text; they are cut into blocks of 64 tokens, of four characters each unless the user says
otherwise. An answer has `max_tokens` tokens, which are part of the next prompt. A sampled think time
(`think_time_sigma`) is replayed as its median.

The file is read twice: once for its shape, then each session where it is needed, so that no more text is in memory
than one line has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_dsv4x.replay.conversation import MAIN_AGENT, Agent, Branches, Conversation, Kind, Step, Turn
from sglang_dsv4x.replay.formats.fields import Fields, TraceError
from sglang_dsv4x.replay.formats.options import (
    CHARACTERS_PER_TOKEN,
    DEEPEST_AGENT,
    OUTPUT_TOKENS,
    TEXT_BLOCK,
    LoadOptions,
)
from sglang_dsv4x.replay.formats.prompt_stream import (
    PromptStream,
    canonical,
    kind_of,
    message_texts,
    room_for,
)
from sglang_dsv4x.replay.formats.source import Line, TraceFile

# A session that several spawn runs once for each: no more turns than this may come of it.
MOST_TURNS = 1_000_000

_SESSION = (
    "session_id", "turns", "orchestrator", "spawns", "think_time_ms", "think_time_sigma", "think_time_min_ms",
    "think_time_max_ms", "rounds", "context_mode", "pre_session_spawns",
)  # fmt: skip
_TURN = ("messages", "model", "max_tokens", "tools", "extra", "forks", "spawns", "delay")
_MODES = ("deltas_without_responses", "deltas_with_responses", "message_array_with_responses")
_SCOPE = "text"


class _Start(NamedTuple):
    """Children that start together; `beside` as in Branches."""

    children: tuple[str, ...]
    beside: int | None
    fork: bool = False
    pause_s: float = 0.0


@dataclass
class _Session:
    """A line's shape: where it is, and who starts before turn i (`starts[i]`; the last: after all turns)."""

    line: tuple[int, int]
    where: Fields
    mode: str
    turns: int
    starts: list[list[_Start]] = field(default_factory=list)

    def children(self) -> Iterator[_Start]:
        for starts in self.starts:
            yield from starts


def read(file: TraceFile, options: LoadOptions) -> Iterator[Conversation]:
    """The conversations of a file, in the order of their lines."""
    sessions: dict[str, _Session] = {}
    for line in file.lines():
        line.value.only(_SESSION)
        name = line.value.text("session_id")
        if name in sessions:
            raise line.value.error(
                "session_id", f"{name!r} is there twice, first in line {sessions[name].line[0]}"
            )
        sessions[name] = _shape(line)
    if not sessions:
        raise TraceError(f"{file.path}: holds no session")
    sizes = _check(sessions)
    started = {child for s in sessions.values() for start in s.children() for child in start.children}
    roots = [name for name in sessions if name not in started]
    if sum(sizes[name] for name in roots) > MOST_TURNS:
        raise TraceError(f"{file.path}: its sessions start more than {MOST_TURNS:,} turns in all")
    builder = _Builder(file, sessions, options)
    for name in roots:
        yield builder.conversation(name)


def _shape(line: Line) -> _Session:
    value = line.value
    mode = value.text("context_mode", default=_MODES[0]).lower()
    if mode not in _MODES:
        raise value.error("context_mode", f"is {mode!r}; must be one of {', '.join(_MODES)}")
    turns = value.objects("turns") if value.has("turns") else []
    # Only what an error needs: the line's text is not kept.
    session = _Session((line.number, line.offset), value.bare(), mode, len(turns))
    if value.flag("orchestrator"):
        _orchestrate(value, session, turns)
        return session
    for name in ("rounds", "spawns", "think_time_ms", "think_time_sigma"):
        if value.has(name):
            raise value.error(name, "is only for an orchestrator")
    if not turns:
        raise value.error("turns", "is empty, and the session is no orchestrator")
    session.starts = [[] for _ in range(len(turns) + 1)]
    first = _names(value, "pre_session_spawns")
    if first:
        session.starts[0].append(_Start(first, None))
    for i, turn in enumerate(turns):
        turn.only(_TURN)
        turn.objects("messages")
        session.starts[i + 1] += _spawns(turn, i, len(turns)) + _forks(turn, i == len(turns) - 1)
    return session


def _orchestrate(value: Fields, session: _Session, turns: list[Fields]) -> None:
    for name in ("turns", "pre_session_spawns"):
        if turns if name == "turns" else _names(value, name):
            raise value.error(name, "must be empty for an orchestrator")
    think_s = value.seconds("think_time_ms", default=0.0) / 1000
    rounds = value.value("rounds")
    if isinstance(rounds, list):
        for each in value.objects("rounds"):
            each.only(("spawns", "think_time_ms"))
            pause_s = each.seconds("think_time_ms", default=1000 * think_s) / 1000
            session.starts.append([_Start(_named(each, "spawns"), 0, pause_s=pause_s)])
        return
    count = value.count("rounds", least=1) if rounds is not None else 1
    if count > MOST_TURNS:
        raise value.error("rounds", f"is {count}; at most {MOST_TURNS} can be replayed")
    session.starts = [[_Start(_named(value, "spawns"), 0, pause_s=think_s)] for _ in range(count)]


def _forks(turn: Fields, last: bool) -> list[_Start]:
    ended: list[str] = []
    beside: list[str] = []
    for i, entry in enumerate(turn.items("forks")):
        if isinstance(entry, str):
            ended.append(entry)
            continue
        child = turn.item("forks", i)
        child.only(("child", "background"))
        (beside if child.flag("background") else ended).append(child.text("child"))
    if ended and not last:
        raise turn.error("forks", "end the session, so they must be on its last turn, or in the background")
    if len({*ended, *beside}) < len(ended) + len(beside):
        raise turn.error("forks", "names a session twice")
    starts = [_Start(tuple(beside), None, fork=True)] if beside else []
    return [*starts, _Start(tuple(ended), 0, fork=True)] if ended else starts


def _spawns(turn: Fields, at: int, turns: int) -> list[_Start]:
    groups: dict[int | None, list[str]] = {}
    for i, entry in enumerate(turn.items("spawns")):
        if isinstance(entry, str):
            groups.setdefault(0 if at + 1 < turns else None, []).append(entry)
            continue
        group = turn.item("spawns", i)
        group.only(("children", "join_at"))
        joined = group.count("join_at") if group.has("join_at") else at + 1
        if group.has("join_at") and not at < joined < turns:
            raise group.error("join_at", f"is {joined}; must be between {at + 1} and {turns - 1}")
        groups.setdefault(joined - at - 1 if joined < turns else None, []).extend(_named(group, "children"))
    names = [name for group in groups.values() for name in group]
    if len(set(names)) < len(names):
        raise turn.error("spawns", "names a session twice")
    # Those that are waited for first come last: an agent waits for them before its next step.
    order = sorted(groups, key=lambda beside: (beside is not None, -(beside or 0)))
    return [_Start(tuple(groups[beside]), beside) for beside in order]


def _names(owner: Fields, name: str) -> tuple[str, ...]:
    found = owner.texts(name)
    if len(set(found)) < len(found):
        raise owner.error(name, "names a session twice")
    return found


def _named(owner: Fields, name: str) -> tuple[str, ...]:
    found = _names(owner, name)
    if not found:
        raise owner.error(name, "must name at least one session")
    return found


def _check(sessions: dict[str, _Session]) -> dict[str, int]:
    """The turns of each session with those that it starts.

    Raises TraceError for unknown children, forks with two parents, cycles, and what nests or grows too far.
    """
    parents: dict[str, str] = {}
    for name, session in sessions.items():
        for start in session.children():
            for child in start.children:
                if child not in sessions:
                    raise session.where.error("turns", f"{name!r} starts {child!r}, which is in no line")
                if not start.fork:
                    continue
                if child in parents:
                    raise session.where.error(
                        "turns",
                        f"{child!r} is forked by {parents[child]!r} and {name!r}; a fork has one parent",
                    )
                if sessions[child].mode == "message_array_with_responses":
                    raise sessions[child].where.error("context_mode", "a fork must take its parent's context")
                parents[child] = name
    sizes: dict[str, tuple[int, int]] = {}  # turns and depth, forks and spawns included
    for name in sessions:
        _measure(name, sessions, sizes)
    return {name: turns for name, (turns, _) in sizes.items()}


def _measure(name: str, sessions: dict[str, _Session], sizes: dict[str, tuple[int, int]]) -> None:
    """Fills `sizes` for the session and all that it starts. Without recursion: a chain may be as long as the file."""
    stack = [(name, iter([c for s in sessions[name].children() for c in s.children]))]
    path = {name: 0}
    while stack:
        current, children = stack[-1]
        if current in sizes:
            stack.pop()
            path.pop(current, None)
            continue
        child = next((c for c in children if c not in sizes), None)
        if child is None:
            below = [sizes[c] for s in sessions[current].children() for c in s.children]
            count = sessions[current].turns + sum(size for size, _ in below)
            depth = 1 + max((deep for _, deep in below), default=0)
            where = sessions[current].where
            if count > MOST_TURNS:
                raise where.error("turns", f"{current!r} starts more than {MOST_TURNS:,} turns in all")
            if depth > DEEPEST_AGENT:
                raise where.error("turns", f"sessions start sessions more than {DEEPEST_AGENT} deep")
            sizes[current] = (count, depth)
            continue
        if child in path:
            names = list(path)
            cycle = [*names[names.index(child) :], child]
            shown = " -> ".join(cycle if len(cycle) < 9 else [*cycle[:4], "...", *cycle[-3:]])
            raise sessions[current].where.error("turns", f"sessions start each other in a circle: {shown}")
        path[child] = 0
        stack.append((child, iter([c for s in sessions[child].children() for c in s.children])))


class _Builder:
    def __init__(self, file: TraceFile, sessions: dict[str, _Session], options: LoadOptions):
        self._file = file
        self._sessions = sessions
        self._size = options.block_size or TEXT_BLOCK
        self._per_token = options.characters_per_token or CHARACTERS_PER_TOKEN

    def conversation(self, name: str) -> Conversation:
        agent = self._agent(name, MAIN_AGENT, PromptStream(self._size), name, "human")
        return Conversation(name, self._size, _SCOPE, agent)

    def _agent(
        self, name: str, title: str, prompt: PromptStream, path: str, first: Kind, pause_s: float = 0.0
    ) -> Agent:
        session = self._sessions[name]
        value = self._file.line_at(session.line)
        turns = value.objects("turns") if value.has("turns") else []
        steps: list[Step] = []
        due = {
            i + s.beside for i, starts in enumerate(session.starts) for s in starts if s.beside is not None
        }
        for i, starts in enumerate(session.starts):
            for start in starts:
                steps.append(self._branches(start, prompt, path))
            if i >= len(turns):
                continue
            kind: Kind | None = None
            if i == 0 and first == "fork":
                kind = "fork"
            elif i in due:
                kind = "resume"
            steps.append(self._turn(turns[i], session, prompt, f"{path}/{i}", kind))
        return Agent(title, tuple(steps), pause_s)

    def _branches(self, start: _Start, prompt: PromptStream, path: str) -> Branches:
        agents = []
        for child in start.children:
            begin = prompt.copy() if start.fork else PromptStream(self._size)
            kind: Kind = "fork" if start.fork else "human"
            agents.append(self._agent(child, child, begin, f"{path}/{child}", kind, start.pause_s))
        return Branches(tuple(agents), start.beside)

    def _turn(
        self, turn: Fields, session: _Session, prompt: PromptStream, path: str, kind: Kind | None
    ) -> Turn:
        if session.mode == "message_array_with_responses":
            prompt.restart()
        texts = message_texts(turn, "messages")
        parts = [text for _, text in texts]
        if turn.has("tools"):
            # A chat template shows tools ahead of the messages; later turns have them in their history.
            parts = parts if prompt.tokens else [canonical(turn.value("tools")), *parts]
        for text in parts:
            room_for(prompt, int(len(text) / self._per_token) + 1, turn, "messages")
            prompt.add_text(text, self._per_token)
        output = turn.count("max_tokens", least=1) if turn.has("max_tokens") else OUTPUT_TOKENS
        made = Turn(
            max(1, prompt.tokens),
            output,
            prompt.blocks,
            turn.seconds("delay", default=0.0) / 1000,
            kind or kind_of(texts),
        )
        if session.mode == _MODES[0]:
            prompt.add_unique(f"answer {path}", room_for(prompt, output, turn, "max_tokens"))
        return made
