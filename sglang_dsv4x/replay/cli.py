"""`sglang-dsv4x replay TRACE... (--base-url URL | --compare NAME=URL ... | --launch ARGS)`: what it prints and its
exit codes."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_dsv4x.launch import LaunchError, Server
from sglang_dsv4x.replay import compare, dry_run, report, table
from sglang_dsv4x.replay.arguments import add_arguments
from sglang_dsv4x.replay.client import Connection, RequestError, Sampling
from sglang_dsv4x.replay.connection_arguments import ConnectionArgumentError, connection_of
from sglang_dsv4x.replay.formats import TraceError
from sglang_dsv4x.replay.formats.arguments import load_all
from sglang_dsv4x.replay.interrupt import exit_code, run_until_signal, sigterm_interrupts
from sglang_dsv4x.replay.journal import JournalError
from sglang_dsv4x.replay.pictures import PicturesError, check_pictures, write_pictures
from sglang_dsv4x.replay.progress import Progress
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import Endpoint, PlanError, Settings, State, replay
from sglang_dsv4x.replay.tokens import VocabularyError

__all__ = ["add_arguments", "run"]


class UsageError(Exception):
    """An argument cannot be used; the message names it."""


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. The table goes to stdout, everything else to stderr."""
    try:
        if args.dry_run:
            dry_run.check(args)
        conversations = load_all(args)
        other = None if args.against is None else report.read_json(args.against)
        for flag in ("json", "html", "png", "resume"):
            check_writable(f"--{flag}", getattr(args, flag))
        if args.html is not None or args.png is not None:
            check_pictures()
        if args.dry_run:
            return dry_run.run(args, conversations)
        check_names(args.compare)
        argv = None if args.launch is None else server_arguments(args.launch)
        settings = settings_of(args, connection_of(args))
    except (
        TraceError,
        report.ReportError,
        UsageError,
        ConnectionArgumentError,
        PicturesError,
        dry_run.DryRunError,
    ) as error:
        return _complain(error, 2)
    except KeyboardInterrupt as error:
        return _complain("interrupted before the first turn", exit_code(error))
    state, progress = State(), Progress(enabled=not args.no_progress)
    try:
        with sigterm_interrupts(), _server(args, argv) as server:
            url = args.base_url if server is None else server.base_url
            servers = args.compare or [Endpoint("server", str(url))]
            gone = (lambda: None) if server is None else server.ended
            work = replay(servers, conversations, settings, state, progress, gone, args.resume)
            signalled = run_until_signal(work)
            progress.close()
    except KeyboardInterrupt as error:
        return _complain("interrupted before the first turn", exit_code(error))
    except (PlanError, VocabularyError, JournalError) as error:
        return _complain(error, 2)
    except (LaunchError, RequestError) as error:
        return _complain(error, 1)
    finally:
        progress.close()
    if not state.runs:
        return _complain("interrupted before the first turn", 128 + (signalled or 0))
    if signalled is not None:
        for done in state.runs:
            done.partial = "interrupted"
    code = _show(state.runs, args, other)
    return code if signalled is None else 128 + signalled


def settings_of(args: argparse.Namespace, connection: Connection) -> Settings:
    """The settings that the arguments ask for."""
    return Settings(
        scale=args.scale,
        max_turns=args.max_turns,
        output_tokens=args.output_tokens,
        copies=args.copies,
        seed=args.seed,
        vocab_size=args.vocab_size,
        page_size=args.page_size,
        sampling=Sampling(ignore_eos=args.ignore_eos, logprobs=args.logprobs),
        pace=Pace(args.concurrency, args.think_time_scale, args.duration, args.retries, args.interleave),
        timeout_s=args.timeout,
        flush_cache=args.flush_cache,
        api=None if args.api == "auto" else args.api,
        model=args.model,
        openai_strict=args.openai_strict,
        connection=connection,
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


def check_names(servers: Sequence[Endpoint] | None) -> None:
    """Raises UsageError when two servers have one name."""
    names = [server.name for server in servers or ()]
    if len(set(names)) < len(names):
        raise UsageError(f"--compare: the names {', '.join(names)} must differ")


def _show(runs: list[Run], args: argparse.Namespace, other: list[Run] | None) -> int:
    print(table.render_runs(runs))
    bad = any(run.partial is not None or any(r.error is not None for r in run.records) for run in runs)
    code = 1 if bad else 0
    if args.json is not None:
        try:
            report.write_json(runs, sys.argv, args.json)
        except OSError as error:
            code = _complain(f"--json {args.json}: cannot be written: {error.strerror or error}", 1)
    try:
        write_pictures(runs, args.html, args.png)
    except OSError as error:
        code = _complain(f"{error.filename}: cannot be written: {error.strerror or error}", 1)
    for run in runs if other is not None else ():
        result = compare.compare(compare.outputs_of(run), compare.outputs_of(_counterpart(run, other or [])))
        name = f" ({run.name})" if len(runs) > 1 else ""
        print(f"compared{name}: {table.comparison(result)}")
        code = code if result.identical else 1
    return code


def _counterpart(run: Run, others: list[Run]) -> Run:
    """The run of the same name in the other report, or its first."""
    return next((other for other in others if other.name == run.name), others[0])


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
