"""`sglang-dsv4x report A.json [B.json ...]`: reports of replays, read again and held against each other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_dsv4x.replay import report, table
from sglang_dsv4x.replay.pictures import PicturesError, check_pictures, write_pictures
from sglang_dsv4x.replay.records import Run

DESCRIPTION = """\
Show reports that 'sglang-dsv4x replay --json' wrote: one as the table that the run printed, several side by
side, with what differs between their outputs.

Ratios are to the first run. Each run is called by the name it was given with --compare, or by its file.

Exit code: 0; 1 a file cannot be written; 2 wrong arguments or not a report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds everything that the command reads."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT", help="JSON report of a replay")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="write a web page with tables and plots, all in one file (needs matplotlib)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="OUT", help="write the plots as one picture (needs matplotlib)"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of a report, with every field described"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if args.schema:
        print(json.dumps(report.json_schema(), indent=1))
        return 0
    if not args.reports:
        return _complain("give at least one REPORT, or --schema", 2)
    try:
        if args.html is not None or args.png is not None:
            check_pictures()
        runs = named([(path, report.read_json(path)) for path in args.reports])
    except (report.ReportError, PicturesError) as error:
        return _complain(error, 2)
    print(table.render_runs(runs))
    try:
        write_pictures(runs, args.html, args.png)
    except OSError as error:
        return _complain(f"{error.filename}: cannot be written: {error.strerror or error}", 1)
    return 0


def named(files: Sequence[tuple[Path, Sequence[Run]]]) -> list[Run]:
    """The runs of several files with names that tell them apart: the run's own, the file's, or both."""
    found: list[Run] = []
    for path, runs in files:
        for each in runs:
            name = path.stem if len(runs) == 1 and len(files) > 1 else each.name
            if len(runs) > 1 and len(files) > 1:
                name = f"{path.stem}/{each.name}"
            taken = [other.name for other in found]
            if name in taken:
                name = next(f"{name}#{i}" for i in range(2, len(found) + 3) if f"{name}#{i}" not in taken)
            found.append(replace(each, name=name))
    return found


def _complain(error: object, code: int) -> int:
    print(f"sglang-dsv4x report: {error}", file=sys.stderr)
    return code
