"""`sglang-dsv4x synthesize`: coding agents as traces, for when there are no recorded ones."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from sglang_dsv4x.replay.connection_arguments import factor, positive_int
from sglang_dsv4x.replay.conversation import Conversation, turns
from sglang_dsv4x.replay.formats.writing import WRITERS
from sglang_dsv4x.replay.synthetic_agents import Shape, conversations

DESCRIPTION = """\
Write conversations of coding agents, made from a seed, in one of the formats that 'sglang-dsv4x replay' and other
tools read. No recorded text or hash goes in; their shape is that of 739 recorded Claude Code conversations:

  new tokens of a turn   230 / 705 / 4,077 at p10 / p50 / p90, 65,875 at p99
  pause before a turn    4 / 10 / 170 s at p10 / p50 / p90, 3,039 s at p99
  turns a conversation   43 in the median, 80 on average
  2 % of the turns keep less than half of the prompt before (a compaction, a fresh start)

What was not published is a guess: outputs around their median of 444 tokens, how often sub-agents are started, how many
turns they have (3 to 16), and that a pause of a minute or more is a person's."""

EXAMPLES = """\
examples:
  sglang-dsv4x synthesize --out agents --conversations 100
  sglang-dsv4x replay agents/*.json --dry-run --capacity 2M 8M
  sglang-dsv4x synthesize --out forks.jsonl --format dag_jsonl --conversations 20 --subagents 0.3 --forks 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds everything that the command reads."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="file to write, or for weka the folder for one file per conversation",
    )
    lost = "; ".join(f"{name}: {writer.lost}" for name, writer in WRITERS.items())
    parser.add_argument(
        "--format",
        choices=sorted(WRITERS),
        default="weka",
        help=f"default weka. Not every format can say everything. What is lost: {lost}",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--conversations", type=positive_int, metavar="N", help="how many (default 10)")
    amount.add_argument(
        "--total-turns", type=positive_int, metavar="N", help="conversations until they have this many turns"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same trace (default 0)")
    shape = Shape()
    parser.add_argument(
        "--turns",
        type=positive_int,
        metavar="N",
        help="turns of every conversation, without its sub-agents' (default: as recorded, see above)",
    )
    parser.add_argument(
        "--shared-prefix",
        type=positive_int,
        default=shape.shared_prefix,
        metavar="TOKENS",
        help="tools and system prompt that all prompts of all conversations begin with (default %(default)s)",
    )
    parser.add_argument(
        "--subagents",
        type=share,
        default=shape.subagents,
        metavar="SHARE",
        help="share of the turns after which one to three sub-agents are started (default %(default)g)",
    )
    parser.add_argument(
        "--forks",
        type=share,
        default=shape.forks,
        metavar="SHARE",
        help="share of the sub-agents that go on from the whole history (default %(default)g); the others begin "
        "with the shared prefix alone",
    )
    parser.add_argument(
        "--max-context",
        type=positive_int,
        default=shape.max_context,
        metavar="TOKENS",
        help="a prompt that would be longer starts over (default %(default)s)",
    )
    parser.add_argument(
        "--begin-every",
        type=factor,
        default=0.0,
        metavar="S",
        help="mean seconds between the beginnings of two conversations, for formats with times (default 0)",
    )


def share(text: str) -> float:
    """A number between 0 and 1, for `type=` of an argument."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Writes the trace and returns the exit code: 0, or 2 when it cannot be written."""
    writer = WRITERS[args.format]
    if args.max_context < 2 * args.shared_prefix:
        return _complain(f"--max-context {args.max_context} must be at least twice --shared-prefix")
    shape = Shape(
        shared_prefix=args.shared_prefix,
        subagents=args.subagents,
        forks=args.forks,
        turns=args.turns,
        max_context=args.max_context,
        begin_every_s=args.begin_every,
    )
    done = 0

    def counted() -> Iterator[Conversation]:
        nonlocal done
        made = some(conversations(args.seed, shape), args.conversations, args.total_turns)
        for conversation in tqdm(made, "synthesize", unit=" conversations", disable=not sys.stderr.isatty()):
            yield conversation
            done += 1

    try:
        written = writer.write(counted(), args.out)
    except OSError as error:
        return _complain(f"--out {args.out}: cannot be written: {error.strerror or error}")
    print(f"wrote {written:,} turns of {done:,} conversations to {args.out} ({args.format})")
    print(f"not in this format: {writer.lost}", file=sys.stderr)
    return 0


def some(made: Iterator[Conversation], count: int | None, total_turns: int | None) -> Iterator[Conversation]:
    """The first `count` conversations (default 10), or as many as have `total_turns` turns or more."""
    if total_turns is None:
        yield from itertools.islice(made, count or 10)
        return
    left = total_turns
    for conversation in made:
        yield conversation
        left -= sum(1 for _ in turns(conversation.main))
        if left <= 0:
            return


def _complain(message: str) -> int:
    print(f"sglang-dsv4x synthesize: {message}", file=sys.stderr)
    return 2
