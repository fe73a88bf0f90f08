"""Prompts that grow by text or by other pieces, cut into blocks with hash ids made from what is in them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

from sglang_dsv4x.replay.blocks import Blocks
from sglang_dsv4x.replay.conversation import Kind
from sglang_dsv4x.replay.formats.fields import Fields

# No model reads more tokens; keeps a corrupt number from becoming minutes of work.
LARGEST_PROMPT = 2**24

_ID_MASK = 2**63 - 1


class PromptStream:
    """A prompt: append to it, and read `blocks` and `tokens` whenever a turn is sent.

    Two prompts that began with the same pieces have the same ids for the blocks that lie wholly in them.
    """

    def __init__(self, block_size: int):
        self.blocks = Blocks()
        self.tokens = 0
        self._size = block_size
        self._open = hashlib.blake2b(digest_size=8)
        self._filled = 0

    def restart(self) -> None:
        """Begins an empty prompt."""
        self.blocks, self.tokens, self._filled = Blocks(), 0, 0
        self._open = hashlib.blake2b(digest_size=8)

    def copy(self) -> PromptStream:
        """A prompt that begins with all of this one, as a fork's does."""
        other = PromptStream(self._size)
        other.blocks, other.tokens = self.blocks, self.tokens
        other._open, other._filled = self._open.copy(), self._filled
        return other

    def add_text(self, text: str, characters_per_token: float) -> None:
        """Appends a piece of text; a part of a token at its end counts as a whole one."""

        def content(start: int, end: int) -> bytes:
            part = text[round(start * characters_per_token) : round(end * characters_per_token)]
            return part.encode("utf-8", "surrogatepass")

        self._add(math.ceil(len(text) / characters_per_token), content)

    def add_unique(self, key: str, tokens: int) -> None:
        """Appends tokens that only a piece with the same key shares."""
        name = key.encode("utf-8", "surrogatepass")
        self._add(tokens, lambda start, end: name + start.to_bytes(5, "little") + end.to_bytes(5, "little"))

    def add_block(self, hash_id: int, tokens: int) -> None:
        """Appends the first `tokens` tokens of the block that `hash_id` names, at most one block.

        A whole block at a block's boundary keeps its id.
        """
        if tokens == self._size and self._filled == 0:
            self.blocks = self.blocks.extended([hash_id])
            self.tokens += tokens
        else:
            self.add_unique(f"block {hash_id}", tokens)

    def _add(self, tokens: int, content: Callable[[int, int], bytes]) -> None:
        made = []
        at = 0
        while at < tokens:
            take = min(self._size - self._filled, tokens - at)
            self._open.update(content(at, at + take))
            self._filled += take
            at += take
            if self._filled == self._size:
                made.append(int.from_bytes(self._open.digest(), "little") & _ID_MASK)
                self._open = hashlib.blake2b(digest_size=8)
                self._filled = 0
        self.blocks = self.blocks.extended(made) if made else self.blocks
        self.tokens += tokens


def message_texts(owner: Fields, field: str) -> list[tuple[str, str]]:
    """OpenAI chat messages as (role, text) with everything that a chat template shows of them.

    Raises TraceError for a message without a role, or with a part that is no text: only text can be replayed.
    """
    found = []
    for message in owner.objects(field):
        role = message.text("role")
        parts = [f"\n<{role}>\n", _content(message)]
        for key in ("reasoning_content", "name", "tool_call_id", "tool_calls", "function_call"):
            if message.has(key):
                parts.append(canonical(message.value(key)))
        found.append((role, "".join(parts)))
    return found


def kind_of(messages: list[tuple[str, str]]) -> Kind:
    """'tool' when the last message is a tool's, else 'human'."""
    return "tool" if messages and messages[-1][0] in ("tool", "function") else "human"


def canonical(value: Any) -> str:
    """A JSON value as text that does not depend on the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def room_for(stream: PromptStream, tokens: int, fields: Fields, field: str) -> int:
    """`tokens`. Raises TraceError when the prompt would become longer with them than a trace can mean."""
    if stream.tokens + tokens > LARGEST_PROMPT:
        raise fields.error(
            field, f"makes a prompt of {stream.tokens + tokens} tokens; at most {LARGEST_PROMPT} can be meant"
        )
    return tokens


def _content(message: Fields) -> str:
    content = message.value("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise message.error("content", "must be a string or a list of parts")
    texts = []
    for part in message.objects("content"):
        kind = part.text("type")
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.value("text"), str):
            raise part.error("type", f"is {kind!r}; only parts of text can be replayed")
        texts.append(part.value("text"))
    return "".join(texts)
