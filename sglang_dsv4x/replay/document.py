"""The JSON report as typed models: what is written, what is accepted back, and the schema that describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang_dsv4x.replay.client import Completion
from sglang_dsv4x.replay.records import Run, TierSample, TurnRecord
from sglang_dsv4x.replay.summary import prompt_tokens, summarise

SCHEMA: Literal[2] = 2
KIND: Literal["sglang-dsv4x replay"] = "sglang-dsv4x replay"


class _Model(BaseModel):
    # `extra`: a later writer of the same schema version may add fields.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)


class TurnRow(_Model):
    """One turn. Fields from `finish_reason` on are null for a failed turn, `error_kind` and `error` for others."""

    conversation: str = Field(description="name of the conversation; copies end in #2, #3 ...")
    agent: str = Field(description="path of the agent, such as main/agent_001")
    number: int = Field(ge=1, description="turn within the conversation, in running order, from 1")
    kind: str = Field(description="what the turn waited for in the trace")
    prompt_tokens: int = Field(ge=0, description="prompt tokens as sent")
    prompt_digest: str = Field(description="digest of the prompt's token ids")
    theoretical_cached: int = Field(
        ge=0, description="prompt tokens that an infinite prefix cache would serve, in whole pages"
    )
    requested_output: int = Field(ge=0, description="output tokens asked for")
    waited_s: float = Field(ge=0, description="pause honoured before the turn, seconds")
    started_s: float = Field(ge=0, description="when its last attempt was sent, seconds into the run")
    retried: list[str] = Field(default=[], description="error kinds of earlier attempts, in order")
    error_kind: str | None = Field(
        default=None, description="http, timeout, connection, server or protocol for a failed turn"
    )
    error: str | None = Field(default=None, description="message of the failure")
    tier: dict[str, int] | None = Field(
        default=None,
        description="growth of the tier's counters in this turn; null without a tier or with concurrency > 1",
    )
    finish_reason: str | None = None
    server_prompt_tokens: int | None = Field(default=None, description="prompt tokens as the server counted")
    cached_tokens: int | None = Field(
        default=None,
        description="prompt tokens served from the prefix cache; null: the server did not say; 0 also where it left "
        "the number out and gave it for other turns of the run",
    )
    new_tokens: int | None = Field(default=None, description="prompt tokens computed: prompt less cached")
    output_tokens: int | None = None
    ttft_s: float | None = Field(default=None, description="sending to first output token, seconds")
    latency_s: float | None = Field(default=None, description="sending to the end of the stream, seconds")
    gaps_s: list[float] | None = Field(
        default=None,
        description="seconds before each output token after the first event; tokens of one event share its time",
    )
    gaps_exact: bool | None = Field(
        default=None, description="false: gaps are of events whose number of tokens is not known"
    )
    output_ids: list[int] | None = Field(
        default=None, description="output token ids, where the server sends them"
    )
    logprobs: list[float] | None = Field(
        default=None, description="natural log-probability of each output token, all bits of the double"
    )
    text_digest: str | None = Field(
        default=None, description="digest of the output text (OpenAI's interface)"
    )

    @classmethod
    def of(cls, record: TurnRecord) -> TurnRow:
        done = record.completion
        values = {k: v for k, v in record._asdict().items() if k not in ("completion", "retried")}
        row = cls(**values, retried=list(record.retried))
        if done is None:
            return row
        cached, prompt = done.cached_tokens, prompt_tokens(record, done)
        answer = {
            **done._asdict(),
            "server_prompt_tokens": done.prompt_tokens,
            "prompt_tokens": record.prompt_tokens,
            "new_tokens": None if cached is None else prompt - cached,
            "gaps_s": list(done.gaps_s),
            "output_ids": None if done.output_ids is None else list(done.output_ids),
            "logprobs": None if done.logprobs is None else list(done.logprobs),
        }
        return row.model_copy(update=answer)

    def record(self) -> TurnRecord:
        """The record that the row was made of."""
        completion = None
        if self.error is None and self.ttft_s is not None:
            completion = Completion(
                output_ids=None if self.output_ids is None else tuple(self.output_ids),
                logprobs=None if self.logprobs is None else tuple(self.logprobs),
                cached_tokens=self.cached_tokens,
                finish_reason=self.finish_reason or "",
                ttft_s=self.ttft_s,
                gaps_s=tuple(self.gaps_s or ()),
                latency_s=self.latency_s or self.ttft_s,
                output_tokens=self.output_tokens or 0,
                prompt_tokens=self.server_prompt_tokens,
                gaps_exact=self.gaps_exact is not False,
                text_digest=self.text_digest,
            )
        return TurnRecord(
            conversation=self.conversation,
            agent=self.agent,
            number=self.number,
            kind=self.kind,
            prompt_tokens=self.prompt_tokens,
            prompt_digest=self.prompt_digest,
            theoretical_cached=self.theoretical_cached,
            requested_output=self.requested_output,
            waited_s=self.waited_s,
            started_s=self.started_s,
            completion=completion,
            error_kind=None if completion else self.error_kind or "unknown",
            error=None if completion else self.error or "no answer was recorded",
            tier=self.tier,
            retried=tuple(self.retried),
        )


class SampleRow(_Model):
    """The tier's counters at one moment, as growth since the run began."""

    at_s: float = Field(ge=0, description="seconds into the run")
    counters: dict[str, int]


