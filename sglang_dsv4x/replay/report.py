"""The report that programs read: everything of a run as one JSON object, floats with all their bits."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from sglang_dsv4x.replay.formats.fields import Fields, TraceError, parse_object
from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.summary import summarise

SCHEMA = 1
KIND = "sglang-dsv4x replay"


def as_json(run: Run, command: list[str]) -> dict[str, Any]:
    """The report as a JSON object; `command` is the command line that made it.

    Python prints the shortest decimal that reads back as the same double, so log-probabilities survive bit
    for bit.
    """
    summary = {k: v._asdict() if hasattr(v, "_asdict") else v for k, v in summarise(run)._asdict().items()}
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "command": command,
        "commit": source_commit(),
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "server": run.server,
        "settings": run.settings,
        "page_size": run.page_size,
        "concurrency": run.concurrency,
        "planned_turns": run.planned_turns,
        "partial": run.partial,
        "wall_s": run.wall_s,
        "totals": {**summary, "tier": run.tier},
        "turns": [_turn(record) for record in run.records],
    }


def write_json(run: Run, command: list[str], path: Path) -> None:
    """Writes a new file beside `path` and renames it, so that no reader sees half a report."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(as_json(run, command), indent=1) + "\n", "utf-8")
    os.replace(part, path)


def read_json(path: Path) -> Fields:
    """A report written by `write_json`. Raises TraceError naming the file and field when it is not one."""
    try:
        report = parse_object(path.read_bytes().decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if report.text("kind") != KIND:
        raise report.error("kind", f"must be {KIND!r}")
    if report.count("schema") != SCHEMA:
        raise report.error("schema", f"is {report.count('schema')}; this version reads {SCHEMA}")
    return report


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


def _turn(record: TurnRecord) -> dict[str, Any]:
    done = record.completion
    row = {k: v for k, v in record._asdict().items() if k != "completion"}
    if done is not None:
        row["cached_tokens"] = done.cached_tokens
        row["new_tokens"] = record.prompt_tokens - done.cached_tokens
        row["finish_reason"] = done.finish_reason
        row["ttft_s"] = done.ttft_s
        row["latency_s"] = done.latency_s
        row["gaps_s"] = list(done.gaps_s)
        row["output_ids"] = list(done.output_ids)
        row["logprobs"] = None if done.logprobs is None else list(done.logprobs)
    return row
