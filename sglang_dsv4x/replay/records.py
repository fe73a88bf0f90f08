"""What a run leaves behind: one record per turn and its circumstances. Reports are made from these alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dsv4x.replay.client import Completion


class TurnRecord(NamedTuple):
    """One turn that was sent. Exactly one of `completion` and `error` is set.

    Token counts are of this request; `started_s` is seconds since the run began; `waited_s` is the pause that
    was honoured before it; `prompt_digest` identifies the token ids; `tier` holds the growth of the tier's
    counters during the turn, or None (no tier, or more than one request at a time). `error_kind` is
    RequestError's.
    """

    conversation: str
    agent: str
    number: int
    kind: str
    prompt_tokens: int
    prompt_digest: str
    theoretical_cached: int
    requested_output: int
    waited_s: float
    started_s: float
    completion: Completion | None
    error_kind: str | None
    error: str | None
    tier: dict[str, int] | None


@dataclass
class Run:
    """A replay, complete or cut short. The runner fills it while it goes, so that an interrupt loses nothing.

    `planned_turns` counts all turns of the plan; `partial` says why the run ended early, None when it did
    not; `tier` is the growth of the tier's counters over the whole run; `wall_s` its length in seconds.
    """

    planned_turns: int
    concurrency: int
    page_size: int
    settings: dict[str, Any]
    server: dict[str, Any]
    records: list[TurnRecord] = field(default_factory=list)
    tier: dict[str, int] | None = None
    wall_s: float = 0.0
    partial: str | None = None
