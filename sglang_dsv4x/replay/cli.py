"""`sglang-dsv4x replay TRACE... (--base-url URL | --launch ARGS)`: what it prints and its exit codes."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_dsv4x.launch import LaunchError, Server
from sglang_dsv4x.replay import compare, report, table
from sglang_dsv4x.replay.arguments import add_arguments
from sglang_dsv4x.replay.client import RequestError, Sampling
from sglang_dsv4x.replay.formats import TraceError, load_trace, trace_path
from sglang_dsv4x.replay.interrupt import exit_code, run_until_signal, sigterm_interrupts
from sglang_dsv4x.replay.progress import Progress
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import PlanError, Settings, State, replay
from sglang_dsv4x.replay.tokens import VocabularyError

__all__ = ["add_arguments", "run"]


class UsageError(Exception):
    """An argument cannot be used; the message names it."""


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. The table goes to stdout, everything else to stderr."""
    try:
        conversations = [c for name in args.traces for c in load_trace(trace_path(name), args.format)]
        other = None if args.compare is None else compare.outputs_in(report.read_json(args.compare))
        check_writable("--json", args.json)
        argv = None if args.launch is None else server_arguments(args.launch)
    except (TraceError, UsageError) as error:
        return _complain(error, 2)
    state, progress = State(), Progress(enabled=not args.no_progress)
    try:
        with sigterm_interrupts(), _server(args, argv) as server:
            url = args.base_url if server is None else server.base_url
            gone = (lambda: None) if server is None else server.ended
            work = replay(url, conversations, settings_of(args), state, progress, gone)
            signalled = run_until_signal(work)
            progress.close()
    except KeyboardInterrupt as error:
        return _complain("interrupted before the first turn", exit_code(error))
    except (PlanError, VocabularyError) as error:
        return _complain(error, 2)
    except (LaunchError, RequestError) as error:
        return _complain(error, 1)
    finally:
        progress.close()
    if state.run is None:
        return _complain("interrupted before the first turn", 128 + (signalled or 0))
    if signalled is not None:
        state.run.partial = "interrupted"
    code = _show(state.run, args.json, other)
    return code if signalled is None else 128 + signalled


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the arguments ask for."""
    return Settings(
        scale=args.scale,
        max_turns=args.max_turns,
        output_tokens=args.output_tokens,
        copies=args.copies,
        seed=args.seed,
        vocab_size=args.vocab_size,
        sampling=Sampling(ignore_eos=args.ignore_eos, logprobs=args.logprobs),
        pace=Pace(args.concurrency, args.think_time_scale),
        timeout_s=args.timeout,
        flush_cache=args.flush_cache,
    )


def server_arguments(words: list[str]) -> list[str]:
    """What follows --launch, as arguments: the words themselves, or one quoted string split as a shell would.

    Raises UsageError for a string with an open quote.
    """
    if len(words) != 1:
        return words
    try:
        return shlex.split(words[0])
    except ValueError as error:
        raise UsageError(f"--launch: {error}") from error


def check_writable(flag: str, path: Path | None) -> None:
    """Raises UsageError when a file cannot be made there: a report that cannot be written is a run lost."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"{flag} {path}: not a file in an existing folder")


def compare_text(result: compare.Comparison) -> str:
    """A comparison as one or two lines."""
    logprobs = "no log-probabilities compared"
    if result.logprobs:
        logprobs = (
            f"{result.equal_logprobs} of {result.logprobs} log-probabilities bit-equal "
            f"(largest difference {result.largest_difference:g})"
        )
    text = (
        f"compared: {result.equal_turns} of {result.turns} turns equal, "
        f"{result.equal_tokens} of {result.tokens} tokens equal, {logprobs}"
    )
    return text if result.first_difference is None else f"{text}\nfirst difference: {result.first_difference}"


def _show(done: Run, path: Path | None, other: dict[compare.TurnKey, compare.Output | None] | None) -> int:
    print(table.render(done))
    code = 1 if done.partial is not None or any(r.error is not None for r in done.records) else 0
    if path is not None:
        try:
            report.write_json(done, sys.argv, path)
        except OSError as error:
            code = _complain(f"--json {path}: cannot be written: {error.strerror or error}", 1)
    if other is not None:
        result = compare.compare(compare.outputs_of(done), other)
        print(compare_text(result))
        code = code if result.identical else 1
    return code


@contextlib.contextmanager
def _server(args: argparse.Namespace, argv: list[str] | None) -> Iterator[Server | None]:
    """The launched server, gone afterwards; None when a running one is used."""
    if argv is None:
        yield None
        return
    log = args.launch_log or Path(tempfile.mkdtemp(prefix="sglang-dsv4x-")) / "server.log"
    server = Server(argv, log)
    print(f"starting a server on port {server.port}, log: {log}", file=sys.stderr)
    try:
        server.start(args.launch_timeout)
        yield server
    finally:
        server.stop()


def _complain(error: object, code: int) -> int:
    print(f"sglang-dsv4x replay: {error}", file=sys.stderr)
    return code
