"""The report that people read: one line per turn, then totals; and several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from sglang_dsv4x.replay import compare
from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.summary import (
    Percentiles,
    Summary,
    mean_gap,
    prompt_tokens,
    summarise,
    warm_turns,
)

# Header -> counter of the tier, for the columns of the turn table.
_TIER_COLUMNS = {"selected": "selected", "hits": "hits", "misses": "misses", "B to dev": "bytes_to_device"}
_HEADER = ("turn", "agent", "prompt", "cached", "theory", "new", "out", "TTFT ms", "ITL ms", *_TIER_COLUMNS)
# More turns than this make no readable table: they are in the JSON report and the page.
_MOST_ROWS = 200
_MOST_FAILURES = 20


def render(run: Run) -> str:
    """The whole report of one run as text, several lines, no colour. '-' stands for what was not measured."""
    lines: list[str] = []
    shown = run.records if len(run.records) <= _MOST_ROWS else []
    for conversation in dict.fromkeys(r.conversation for r in shown):
        rows = [_row(r) for r in shown if r.conversation == conversation]
        lines += [f"{conversation}", *aligned([_HEADER, *rows]), ""]
    failures = [r for r in run.records if r.error is not None]
    for record in failures[:_MOST_FAILURES]:
        where = f"{record.conversation} turn {record.number}"
        lines.append(f"failed: {where}: {record.error_kind}: {record.error}")
    if len(failures) > _MOST_FAILURES:
        lines.append(f"failed: {len(failures) - _MOST_FAILURES:,} more turns, in the JSON report")
    return "\n".join([*lines, *_totals(run, summarise(run)), *notes(run)])


def render_runs(runs: Sequence[Run]) -> str:
    """One run as `render`; of several, their totals side by side, what differs and each one's notes."""
    if len(runs) == 1:
        return render(runs[0])
    lines = aligned(side_by_side(runs))
    for run in runs:
        failures = [r for r in run.records if r.error is not None]
        for record in failures[:_MOST_FAILURES]:
            where = f"{record.conversation} turn {record.number}"
            lines.append(f"failed: {run.name}: {where}: {record.error_kind}: {record.error}")
        lines += [f"{run.name}: {note}" for note in notes(run)]
    for first, second in combinations(runs, 2):
        result = compare.compare(compare.outputs_of(first), compare.outputs_of(second))
        lines += ["", f"{first.name} and {second.name}: {comparison(result)}"]
    return "\n".join(lines)


