"""The command-line arguments that say which traces to read, and how."""

from __future__ import annotations

import argparse

from sglang_dsv4x.replay.conversation import Conversation
from sglang_dsv4x.replay.formats import AUTO, FORMATS, LoadOptions, load_trace, trace_path
from sglang_dsv4x.replay.formats.options import (
    CHARACTERS_PER_TOKEN,
    LARGEST_BLOCK,
    MOONCAKE_BLOCK,
    TEXT_BLOCK,
)


def add_format_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds --format and what goes with it."""
    known = "; ".join(f"{name}: {each.description}" for name, each in sorted(FORMATS.items()))
    group.add_argument(
        "--format",
        choices=[AUTO, *sorted(FORMATS)],
        default=AUTO,
        help=f"trace format (default auto: by the keys of a file's first object). {known}",
    )
    group.add_argument(
        "--block-size",
        type=block_size,
        metavar="N",
        help=f"tokens of a block where the format leaves it open (default {MOONCAKE_BLOCK} for hash ids in "
        f"mooncake and mooncake_trace, {TEXT_BLOCK} for text)",
    )
    group.add_argument(
        "--chars-per-token",
        type=characters,
        metavar="X",
        help="characters of a token, for formats whose prompts are text (default: from the lengths that an "
        f"agentic-trace records, else {CHARACTERS_PER_TOKEN:g})",
    )


def block_size(word: str) -> int:
    """Tokens of a block, for argparse."""
    value = int(word)
    if not 1 <= value <= LARGEST_BLOCK:
        raise argparse.ArgumentTypeError(f"must be between 1 and {LARGEST_BLOCK}, not {word}")
    return value


def characters(word: str) -> float:
    """A number of characters per token between 1 and 1000, for argparse."""
    value = float(word)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"must be between 1 and 1000, not {word}")
    return value


def load_all(args: argparse.Namespace) -> list[Conversation]:
    """The conversations of all `args.traces`. Raises TraceError."""
    options = LoadOptions(args.block_size, args.chars_per_token)
    return [c for name in args.traces for c in load_trace(trace_path(name), args.format, options)]
