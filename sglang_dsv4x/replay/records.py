"""What a run leaves behind: one record per turn and its circumstances. Reports are made from these alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dsv4x.replay.client import Completion


class TurnRecord(NamedTuple):
    """One turn that was sent. Exactly one of `completion` and `error` is set.

    Token counts are of this request; `started_s` is when its last attempt was sent, in seconds since the run
    began; `waited_s` is the pause that was honoured before it; `prompt_digest` identifies the token ids;
    `tier` holds the growth of the tier's counters during the turn, or None (no tier, or more than one request
    at a time). `error_kind` is RequestError's. `retried` holds the error kinds of the attempts before the
    last, in order; `completion` is timed from the last attempt alone.
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
    retried: tuple[str, ...] = ()

    @property
    def ended_s(self) -> float:
        """When its answer was complete; of a failed turn only the start is known."""
        return self.started_s + (self.completion.latency_s if self.completion else 0.0)


class TierSample(NamedTuple):
    """Growth of the tier's counters since the run began, `at_s` seconds into it."""

    at_s: float
    counters: dict[str, int]


@dataclass
class Run:
    """A replay against one server, complete or cut short. The runner fills it while it goes, so that an
    interrupt loses nothing.

    `planned_turns` counts all turns of the plan; `partial` says why the run ended early, None when it did
    not; `duration_reached`: the time that the user gave was over first, which is no failure. `tier` is the
    growth of the tier's counters over the whole run, `tier_samples` its course; `wall_s` the run's length in
    seconds; `resumed_s` the times at which it was taken up again after an interruption.
    """

    planned_turns: int
    concurrency: int
    page_size: int
    settings: dict[str, Any]
    server: dict[str, Any]
    name: str = "server"
    base_url: str = ""
    records: list[TurnRecord] = field(default_factory=list)
    tier: dict[str, int] | None = None
    tier_samples: list[TierSample] = field(default_factory=list)
    wall_s: float = 0.0
    partial: str | None = None
    duration_reached: bool = False
    resumed_s: list[float] = field(default_factory=list)

    def fill_in_unreported_hits(self) -> None:
        """Sets the hits of turns to 0 whose usage lacks them, if the server reports those of other turns.

        SGLang and vLLM leave the number out of OpenAI's usage where it is 0, and always where reporting is off.
        """
        if all(r.completion is None or r.completion.cached_tokens is None for r in self.records):
            return
        for i, record in enumerate(self.records):
            done = record.completion
            if done is not None and done.cached_tokens is None and done.prompt_tokens is not None:
                self.records[i] = record._replace(completion=done._replace(cached_tokens=0))

    @property
    def not_sent(self) -> int:
        """Planned turns that were never sent."""
        return max(0, self.planned_turns - len(self.records))
