"""The console script `sglang-dsv4x`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from . import __version__


class Command(NamedTuple):
    """A subcommand: `module` has add_arguments(parser) and `function`(args) -> exit code."""

    module: str
    function: str
    help: str


COMMANDS = {
    "check": Command(
        "check",
        "run",
        "say whether this installation can serve: seams, versions, device, kernels, host memory",
    ),
    "make-model": Command("make_model.command", "run", "write a random DeepSeek-V4 checkpoint of any shape"),
    "replay": Command(
        "replay.cli", "run", "replay recorded agent conversations against a server, and report"
    ),
    "synthesize": Command(
        "replay.synthesize", "run", "write conversations of coding agents, made from a seed, as a trace"
    ),
    "plan": Command(
        "capacity.command", "run", "what fits on a machine: bytes, requests and tokens, before there is one"
    ),
    "report": Command(
        "replay.report_command", "run", "show reports of replays, several side by side, also as a web page"
    ),
    "verify": Command(
        "verify.command", "run", "ask a live server whether its prefix cache and the tier work"
    ),
    "bench": Command("bench.command", "run", "measure: one of the programs behind the README's numbers"),
    "demo": Command("demo", "run_demo", "one trace with the tier off and on, compared bit by bit"),
}

DESCRIPTION = """\
DeepSeek-V4 in SGLang with a tiered C4 KV cache and the radix prefix cache on.

The server itself is SGLang's:
  python -m sglang.launch_server --enable-dsv4x --model-path DIR ...
Its --help lists our flags in a group of their own.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns its exit code: 0 when all is well, 2 for a usage error (SystemExit)."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(words).parse_args(words)
    if args.command is None:
        _parser([]).print_help()
        return 2
    command = COMMANDS[args.command]
    try:
        code = int(getattr(_module(command), command.function)(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sglang-dsv4x", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"sglang-dsv4x {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=command.help, description=command.help[:1].upper() + command.help[1:] + "."
        )
        # The others' modules import torch or SGLang, which takes seconds.
        if words[:1] == [name]:
            _module(command).add_arguments(sub)
    return parser


def _module(command: Command) -> ModuleType:
    return importlib.import_module(f"{__package__}.{command.module}")


if __name__ == "__main__":
    sys.exit(main())
