"""The report that programs read: everything of a replay as one JSON object, floats with all their bits."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from sglang_dsv4x.replay.document import KIND, SCHEMA, Report, run_row, runs_of
from sglang_dsv4x.replay.records import Run

_SECRET_FLAGS = ("--api-key",)


class ReportError(ValueError):
    """A report cannot be read; the message names the file and the field."""


def as_json(runs: Sequence[Run], command: Sequence[str]) -> dict[str, Any]:
    """The report as a JSON object; `command` is the command line that made it, whose secrets are left out.

    Python prints the shortest decimal that reads back as the same double, so log-probabilities survive bit
    for bit.
    """
    first = runs[0]
    report = Report(
        command=without_secrets(command),
        commit=source_commit(),
        machine={
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        settings=first.settings,
        page_size=first.page_size,
        concurrency=first.concurrency,
        runs=[run_row(run) for run in runs],
    )
    return report.model_dump(by_alias=True)


def write_json(runs: Sequence[Run], command: Sequence[str], path: Path) -> None:
    """Writes a new file beside `path` and renames it, so that no reader sees half a report."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(as_json(runs, command), indent=1) + "\n", "utf-8")
    os.replace(part, path)


def read_json(path: Path) -> list[Run]:
    """The runs of a report written by `write_json`. Raises ReportError naming the file and field otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise ReportError(f"{path}: kind: must be {KIND!r}; this is no report of a replay (replay --json)")
    if value.get("schema") != SCHEMA:
        raise ReportError(f"{path}: schema: is {value.get('schema')!r}; this version reads {SCHEMA}")
    try:
        return runs_of(Report.model_validate(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ReportError(f"{path}: {where}: {first['msg']}") from error


def json_schema() -> dict[str, Any]:
    """JSON Schema of the report, with a description of every field that does not explain itself."""
    return Report.model_json_schema(by_alias=True)


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line with the values of secret flags, and passwords in URLs, replaced by ***."""
    shown: list[str] = []
    for i, word in enumerate(command):
        flag = word.split("=", 1)[0]
        if i and command[i - 1] in _SECRET_FLAGS:
            shown.append("***")
        elif "=" in word and flag in _SECRET_FLAGS:
            shown.append(f"{flag}=***")
        else:
            shown.append(without_password(word))
    return shown


def without_password(word: str) -> str:
    """A word whose URL, if it holds one, has no user and password."""
    name, separator, url = word.rpartition("=") if "=" in word.split("://")[0] else ("", "", word)
    if "://" not in url or "@" not in url:
        return word
    parts = urlsplit(url)
    return name + separator + urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def source_commit() -> str | None:
    """Commit of the source tree, with '+' when it has changes; None outside a git checkout."""
    folder = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(
                ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")
