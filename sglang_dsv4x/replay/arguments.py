"""The command-line arguments of `sglang-dsv4x replay`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from sglang_dsv4x.launch import START_TIMEOUT_S
from sglang_dsv4x.replay.formats import FORMATS

DESCRIPTION = """\
Send recorded agent conversations to a server again, turn by turn, and report what its caches served.

Prompts are token ids made from the trace's block hashes with a seed. Sub-agents run where the trace starts
them, and the agent that started one waits for it.

Exit code: 0 all turns answered (and equal, with --compare); 1 some failed or differ, or the server did not
start; 2 wrong arguments or a bad trace; 130 interrupted, with the report of what was done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds everything that the command reads."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="trace file, or 'small' for the trace that ships with the package",
    )
    known = "; ".join(f"{name}: {each.description}" for name, each in sorted(FORMATS.items()))
    parser.add_argument(
        "--format", choices=sorted(FORMATS), default="weka", help=f"trace format (default weka). {known}"
    )
    _add_server(parser.add_argument_group("server"))
    _add_shape(parser.add_argument_group("what is sent"))
    _add_pace(parser.add_argument_group("when it is sent"))
    _add_report(parser.add_argument_group("report"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", metavar="URL", help="a running server, such as http://127.0.0.1:30000")
    where.add_argument(
        "--launch",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="start 'python -m sglang.launch_server ARGS' for this run and end it afterwards; takes the rest "
        "of the command line (or one quoted string), so it comes last",
    )
    group.add_argument(
        "--launch-log",
        type=Path,
        metavar="FILE",
        help="log of the launched server (default: a temporary file, whose name is printed)",
    )
    group.add_argument(
        "--launch-timeout",
        type=_positive_float,
        default=START_TIMEOUT_S,
        metavar="S",
        help="seconds until the launched server must serve (default %(default)g)",
    )


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scale",
        type=_positive_float,
        default=1.0,
        metavar="F",
        help="multiply context lengths by F, block by block: prompts keep sharing exactly the blocks that "
        "they shared (default 1)",
    )
    group.add_argument(
        "--max-turns",
        type=_positive_int,
        metavar="N",
        help="stop each conversation after N turns, those of sub-agents counted",
    )
    group.add_argument(
        "--output-tokens",
        type=_positive_int,
        metavar="N",
        help="output tokens of every turn (default: the trace's)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="always generate the full length (default: yes, so that runs compare)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the token ids (default 0)")
    group.add_argument(
        "--vocab-size",
        type=_positive_int,
        metavar="N",
        help="draw token ids below N (default: the model's, asked from the server or its model folder)",
    )
    group.add_argument(
        "--copies",
        type=_positive_int,
        default=1,
        metavar="N",
        help="replay every conversation N times, each time with tokens of its own (default 1)",
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=_positive_int,
        default=1,
        metavar="N",
        help="conversations at once (default 1; with more, tier counters are known in total only)",
    )
    group.add_argument(
        "--think-time-scale",
        type=_factor,
        default=0.0,
        metavar="F",
        help="wait F times the trace's pauses (default 0: none)",
    )
    group.add_argument(
        "--timeout",
        type=_positive_float,
        default=600.0,
        metavar="S",
        help="seconds until a request counts as failed (default %(default)g)",
    )
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache first")


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--logprobs",
        action="store_true",
        help="record the log-probability of every output token, with all its bits",
    )
    group.add_argument("--json", type=Path, metavar="OUT", help="write the whole report as JSON")
    group.add_argument(
        "--compare",
        type=Path,
        metavar="REPORT",
        help="a JSON report of the same replay: compare tokens and log-probabilities bit for bit (equal bits "
        "need one request at a time and the same chunk size)",
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def _positive_float(text: str) -> float:
    value = _factor(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _factor(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number that is not negative")
    return value