def side_by_side(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Totals of several runs as rows of a table, a header first; ratios are to the first run."""
    totals = [summarise(run) for run in runs]

    def times(name: str, field: str, part: str) -> tuple[str, ...]:
        values = [getattr(getattr(t, field), part, None) for t in totals]
        return (name, *(f"{_ms(v)}{_relative(v, values[0]) if i else ''}" for i, v in enumerate(values)))

    def speeds(name: str, field: str) -> tuple[str, ...]:
        values = [getattr(t, field) for t in totals]
        return (name, *(f"{_one(v)}{_relative(v, values[0]) if i else ''}" for i, v in enumerate(values)))

    rows = [
        ("", *(run.name for run in runs)),
        (
            "turns answered",
            *(f"{t.turns:,} of {r.planned_turns:,}" for t, r in zip(totals, runs, strict=True)),
        ),
        ("failed", *(counted(t.failures) for t in totals)),
        ("retries", *(counted(t.retries) for t in totals)),
        ("prompt tokens", *(f"{t.prompt_tokens:,}" for t in totals)),
        ("prefix hits", *(percent(t.hit_rate) for t in totals)),
        ("with an infinite cache", *(percent(t.theoretical_hit_rate) for t in totals)),
        *(times(f"TTFT {p}, ms", "ttft_s", p) for p in ("p50", "p95", "p99")),
        *(times(f"inter-token {p}, ms", "gap_s", p) for p in ("p50", "p95", "p99")),
        *(times(f"turn {p}, ms", "latency_s", p) for p in ("p50", "p95", "p99")),
        speeds("prefill, tokens/s a request", "prefill_tokens_per_s"),
        speeds("decode, tokens/s a request", "decode_tokens_per_s"),
        speeds("generated, tokens/s in all", "output_tokens_per_s"),
        ("wall time, s", *(f"{run.wall_s:,.1f}" for run in runs)),
    ]
    if any(run.tier for run in runs):
        tiers = [run.tier or {} for run in runs]
        rows += [
            ("entries decode selected", *(_count(tier.get("selected")) for tier in tiers)),
            ("... of them missed", *(percent(t.miss_share) for t in totals)),
            ("prefill rows from host", *(percent(t.prefill_host_share) for t in totals)),
            ("host to device, MiB", *(_mib(tier.get("bytes_to_device")) for tier in tiers)),
            ("device to host, MiB", *(_mib(tier.get("bytes_to_host")) for tier in tiers)),
        ]
    return rows


def comparison(result: compare.Comparison) -> str:
    """A comparison of outputs as one or two lines."""
    logprobs = "no log-probabilities compared"
    if result.logprobs:
        logprobs = (
            f"{result.equal_logprobs} of {result.logprobs} log-probabilities bit-equal "
            f"(largest difference {result.largest_difference:g})"
        )
    text = (
        f"{result.equal_turns} of {result.turns} turns equal, "
        f"{result.equal_tokens} of {result.tokens} tokens equal, {logprobs}"
    )
    return text if result.first_difference is None else f"{text}\nfirst difference: {result.first_difference}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; the first row is the header. Numbers stand right, names left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numeric = [all(_is_number(row[i]) for row in rows[1:]) for i in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]


def percent(share: float | None) -> str:
    """A share as a percentage, '-' for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second, '-' for None."""
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.1f} tokens/s"


def counted(kinds: dict[str, int]) -> str:
    """'3 (2 http, 1 timeout)', or '0'."""
    if not kinds:
        return "0"
    return f"{sum(kinds.values()):,} ({', '.join(f'{n:,} {kind}' for kind, n in sorted(kinds.items()))})"


def notes(run: Run) -> list[str]:
    """What a reader must know before trusting the numbers."""
    total = summarise(run)
    found = []
    if run.partial is not None:
        found.append(f"PARTIAL: {run.partial} after {len(run.records)} of {run.planned_turns} turns.")
    if run.duration_reached:
        found.append(f"--duration ended the run: {run.not_sent:,} planned turns were not sent.")
    if run.resumed_s:
        times = ", ".join(f"{at:,.0f} s" for at in run.resumed_s)
        found.append(f"Taken up again at {times}: hits after that depend on what the server had kept.")
    if total.failed:
        found.append(
            f"Percentiles and hit rates are over the {total.turns:,} answered turns; {total.failed:,} failed ones "
            "are in none of them."
        )
    if total.retries:
        found.append("Times of a turn that was retried are those of its last attempt.")
    if total.without_usage:
        found.append(
            f"{total.without_usage:,} turns came without the number of cached tokens and are in no hit rate: "
            "start SGLang with --enable-cache-report, vLLM with --enable-prompt-tokens-details."
        )
    if total.inexact_gaps:
        found.append(
            f"{total.inexact_gaps:,} turns came in events of an unknown number of tokens: their inter-token "
            "latencies are times between events."
        )
    if total.recounted:
        found.append(f"The server counted other prompt tokens than were sent in {total.recounted:,} turns.")
    if run.tier is not None and run.concurrency > 1:
        found.append("Tier counters are exact in total only: requests that overlap cannot be told apart.")
    if run.tier is None:
        found.append("The server publishes no tier counters.")
    if warm := warm_turns(run.records):
        found.append(
            f"{warm} turns hit more than this run can have cached: the server was warm (see --flush-cache)."
        )
    return found


def _row(record: TurnRecord) -> tuple[str, ...]:
    done = record.completion
    tier = [_count((record.tier or {}).get(counter)) for counter in _TIER_COLUMNS.values()]
    front = (str(record.number), record.agent, f"{record.prompt_tokens:,}")
    theory = f"{record.theoretical_cached:,}"
    if done is None:
        return (*front, "failed", theory, "-", "-", "-", "-", *tier)
    cached = done.cached_tokens
    return (
        *front,
        _count(cached),
        theory,
        _count(None if cached is None else prompt_tokens(record, done) - cached),
        f"{done.output_tokens:,}",
        _ms(done.ttft_s),
        _ms(mean_gap(done)),
        *tier,
    )


def _totals(run: Run, total: Summary) -> list[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(total.failures.items()))
    answered = f"{total.turns} answered, {total.failed} failed{f' ({kinds})' if kinds else ''}"
    if total.retries:
        answered += f", {counted(total.retries)} retries"
    rows = [
        ("total", ""),
        ("turns", f"{answered}, of {run.planned_turns} planned"),
        (
            "prompt tokens",
            f"{total.prompt_tokens:,}: {_count(total.cached_tokens)} cached, {_count(total.new_tokens)} computed; "
            f"{total.output_tokens:,} generated",
        ),
        (
            "prefix hits",
            f"{percent(total.hit_rate)} of prompt tokens; "
            f"{percent(total.theoretical_hit_rate)} with an infinite cache",
        ),
        ("TTFT", _spread(total.ttft_s, "turns")),
        ("inter-token", _spread(total.gap_s, "gaps")),
        ("turn", _spread(total.latency_s, "turns")),
        (
            "speed",
            f"prefill {rate(total.prefill_tokens_per_s)}, "
            f"decode {rate(total.decode_tokens_per_s)} per request; "
            f"{rate(total.output_tokens_per_s)} generated over {run.wall_s:.1f} s",
        ),
    ]
    for name, value in (run.tier or {}).items():
        rows.append((f"tier {name}", f"{value:,}"))
    if total.miss_share is not None:
        rows.append(("tier misses", f"{percent(total.miss_share)} of the entries that decode selected"))
    if total.prefill_host_share is not None:
        rows.append(
            ("tier prefill", f"{percent(total.prefill_host_share)} of the rows read came from host memory")
        )
    return aligned(rows)


def _spread(times: Percentiles | None, what: str) -> str:
    if times is None:
        return "-"
    return (
        f"p50 {_ms(times.p50)}, p95 {_ms(times.p95)}, p99 {_ms(times.p99)}, mean {_ms(times.mean)} ms "
        f"(over {times.samples:,} {what})"
    )


def _relative(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"  x{value / base:.2f}"


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _is_number(cell: str) -> bool:
    return cell in ("-", "failed", "") or cell.replace(",", "").replace(".", "", 1).isdigit()
