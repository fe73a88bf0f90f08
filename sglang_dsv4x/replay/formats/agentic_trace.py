"""bench_serving's `agentic-trace`: one JSON object `{"metadata", "conversations": [[turn, ...], ...]}`.

A turn has the `messages` that are new in it, without the assistant's, and `prompt_tokens`, the length of its whole
prompt in the recorded run. bench_serving puts the server's answers between them; here an answer takes the tokens that
`prompt_tokens` leaves for it. No output lengths are recorded (bench_serving's default is taken), and no pauses.

The schema is read in sglang/benchmark/datasets/agentic_trace.py of SGLang 0.5.17, whose loader holds the whole file and
needs transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from sglang_dsv4x.replay.conversation import MAIN_AGENT, Agent, Conversation, Turn
from sglang_dsv4x.replay.formats.fields import TraceError, as_fields
from sglang_dsv4x.replay.formats.options import (
    CHARACTERS_PER_TOKEN,
    OUTPUT_TOKENS,
    TEXT_BLOCK,
    LoadOptions,
)
from sglang_dsv4x.replay.formats.prompt_stream import PromptStream, kind_of, message_texts, room_for
from sglang_dsv4x.replay.formats.source import TraceFile

# Text is the same text in every file.
_SCOPE = "text"


def read(file: TraceFile, options: LoadOptions) -> Iterator[Conversation]:
    """The conversations of a file; those without a message are passed over, as bench_serving does.

    Without a number from the user, a token has as many characters as in the first turn with a recorded length:
    one number for the whole file, so that prompts with equal text are cut at equal places.
    """
    reader = _Reader(options)
    found = False
    for index, value, place in file.elements("conversations"):
        if not isinstance(value, list):
            raise TraceError(f"{place}: must be a list of turns")
        turns = reader.turns(value, place, f"{file.stem}:{index}")
        if turns:
            found = True
            agent = Agent(MAIN_AGENT, turns)
            yield Conversation(f"{file.stem}:{index}", reader.block_size, _SCOPE, agent)
    if not found:
        raise TraceError(f"{file.path}: conversations: holds no turn with messages")


class _Reader:
    def __init__(self, options: LoadOptions):
        self.block_size = options.block_size or TEXT_BLOCK
        self._per_token = options.characters_per_token

    def turns(self, values: list[Any], place: str, name: str) -> tuple[Turn, ...]:
        prompt = PromptStream(self.block_size)
        turns: list[Turn] = []
        for i, value in enumerate(values):
            turn = as_fields(value, f"{place}[{i}]", "a turn")
            if not turn.value("messages"):
                continue
            messages = message_texts(turn, "messages")
            text = "".join(part for _, part in messages)
            recorded = turn.count("prompt_tokens", least=1) if turn.has("prompt_tokens") else None
            if self._per_token is None and recorded is not None and not turns:
                self._per_token = max(1.0, len(text) / recorded)
            per_token = self._per_token or CHARACTERS_PER_TOKEN
            told = round(len(text) / per_token)
            added = told + (OUTPUT_TOKENS if turns else 0)
            total = added if recorded is None else max(1, recorded - prompt.tokens)
            room_for(prompt, total, turn, "prompt_tokens" if recorded else "messages")
            if turns and total > told:
                prompt.add_unique(f"answer {name}/{i}", total - told)
                total = told
            _append(prompt, text, total, per_token)
            turns.append(Turn(max(1, prompt.tokens), OUTPUT_TOKENS, prompt.blocks, 0.0, kind_of(messages)))
        return tuple(turns)


def _append(prompt: PromptStream, text: str, tokens: int, per_token: float) -> None:
    """Appends the text as exactly `tokens` tokens: where they do not fit, its end becomes as many as are left, which
    only a prompt with the same text shares."""
    whole = int(len(text) / per_token)
    kept = whole if whole <= tokens else max(0, tokens - max(1, tokens // 16))
    prompt.add_text(text[: int(kept * per_token)], per_token)
    if left := tokens - kept:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        prompt.add_unique(f"text {digest}", left)
