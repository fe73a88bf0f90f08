"""The report that people read: one line per turn, then totals."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.summary import Percentiles, Summary, mean_gap, summarise, warm_turns

# Header -> counter of the tier, for the columns of the turn table.
_TIER_COLUMNS = {"selected": "selected", "hits": "hits", "misses": "misses", "B to dev": "bytes_to_device"}
_HEADER = ("turn", "agent", "prompt", "cached", "theory", "new", "out", "TTFT ms", "ITL ms", *_TIER_COLUMNS)


def render(run: Run) -> str:
    """The whole report as text, several lines, no colour. '-' stands for what was not measured."""
    lines: list[str] = []
    for conversation in dict.fromkeys(r.conversation for r in run.records):
        rows = [_row(r) for r in run.records if r.conversation == conversation]
        lines += [f"{conversation}", *aligned([_HEADER, *rows]), ""]
    for record in run.records:
        if record.error is not None:
            where = f"{record.conversation} turn {record.number}"
            lines.append(f"failed: {where}: {record.error_kind}: {record.error}")
    return "\n".join([*lines, *_totals(run, summarise(run)), *_notes(run)])


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


def _row(record: TurnRecord) -> tuple[str, ...]:
    done = record.completion
    tier = [_count((record.tier or {}).get(counter)) for counter in _TIER_COLUMNS.values()]
    front = (str(record.number), record.agent, f"{record.prompt_tokens:,}")
    theory = f"{record.theoretical_cached:,}"
    if done is None:
        return (*front, "failed", theory, "-", "-", "-", "-", *tier)
    return (
        *front,
        f"{done.cached_tokens:,}",
        theory,
        f"{record.prompt_tokens - done.cached_tokens:,}",
        f"{len(done.output_ids):,}",
        _ms(done.ttft_s),
        _ms(mean_gap(done)),
        *tier,
    )


def _totals(run: Run, total: Summary) -> list[str]:
    failed = sum(total.failures.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(total.failures.items()))
    rows = [
        ("total", ""),
        (
            "turns",
            f"{total.turns} answered, {failed} failed{f' ({kinds})' if kinds else ''}, "
            f"of {run.planned_turns} planned",
        ),
        (
            "prompt tokens",
            f"{total.prompt_tokens:,}: {total.cached_tokens:,} cached, {total.new_tokens:,} computed; "
            f"{total.output_tokens:,} generated",
        ),
        (
            "prefix hits",
            f"{percent(total.hit_rate)} of prompt tokens; "
            f"{percent(total.theoretical_hit_rate)} with an infinite cache",
        ),
        ("TTFT", _spread(total.ttft_s)),
        ("inter-token", _spread(total.gap_s)),
        ("turn", _spread(total.latency_s)),
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


def _notes(run: Run) -> list[str]:
    notes = []
    if run.partial is not None:
        notes.append(f"PARTIAL: {run.partial} after {len(run.records)} of {run.planned_turns} turns.")
    if run.tier is not None and run.concurrency > 1:
        notes.append("Tier counters are exact in total only: requests that overlap cannot be told apart.")
    if run.tier is None:
        notes.append("The server publishes no tier counters.")
    if warm := warm_turns(run.records):
        notes.append(
            f"{warm} turns hit more than this run can have cached: the server was warm (see --flush-cache)."
        )
    return notes


def _spread(times: Percentiles | None) -> str:
    if times is None:
        return "-"
    return f"p50 {_ms(times.p50)}, p95 {_ms(times.p95)}, p99 {_ms(times.p99)}, mean {_ms(times.mean)} ms"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _is_number(cell: str) -> bool:
    return cell in ("-", "failed", "") or cell.replace(",", "").replace(".", "", 1).isdigit()
