"""The command-line arguments of `sglang-dsv4x replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_dsv4x.launch import START_TIMEOUT_S
from sglang_dsv4x.replay import dry_run
from sglang_dsv4x.replay.connection_arguments import (
    add_connection_arguments,
    base_url,
    count,
    factor,
    positive_float,
    positive_int,
)
from sglang_dsv4x.replay.formats.arguments import add_format_arguments
from sglang_dsv4x.replay.session import Endpoint

DESCRIPTION = """\
Send recorded agent conversations to a server again, turn by turn, and report what its caches served.

Prompts are token ids made from the trace's block hashes with a seed. Sub-agents run where the trace starts
them, and the agent that started one waits for it. Every answer is streamed, so times to first token and
between tokens are the client's own.

Ctrl-C (or SIGTERM) stops the run and still writes the report of what was done.

Exit code: 0 all turns answered (and equal, with --against); 1 some failed or differ, or the server did not
start; 2 wrong arguments or a bad trace; 130 interrupted, with the report of what was done."""

EXAMPLES = """\
examples:
  one server, report as a web page
    sglang-dsv4x replay small --base-url http://127.0.0.1:30000 --html report.html
  two servers in one run: each turn goes to both before the next one
    sglang-dsv4x replay small --compare off=http://127.0.0.1:30000 on=http://127.0.0.1:30001 \\
        --json both.json --html both.html
  sixteen agents at once with a tenth of their pauses, for an hour at most, to be taken up again after a crash
    sglang-dsv4x replay *.json --base-url URL --concurrency 16 --think-time-scale 0.1 --duration 3600 \\
        --resume run.journal --json run.json
  no server: hit rates with 2 and 8 million tokens of cache, 16 agents at once
    sglang-dsv4x replay *.json --dry-run --capacity 2M 8M --concurrency 16
  vLLM or any other server with OpenAI's completions interface
    OPENAI_API_KEY=... sglang-dsv4x replay small --base-url https://host/v1 --vocab-size 129280
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds everything that the command reads."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="trace file, or 'small' for the trace that ships with the package",
    )
    add_format_arguments(parser.add_argument_group("trace format"))
    _add_server(parser.add_argument_group("server"))
    _add_shape(parser.add_argument_group("what is sent"))
    _add_pace(parser.add_argument_group("when it is sent"))
    _add_report(parser.add_argument_group("report"))
    dry_run.add_arguments(parser.add_argument_group("dry run"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--base-url",
        type=base_url,
        metavar="URL",
        help="a running server, such as http://127.0.0.1:30000; a /v1 at its end may stay",
    )
    where.add_argument(
        "--compare",
        nargs="+",
        type=endpoint,
        metavar="NAME=URL",
        help="several running servers: every turn goes to each of them before the next one, and the report "
        "shows them side by side (see --interleave)",
    )
    where.add_argument(
        "--dry-run",
        action="store_true",
        help="no server: say what caches of given sizes and policies would serve (see the group below)",
    )
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
        type=positive_float,
        default=START_TIMEOUT_S,
        metavar="S",
        help="seconds until the launched server must serve (default %(default)g)",
    )
    group.add_argument(
        "--api",
        choices=("auto", "sglang", "openai", "openai-chat"),
        default="auto",
        help="sglang: POST /generate; openai: POST /v1/completions with token ids as prompt; openai-chat: POST "
        "/v1/chat/completions with a word for each token id, for servers that have nothing else: prompts are then "
        "longer or shorter than the trace's, as the server's tokenizer has it (default auto: sglang where "
        "/server_info answers, else openai)",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="model to ask for, with the openai interfaces (default: the first that /v1/models lists)",
    )
    group.add_argument(
        "--openai-strict",
        action="store_true",
        help="send nothing but OpenAI's own fields: no ignore_eos, no token ids in answers. For servers that "
        "refuse others",
    )
    add_connection_arguments(group)


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scale",
        type=positive_float,
        default=1.0,
        metavar="F",
        help="multiply context lengths by F, block by block: prompts keep sharing exactly the blocks that "
        "they shared (default 1)",
    )
    group.add_argument(
        "--max-turns",
        type=positive_int,
        metavar="N",
        help="stop each conversation after N turns, those of sub-agents counted",
    )
    group.add_argument(
        "--output-tokens",
        type=positive_int,
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
        type=positive_int,
        metavar="N",
        help="draw token ids below N (default: the model's, asked from the server or its model folder)",
    )
    group.add_argument(
        "--page-size",
        type=positive_int,
        metavar="N",
        help="count theoretical hits in whole pages of N tokens (default: the server's page size, or 256 where "
        "it does not say)",
    )
    group.add_argument(
        "--copies",
        type=positive_int,
        default=1,
        metavar="N",
        help="replay every conversation N times, each time with tokens of its own (default 1)",
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=positive_int,
        default=1,
        metavar="N",
        help="conversations at once, so at most N requests at once per server (default 1; with more, tier "
        "counters are known in total only)",
    )
    group.add_argument(
        "--think-time-scale",
        type=factor,
        default=0.0,
        metavar="F",
        help="wait F times the trace's pauses (default 0: none)",
    )
    group.add_argument(
        "--duration",
        type=positive_float,
        metavar="S",
        help="send no turn more than S seconds after the start; those in flight are still answered, those not "
        "sent are counted (default: until all are sent; add work with --copies)",
    )
    group.add_argument(
        "--retries",
        type=count,
        default=0,
        metavar="N",
        help="send a turn up to N times again after a time-out, a lost connection, an error in the stream, or "
        "HTTP 408, 409, 429 or 5xx; every one is counted in the report (default 0)",
    )
    group.add_argument(
        "--interleave",
        choices=("alternate", "together"),
        default="alternate",
        help="with --compare. alternate: a turn goes to one server after the other, and another one is first "
        "each time, so servers that share a machine do not slow each other down. together: to all at once, for "
        "servers with machines of their own; each then sees the full --concurrency (default alternate)",
    )
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache first")
    group.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep every finished turn in FILE; when FILE exists, take the run up where it stopped: answered "
        "turns are not sent again. Use the same arguments both times",
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--logprobs",
        action="store_true",
        help="record the log-probability of every output token, with all its bits",
    )
    group.add_argument(
        "--json",
        type=Path,
        metavar="OUT",
        help="write the whole report as JSON ('sglang-dsv4x report --schema' describes it)",
    )
    group.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="write a web page with tables and plots, all in one file (needs matplotlib)",
    )
    group.add_argument(
        "--png", type=Path, metavar="OUT", help="write the plots as one picture (needs matplotlib)"
    )
    group.add_argument(
        "--against",
        type=Path,
        metavar="REPORT",
        help="a JSON report of the same replay: compare tokens and log-probabilities bit for bit (equal bits "
        "need one request at a time and the same chunk size)",
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def endpoint(text: str) -> Endpoint:
    """NAME=URL of --compare."""
    name, separator, url = text.partition("=")
    if not separator or not name or "://" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as off=http://127.0.0.1:30000")
    return Endpoint(name, base_url(url))
