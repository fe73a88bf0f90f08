"""Totals of a run: hits against theory, latencies, speed, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_dsv4x.replay.client import Completion
from sglang_dsv4x.replay.records import Run, TurnRecord


class Percentiles(NamedTuple):
    """Linear-interpolated percentiles and mean of a sample of `samples` values, in its unit."""

    mean: float
    p50: float
    p95: float
    p99: float
    samples: int


class Summary(NamedTuple):
    """Totals over the turns that were answered; failed ones are only counted, and nothing else is left out.

    `retries` counts attempts beyond the first by what made them necessary. `without_usage` counts answered
    turns whose server did not say what it had cached: they are in every total but `cached_tokens`,
    `new_tokens`, both hit rates and `prefill_tokens_per_s`. `inexact_gaps` counts turns whose inter-token
    latencies are those of events with an unknown number of tokens. `recounted` counts turns of which the
    server counted other prompt tokens than were sent.

    Token counts: `new_tokens` were computed (prompt less cached). `hit_rate` and `theoretical_hit_rate` are
    shares of the prompt tokens. `prefill_tokens_per_s` is new tokens over the sum of times to first token and
    `decode_tokens_per_s` output tokens over the sum of gaps, both per request; `output_tokens_per_s` is over
    wall time. None where nothing was measured.
    """

    turns: int
    failures: dict[str, int]
    retries: dict[str, int]
    not_sent: int
    without_usage: int
    inexact_gaps: int
    recounted: int
    prompt_tokens: int
    cached_tokens: int | None
    theoretical_cached_tokens: int
    new_tokens: int | None
    output_tokens: int
    hit_rate: float | None
    theoretical_hit_rate: float | None
    ttft_s: Percentiles | None
    gap_s: Percentiles | None
    latency_s: Percentiles | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    output_tokens_per_s: float | None
    miss_share: float | None
    prefill_host_share: float | None

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def summarise(run: Run) -> Summary:
    """Totals of a run. `miss_share` is the share of the C4 entries that decode selected which were not in the
    hot cache, `prefill_host_share` the share of the rows that prefill read which came from host memory."""
    answered = [(r, r.completion) for r in run.records if r.completion is not None]
    known = [(r, c, c.cached_tokens) for r, c in answered if c.cached_tokens is not None]
    cached = sum(tokens for _, _, tokens in known)
    known_prompt = sum(prompt_tokens(r, c) for r, c, _ in known)
    output = sum(c.output_tokens for _, c in answered)
    gaps = [gap for _, c in answered for gap in c.gaps_s]
    return Summary(
        turns=len(answered),
        failures=dict(Counter(r.error_kind for r in run.records if r.error_kind is not None)),
        retries=dict(Counter(kind for r in run.records for kind in r.retried)),
        not_sent=run.not_sent,
        without_usage=len(answered) - len(known),
        inexact_gaps=sum(not c.gaps_exact for _, c in answered),
        recounted=sum(prompt_tokens(r, c) != r.prompt_tokens for r, c in answered),
        prompt_tokens=sum(prompt_tokens(r, c) for r, c in answered),
        cached_tokens=cached if known else None,
        theoretical_cached_tokens=sum(r.theoretical_cached for r, _ in answered),
        new_tokens=known_prompt - cached if known else None,
        output_tokens=output,
        hit_rate=_ratio(cached, known_prompt),
        theoretical_hit_rate=_theoretical_hit_rate([r for r, _, _ in known] or [r for r, _ in answered]),
        ttft_s=percentiles([c.ttft_s for _, c in answered]),
        gap_s=percentiles(gaps),
        latency_s=percentiles([c.latency_s for _, c in answered]),
        prefill_tokens_per_s=_ratio(known_prompt - cached, sum(c.ttft_s for _, c, _ in known)),
        decode_tokens_per_s=_ratio(sum(decoded_tokens(c) for _, c in answered), sum(gaps)),
        output_tokens_per_s=_ratio(output, run.wall_s),
        miss_share=miss_share(run.tier),
        prefill_host_share=prefill_host_share(run.tier),
    )


def _theoretical_hit_rate(records: Sequence[TurnRecord]) -> float | None:
    """In tokens as sent, which is what the theory counts, whatever the server counts."""
    return _ratio(sum(r.theoretical_cached for r in records), sum(r.prompt_tokens for r in records))


def prompt_tokens(record: TurnRecord, completion: Completion) -> int:
    """Length of a prompt as the server counted it, or as it was sent where it did not say."""
    return record.prompt_tokens if completion.prompt_tokens is None else completion.prompt_tokens


def percentiles(sample: Sequence[float]) -> Percentiles | None:
    """None for an empty sample."""
    if not sample:
        return None
    p50, p95, p99 = np.percentile(np.asarray(sample, np.float64), (50, 95, 99))
    return Percentiles(float(np.mean(sample)), float(p50), float(p95), float(p99), len(sample))


def mean_gap(completion: Completion) -> float | None:
    """Mean inter-token latency of one answer in seconds; None for a single token."""
    return _ratio(sum(completion.gaps_s), decoded_tokens(completion))


def decoded_tokens(completion: Completion) -> int:
    """Output tokens that the gaps stand for: those after the first event."""
    return len(completion.gaps_s) if completion.gaps_exact else max(completion.output_tokens - 1, 0)


def miss_share(tier: dict[str, int] | None) -> float | None:
    """Share of the entries selected by decode that missed the hot cache; None without a tier.

    Entries already on their way (`pending`) are misses: whoever selects one waits for it.
    """
    if tier is None or "selected" not in tier or "hits" not in tier:
        return None
    return _ratio(tier["selected"] - tier["hits"], tier["selected"])


def prefill_host_share(tier: dict[str, int] | None) -> float | None:
    """Rows that prefill read from host memory, as a share of those it read; None without a tier."""
    if tier is None or "prefill_host" not in tier or "prefill_hot" not in tier:
        return None
    return _ratio(tier["prefill_host"], tier["prefill_host"] + tier["prefill_hot"])


def warm_turns(records: Sequence[TurnRecord]) -> int:
    """Turns of which the server had cached more than this run can have put there: it was warm before."""
    return sum(
        1
        for r in records
        if r.completion
        and prompt_tokens(r, r.completion) == r.prompt_tokens
        and (r.completion.cached_tokens or 0) > r.theoretical_cached
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
