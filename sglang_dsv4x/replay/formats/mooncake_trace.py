"""AIPerf's `mooncake_trace`: Mooncake's lines with sessions, delays, text and messages.

A line is one turn: `input_length` (tokens, with `hash_ids` of 512-token blocks or without), or `text_input`, or
`messages`, or `payload` (a whole request body); with `output_length`, `timestamp` or `delay` (ms), `session_id` and
`extra`. As AIPerf replays them, lines of one session build on each other: a prompt is everything before, the answer
included, and then what its line adds. Lines with `messages` or `payload` are whole prompts instead. The schema is that
of AIPerf 0.13 (aiperf/dataset/loader/models.py, MooncakeTrace).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_dsv4x.replay.conversation import MAIN_AGENT, Agent, Conversation, Kind, Turn
from sglang_dsv4x.replay.formats.fields import Fields, TraceError
from sglang_dsv4x.replay.formats.mooncake import begun_at, block_ids
from sglang_dsv4x.replay.formats.options import (
    CHARACTERS_PER_TOKEN,
    MOONCAKE_BLOCK,
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
from sglang_dsv4x.replay.formats.source import TraceFile

_MODES = ("input_length", "text_input", "messages", "payload")


def read(file: TraceFile, options: LoadOptions) -> Iterator[Conversation]:
    """A conversation per session, in the order in which they began; lines without a session are one each."""
    sessions: dict[str, _Session] = {}
    for line in file.lines():
        row = line.value
        # A name that starts with a line break cannot be a session's own.
        key = row.text("session_id") if row.has("session_id") else f"\n{line.number}"
        session = sessions.get(key)
        if session is None:
            name = key if row.has("session_id") else f"{file.stem}:{line.number}"
            session = sessions[key] = _Session(name, _block_size(row, options))
        session.add(row, options)
    if not sessions:
        raise TraceError(f"{file.path}: holds no request")
    found = [session.conversation(file.stem) for session in sessions.values()]
    found.sort(key=lambda each: each.arrival_s)
    yield from begun_at(found[0].arrival_s, found)


def _block_size(row: Fields, options: LoadOptions) -> int:
    return options.block_size or (MOONCAKE_BLOCK if row.has("input_length") else TEXT_BLOCK)


@dataclass
class _Session:
    name: str
    block_size: int
    turns: list[Turn] = field(default_factory=list)
    prompt: PromptStream | None = None
    whole: bool = False
    began_s: float = 0.0
    last_s: float | None = None

    def add(self, row: Fields, options: LoadOptions) -> None:
        mode = _mode(row)
        whole = mode in ("messages", "payload")
        if self.turns and whole != self.whole:
            raise row.error(mode, "cannot follow another kind of line in one session")
        self.whole = whole
        if self.prompt is None or whole:
            self.prompt = PromptStream(self.block_size)
        output = row.count("output_length") if row.has("output_length") else _payload_output(row)
        kind = self._append(self.prompt, row, mode, options)
        self.turns.append(
            Turn(max(1, self.prompt.tokens), output, self.prompt.blocks, self._pause(row), kind)
        )
        if not whole:
            # The answer is part of what comes next; a replay makes it of tokens of its own.
            answer = room_for(self.prompt, output, row, "output_length")
            self.prompt.add_unique(f"answer {self.name}/{len(self.turns)}", answer)

    def conversation(self, scope: str) -> Conversation:
        agent = Agent(MAIN_AGENT, tuple(self.turns))
        return Conversation(self.name, self.block_size, scope, agent, self.began_s)

    def _append(self, prompt: PromptStream, row: Fields, mode: str, options: LoadOptions) -> Kind:
        per_token = options.characters_per_token or CHARACTERS_PER_TOKEN
        if mode == "input_length":
            tokens = room_for(prompt, row.count(mode, least=1), row, mode)
            if not row.has("hash_ids"):
                prompt.add_unique(f"input {self.name}/{len(self.turns)}", tokens)
                return "human"
            for i, hash_id in enumerate(block_ids(row, tokens, self.block_size)):
                prompt.add_block(hash_id, min(self.block_size, tokens - i * self.block_size))
            return "human"
        if mode == "text_input":
            text = _string(row, mode)
            room_for(prompt, int(len(text) / per_token) + 1, row, mode)
            prompt.add_text(text, per_token)
            return "human"
        body = row if mode == "messages" else row.object("payload")
        if mode == "payload" and not body.has("messages"):
            prompt.add_text(_string(body, "prompt"), per_token)
            return "human"
        if body.has("tools"):
            prompt.add_text(canonical(body.value("tools")), per_token)
        messages = message_texts(body, "messages")
        for _, text in messages:
            room_for(prompt, int(len(text) / per_token) + 1, row, mode)
            prompt.add_text(text, per_token)
        return kind_of(messages)

    def _pause(self, row: Fields) -> float:
        """Seconds before the turn: its delay, or what lies between the timestamps of the session."""
        at = row.seconds("timestamp") / 1000 if row.has("timestamp") else None
        pause = row.seconds("delay") / 1000 if row.has("delay") else None
        if not self.turns:
            self.began_s = at or 0.0
        elif pause is None and at is not None and self.last_s is not None:
            if at < self.last_s:
                raise row.error("timestamp", "is before the session's last one")
            pause = at - self.last_s
        self.last_s = at if at is not None else self.last_s
        return pause or 0.0


def _mode(row: Fields) -> str:
    given = [mode for mode in _MODES if row.has(mode)]
    if len(given) != 1:
        said = f"not {' and '.join(given)}" if given else "none is there"
        raise row.error(given[0] if given else "input_length", f"exactly one of {', '.join(_MODES)}; {said}")
    if row.has("hash_ids") and given[0] != "input_length":
        raise row.error("hash_ids", "is only for lines with input_length")
    return given[0]


def _payload_output(row: Fields) -> int:
    if row.has("payload"):
        body = row.object("payload")
        for name in ("max_tokens", "max_completion_tokens"):
            if body.has(name):
                return body.count(name)
    return OUTPUT_TOKENS


def _string(fields: Fields, name: str) -> str:
    value = fields.value(name)
    if not isinstance(value, str) or not value:
        raise fields.error(name, "must be a string that is not empty")
    return value