class RunRow(_Model):
    """One server's part of the replay."""

    name: str = Field(description="name given with --compare, or 'server'")
    base_url: str
    server: dict[str, Any] = Field(
        description="what the server says about itself; dsv4x: the tier's settings"
    )
    planned_turns: int = Field(ge=0)
    not_sent: int = Field(default=0, ge=0, description="planned turns that were never sent")
    partial: str | None = Field(description="why the run ended early; null: it did not")
    duration_reached: bool = Field(default=False, description="--duration ended the run, as it should")
    resumed_s: list[float] = Field(default=[], description="when the run was taken up again, seconds into it")
    wall_s: float = Field(ge=0)
    totals: dict[str, Any] = Field(
        description="sums, rates and percentiles over answered turns; every percentile carries its number of samples; "
        "failures, retries, not_sent, without_usage, inexact_gaps and recounted say what is in none or which "
        "numbers are weaker; tier: growth of the tier's counters over the run"
    )
    tier_samples: list[SampleRow] = []
    turns: list[TurnRow]


class Report(_Model):
    """A replay's report. `schema` changes when a field changes its meaning or goes; fields may be added."""

    kind: Literal["sglang-dsv4x replay"] = KIND
    schema_version: Literal[2] = Field(default=SCHEMA, alias="schema")
    command: list[str] = Field(description="command line, secrets replaced by ***")
    commit: str | None = Field(
        description="commit of sglang-dsv4x's source, '+' when changed; null outside git"
    )
    machine: dict[str, Any] = Field(description="the machine of the client")
    settings: dict[str, Any] = Field(description="what decided what was sent and when")
    page_size: int = Field(ge=1, description="prefix-cache granularity of the theoretical hits, tokens")
    concurrency: int = Field(ge=1)
    runs: list[RunRow] = Field(min_length=1, description="one per server")


def run_row(run: Run) -> RunRow:
    """A run as it is written."""
    totals = {k: v._asdict() if hasattr(v, "_asdict") else v for k, v in summarise(run)._asdict().items()}
    return RunRow(
        name=run.name,
        base_url=run.base_url,
        server=run.server,
        planned_turns=run.planned_turns,
        not_sent=run.not_sent,
        partial=run.partial,
        duration_reached=run.duration_reached,
        resumed_s=run.resumed_s,
        wall_s=run.wall_s,
        totals={**totals, "tier": run.tier},
        tier_samples=[SampleRow(**sample._asdict()) for sample in run.tier_samples],
        turns=[TurnRow.of(record) for record in run.records],
    )


def runs_of(report: Report) -> list[Run]:
    """The runs that a report was made of."""
    return [
        Run(
            planned_turns=row.planned_turns,
            concurrency=report.concurrency,
            page_size=report.page_size,
            settings=report.settings,
            server=row.server,
            name=row.name,
            base_url=row.base_url,
            records=[turn.record() for turn in row.turns],
            tier=row.totals.get("tier"),
            tier_samples=[TierSample(s.at_s, s.counters) for s in row.tier_samples],
            wall_s=row.wall_s,
            partial=row.partial,
            duration_reached=row.duration_reached,
            resumed_s=row.resumed_s,
        )
        for row in report.runs
    ]
