"""`sglang-dsv4x verify --base-url URL`: what it prints and its exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_dsv4x.replay.client import Connection, RequestError
from sglang_dsv4x.replay.connection_arguments import (
    ConnectionArgumentError,
    add_connection_arguments,
    base_url,
    connection_of,
    positive_int,
)
from sglang_dsv4x.replay.http import Http
from sglang_dsv4x.replay.interrupt import run_until_signal
from sglang_dsv4x.replay.tokens import VocabularyError
from sglang_dsv4x.verify.checks import Finding, Findings, verify
from sglang_dsv4x.verify.probe import make_probe

SCHEMA = 1
DESCRIPTION = """\
Ask a running SGLang server about thirty short questions and say whether its prefix cache works.

  spread    how far answers to one prompt differ by themselves: measured first, and the limit below
  outputs   a prompt that hits the cache is answered as it is without a hit, within that spread
  repeat    a prompt sent again hits floor(length - 1, page) tokens
  fork      children of one history hit all of it, one by one and at once
  resume    a session hits its own prompts and answers, also when other sessions ran meanwhile
  tier      with sglang_dsv4x's tier on: bytes moved, and the counters add up (skipped elsewhere)

On a stock server, a prefix that is lost since its window (SWA) pages were evicted is a note, no failure. Every
request has a cache of its own (SGLang's extra_key), so that nothing of other users is hit or flushed; other
traffic may still evict what these checks rely on.

Exit code: 0 all checks passed, were skipped or are notes; 1 one failed, or the server cannot be asked; 2 wrong
arguments; 130 interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds everything that the command reads."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--base-url",
        type=base_url,
        required=True,
        metavar="URL",
        help="the server, such as http://127.0.0.1:30000",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the prompts (default 0)")
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        metavar="N",
        help="draw token ids below N (default: the model's, asked from the server or its model folder)",
    )
    parser.add_argument(
        "--longest-prompt",
        type=positive_int,
        default=16384,
        metavar="N",
        help="the tier is made to fetch with a prompt that its hot cache cannot hold, of at most N tokens "
        "(default %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the findings as JSON")
    add_connection_arguments(parser.add_argument_group("connection"))


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Findings go to stdout as they are made."""
    try:
        connection = connection_of(args)
    except ConnectionArgumentError as error:
        return _complain(error, 2)
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        return _complain(f"--json {args.json}: not a file in an existing folder", 2)
    done: list[tuple[Findings, dict[str, Any]]] = []

    async def work() -> None:
        done.append(await _verify(args, connection))

    try:
        signalled = run_until_signal(work())
    except RequestError as error:
        return _complain(f"{args.base_url}: {error}", 1)
    except VocabularyError as error:
        return _complain(error, 2)
    if signalled is not None:
        return _complain("interrupted", 128 + signalled)
    findings, server = done[0]
    counts = {s: sum(f.status == s for f in findings.found) for s in ("pass", "fail", "note", "skip")}
    words = ", ".join(f"{n} {word}" for word, n in zip(_PLURALS, counts.values(), strict=True) if n)
    print(f"\n{'FAILED' if findings.failed else 'OK'}: {words}")
    if args.json is not None:
        report = {
            "kind": "sglang-dsv4x verify",
            "schema": SCHEMA,
            "base_url": args.base_url,
            "server": server,
            "spread": findings.spread,
            "failed": findings.failed,
            "findings": [asdict(finding) for finding in findings.found],
        }
        try:
            args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        except OSError as error:
            return _complain(f"--json {args.json}: cannot be written: {error.strerror or error}", 1)
    return 1 if findings.failed else 0


_PLURALS = ("passed", "failed", "not as expected but no failure here", "skipped")


async def _verify(args: argparse.Namespace, connection: Connection) -> tuple[Findings, dict[str, Any]]:
    async with Http(args.base_url, connection) as http:
        probe = await make_probe(http, args.vocab_size, args.seed)
        kind = "stock SGLang" if probe.extension is None else "SGLang with sglang_dsv4x"
        print(
            f"{kind} {probe.facts.reported.get('version', '')} at {http.root}, page {probe.page}", flush=True
        )
        findings = await verify(probe, args.longest_prompt, _tell)
        return findings, probe.facts.reported


def _tell(finding: Finding) -> None:
    line = f"{finding.status.upper():4}  {finding.check}: "
    if finding.status == "skip":
        print(line + finding.found, flush=True)
        return
    print(f"{line}{finding.expected}; {finding.found}", flush=True)
    if finding.cause:
        print(f"      likely cause: {finding.cause}", flush=True)


def _complain(error: object, code: int) -> int:
    print(f"sglang-dsv4x verify: {error}", file=sys.stderr)
    return code
