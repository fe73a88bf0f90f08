"""Mooncake's published traces: JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

A line is a whole request; which ones belong to one conversation is not recorded, so each is a session of its own that
begins at its timestamp. `hash_ids` name blocks of 512 tokens, the last of which may be cut, and mean the same tokens
all through the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dsv4x.replay.blocks import Blocks
from sglang_dsv4x.replay.conversation import MAIN_AGENT, Agent, Conversation, Turn
from sglang_dsv4x.replay.formats.fields import Fields, TraceError
from sglang_dsv4x.replay.formats.options import MOONCAKE_BLOCK, LoadOptions
from sglang_dsv4x.replay.formats.source import TraceFile

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(file: TraceFile, options: LoadOptions) -> Iterator[Conversation]:
    """A conversation per line, in the order of their timestamps; lines with equal ones in that of the file."""
    block_size = options.block_size or MOONCAKE_BLOCK
    found = []
    last = Blocks()
    for line in file.lines():
        row = line.value
        row.only(KEYS)
        at = row.seconds("timestamp") / 1000
        tokens = row.count("input_length", least=1)
        last = Blocks(block_ids(row, tokens, block_size), base=last)
        turn = Turn(tokens, row.count("output_length"), last, kind="human")
        agent = Agent(MAIN_AGENT, (turn,))
        found.append(Conversation(f"{file.stem}:{line.number}", block_size, file.stem, agent, at))
    if not found:
        raise TraceError(f"{file.path}: holds no request")
    found.sort(key=lambda each: each.arrival_s)
    yield from begun_at(found[0].arrival_s, found)


def begun_at(start_s: float, conversations: list[Conversation]) -> Iterator[Conversation]:
    """The conversations with arrivals counted from `start_s`."""
    for each in conversations:
        yield Conversation(each.name, each.block_size, each.token_scope, each.main, each.arrival_s - start_s)


def block_ids(row: Fields, tokens: int, block_size: int) -> list[int]:
    """The `hash_ids` of a row. Raises TraceError when they cannot stand for `tokens` tokens."""
    ids = row.counts("hash_ids")
    if -(-tokens // block_size) != len(ids):
        raise row.error(
            "hash_ids",
            f"{len(ids)} blocks of {block_size} tokens cannot stand for input_length {tokens}; another size "
            "can be given with --block-size",
        )
    return ids
