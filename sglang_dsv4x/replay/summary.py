"""Totals of a run: hits against theory, latencies, speed, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_dsv4x.replay.client import Completion
from sglang_dsv4x.replay.records import Run, TurnRecord


class Percentiles(NamedTuple):
    """Linear-interpolated percentiles and mean of a sample, in its unit."""

    mean: float
    p50: float
    p95: float
    p99: float


class Summary(NamedTuple):
    """Totals over the turns that were answered; failed ones are only counted.

    Token counts: `new_tokens` were computed (prompt less cached). `hit_rate` and `theoretical_hit_rate` are
    shares of the prompt tokens. `prefill_tokens_per_s` is new tokens over the sum of times to first token and
    `decode_tokens_per_s` output tokens over the sum of gaps, both per request; `output_tokens_per_s` is over
    wall time. None where nothing was measured.
    """

    turns: int
    failures: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    theoretical_cached_tokens: int
    new_tokens: int
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


def summarise(run: Run) -> Summary:
    """Totals of a run. `miss_share` is the share of the C4 entries that decode selected which were not in the
    hot cache, `prefill_host_share` the share of the rows that prefill read which came from host memory."""
    answered = [(r, r.completion) for r in run.records if r.completion is not None]
    prompt = sum(r.prompt_tokens for r, _ in answered)
    cached = sum(c.cached_tokens for _, c in answered)
    theoretical = sum(r.theoretical_cached for r, _ in answered)
    output = sum(len(c.output_ids) for _, c in answered)
    ttft = [c.ttft_s for _, c in answered]
    gaps = [gap for _, c in answered for gap in c.gaps_s]
    return Summary(
        turns=len(answered),
        failures=dict(Counter(r.error_kind for r in run.records if r.error_kind is not None)),
        prompt_tokens=prompt,
        cached_tokens=cached,
        theoretical_cached_tokens=theoretical,
        new_tokens=prompt - cached,
        output_tokens=output,
        hit_rate=_ratio(cached, prompt),
        theoretical_hit_rate=_ratio(theoretical, prompt),
        ttft_s=percentiles(ttft),
        gap_s=percentiles(gaps),
        latency_s=percentiles([c.latency_s for _, c in answered]),
        prefill_tokens_per_s=_ratio(prompt - cached, sum(ttft)),
        decode_tokens_per_s=_ratio(len(gaps), sum(gaps)),
        output_tokens_per_s=_ratio(output, run.wall_s),
        miss_share=miss_share(run.tier),
        prefill_host_share=prefill_host_share(run.tier),
    )


def percentiles(sample: Sequence[float]) -> Percentiles | None:
    """None for an empty sample."""
    if not sample:
        return None
    p50, p95, p99 = np.percentile(np.asarray(sample, np.float64), (50, 95, 99))
    return Percentiles(float(np.mean(sample)), float(p50), float(p95), float(p99))


def mean_gap(completion: Completion) -> float | None:
    """Mean inter-token latency of one answer in seconds; None for a single token."""
    return _ratio(sum(completion.gaps_s), len(completion.gaps_s))


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
    return sum(1 for r in records if r.completion and r.completion.cached_tokens > r.theoretical_cached)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
