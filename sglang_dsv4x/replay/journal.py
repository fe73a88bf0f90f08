"""A long run's memory: every finished turn as a line of JSON, so that the run can be taken up again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_dsv4x.replay.document import TurnRow
from sglang_dsv4x.replay.records import Run, TurnRecord

KIND = "sglang-dsv4x replay journal"
SCHEMA = 1

TurnKey = tuple[str, tuple[str, int]]


class JournalError(ValueError):
    """The journal cannot be used; the message names the file and the remedy."""


@dataclass
class Past:
    """What a run had done before: keys are (run name, (conversation, turn number)), times in seconds.

    `failed` holds the error kinds of every attempt of the turns that are still to be answered.
    """

    reached_s: float = 0.0
    answered: set[TurnKey] = field(default_factory=set)
    failed: dict[TurnKey, tuple[str, ...]] = field(default_factory=dict)


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    run: str
    at_s: float
    turn: TurnRow
    tier: dict[str, int] | None = None


class Journal:
    """One file. The first line says what is replayed; then comes a line per finished turn.

    A turn that failed is sent again by the resumed run, and counts as one of its retries.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def open(self, plan: dict[str, Any], runs: Sequence[Run]) -> Past:
        """Puts the answered turns that the file holds into their `runs` and opens it for more; makes it when
        missing.

        `plan` identifies what is replayed. Raises JournalError when the file holds another plan or is no
        journal.
        """
        lines, whole = self._read()
        if not lines:
            self._file = self._opened("w")
            self._write({"kind": KIND, "schema": SCHEMA, "plan": plan})
            return Past()
        self._check_head(lines[0], plan)
        by_name = {run.name: run for run in runs}
        past = Past()
        for number, value in enumerate(lines[1:], 2):
            try:
                line = _Line.model_validate(value)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                raise JournalError(f"{self.path}: line {number}: {where}: {first['msg']}") from error
            key = (line.run, (line.turn.conversation, line.turn.number))
            run = by_name.get(line.run)
            if run is None or key in past.answered:
                raise JournalError(f"{self.path}: line {number}: {key} is there twice or of no server here")
            record = line.turn.record()
            if record.error_kind is None:
                past.answered.add(key)
                run.records.append(record)
            else:
                past.failed[key] = (*record.retried, record.error_kind)
            run.tier = line.tier or run.tier
            past.reached_s = max(past.reached_s, line.at_s)
        # A line cut short by a crash goes, so that the next one starts on its own.
        self._file = self._opened("r+")
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        for run in runs:
            run.resumed_s.append(past.reached_s)
        return past

    def add(self, run: Run, record: TurnRecord, at_s: float) -> None:
        """Keeps a finished turn, `at_s` seconds into the run."""
        row = TurnRow.of(record).model_dump()
        self._write({"run": run.name, "at_s": at_s, "turn": row, "tier": run.tier})

    def _check_head(self, head: Any, plan: dict[str, Any]) -> None:
        if not isinstance(head, dict) or head.get("kind") != KIND or head.get("schema") != SCHEMA:
            raise JournalError(f"{self.path}: is no journal of this version; give --resume another file")
        before = head.get("plan")
        before = before if isinstance(before, dict) else {}
        now = json.loads(json.dumps(plan))
        changed = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
        if changed:
            shown = ", ".join(f"{k}: {before.get(k)!r} then, {now.get(k)!r} now" for k in changed[:4])
            raise JournalError(
                f"{self.path}: was made for another replay ({shown}). Use the same arguments to go on with "
                "it, or give --resume another file."
            )

    def _read(self) -> tuple[list[Any], int]:
        """The lines that are complete and their length in bytes."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        whole = content.rfind(b"\n") + 1
        lines = []
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise JournalError(f"{self.path}: line {number}: not JSON: {error}") from error
        return lines, whole

    def _opened(self, mode: str) -> IO[str]:
        try:
            return self.path.open(mode, encoding="utf-8")
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _write(self, value: dict[str, Any]) -> None:
        assert self._file is not None, "Journal.open must be called before a turn is added"
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        self._file.flush()
