"""The report as one web page that needs no other file and no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from itertools import combinations

from sglang_dsv4x.replay import compare, plots, table
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.summary import mean_gap

# A browser lays out tables of this size at once; the JSON report has every turn.
_MOST_ROWS = 2000

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  padding: 1rem 1.2rem 3rem; max-width: 76rem; }
h1 { font-size: 1.5rem; margin: .4rem 0; } h2 { font-size: 1.15rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; max-width: 60rem; }
.note { border-left: 4px solid #E69F00; padding: .1rem .7rem; background: #fff8e8; }
.bad { border-left-color: #C00000; background: #fdf0f0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem .22rem 0; border-bottom: 1px solid #e2e2e2; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7rem; }
thead th { border-bottom: 2px solid #888; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.plots img { width: 100%; height: auto; }
details { margin: .5rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; background: #f6f6f6; padding: .6rem; font-size: 12px; }
"""


def render(runs: Sequence[Run]) -> str:
    """The page as HTML text."""
    names = ", ".join(run.name for run in runs)
    title = f"Agent replay: {names}" if len(runs) > 1 else "Agent replay"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *_notes(runs),
        "<h2>Totals</h2>",
        _table(table.side_by_side(runs)),
        *_comparisons(runs),
        '<h2>Plots</h2><div class="plots">',
        *(_image(plot) for plot in plots.plots(runs)),
        "</div>",
        *_failures(runs),
        *(_turns(run) for run in runs),
        *(_circumstances(run) for run in runs),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _notes(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        for note in table.notes(run):
            words = f"{run.name}: {note}" if len(runs) > 1 else note
            kind = "note bad" if note.startswith("PARTIAL") else "note"
            found.append(f'<p class="{kind}">{escape(words)}</p>')
    return found


def _comparisons(runs: Sequence[Run]) -> list[str]:
    found = []
    for first, second in combinations(runs, 2):
        words = table.comparison(compare.compare(compare.outputs_of(first), compare.outputs_of(second)))
        found.append(f"<p>Outputs of {escape(first.name)} and {escape(second.name)}: {escape(words)}</p>")
    return found


def _image(plot: plots.Plot) -> str:
    data = base64.b64encode(plots.svg(plot).encode()).decode()
    return f'<img alt="{escape(plot.alt)}" src="data:image/svg+xml;base64,{data}">'


def _failures(runs: Sequence[Run]) -> list[str]:
    failed = [(run, r) for run in runs for r in run.records if r.error is not None]
    if not failed:
        return []
    rows = [("turn", "server", "kind", "message")]
    rows += [
        (f"{r.conversation} turn {r.number}", run.name, r.error_kind or "", r.error or "")
        for run, r in failed[:_MOST_ROWS]
    ]
    return [f"<h2>Failed turns ({len(failed):,})</h2>", _table(rows)]


def _turns(run: Run) -> str:
    rows = [
        (
            "conversation",
            "agent",
            "turn",
            "prompt",
            "cached",
            "theory",
            "output",
            "TTFT ms",
            "ITL ms",
            "retries",
        )
    ]
    for record in run.records[:_MOST_ROWS]:
        done = record.completion
        gap = None if done is None else mean_gap(done)
        rows.append(
            (
                record.conversation,
                record.agent,
                str(record.number),
                f"{record.prompt_tokens:,}",
                "failed"
                if done is None
                else "-"
                if done.cached_tokens is None
                else f"{done.cached_tokens:,}",
                f"{record.theoretical_cached:,}",
                "-" if done is None else f"{done.output_tokens:,}",
                "-" if done is None else f"{1000 * done.ttft_s:,.1f}",
                "-" if gap is None else f"{1000 * gap:,.2f}",
                str(len(record.retried)),
            )
        )
    shown = f", the first {_MOST_ROWS:,} of them" if len(run.records) > _MOST_ROWS else ""
    title = f"Turns of {run.name}{shown} ({len(run.records):,})"
    return f"<details><summary>{escape(title)}</summary>{_table(rows)}</details>"


def _circumstances(run: Run) -> str:
    facts = {"server": run.server, "settings": run.settings, "page_size": run.page_size}
    text = json.dumps(facts, indent=1, default=str)
    title = f"Server and settings of {run.name}"
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    return (
        '<div class="wide"><table><thead><tr>'
        + "".join(f"<th>{escape(cell)}</th>" for cell in head)
        + "</tr></thead><tbody>"
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + "</tbody></table></div>"
    )
