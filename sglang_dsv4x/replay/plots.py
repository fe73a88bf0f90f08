"""The plots of a report: hit rate, latencies by turn, tier traffic, the time line of sessions."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.summary import mean_gap, prompt_tokens

# Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_GREY, _RED = "#666666", "#C00000"
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "path",
    "text.parse_math": False,
}
# Conversations of hundreds of turns are drawn in at most this many groups of neighbouring turns.
_MOST_GROUPS = 60
# More bars than this are drawn as pixels: a vector for each would make pages of many megabytes.
_MOST_VECTORS = 2000
_WIDTH_IN, _HEIGHT_IN = 5.6, 3.1


class Plot(NamedTuple):
    """One plot: `draw(axes)`; `alt` says in words what it shows; height in inches."""

    title: str
    alt: str
    height: float
    draw: Callable[[Axes], None]


def plots(runs: Sequence[Run]) -> list[Plot]:
    """All plots of a report, in reading order."""
    found = [
        Plot(
            "Prefix hits by turn",
            "share of prompt tokens from the prefix cache, achieved and with an infinite cache, by turn",
            _HEIGHT_IN,
            lambda axes: _hits(axes, runs),
        ),
        Plot(
            "Time to first token by turn",
            "time to first token by turn number, median and 95th percentile",
            _HEIGHT_IN,
            lambda axes: _times(axes, runs, lambda r: r.completion and r.completion.ttft_s, "seconds", 1.0),
        ),
        Plot(
            "Inter-token latency by turn",
            "mean inter-token latency of a turn by turn number, median and 95th percentile",
            _HEIGHT_IN,
            lambda axes: _times(axes, runs, lambda r: r.completion and mean_gap(r.completion), "ms", 1000.0),
        ),
        Plot(
            "Tier traffic",
            "bytes moved between host and device since the run began, over time",
            _HEIGHT_IN,
            lambda axes: _traffic(axes, runs),
        ),
    ]
    for run in runs:
        rows = len(_rows(run))
        found.append(
            Plot(
                f"Sessions over time: {run.name}",
                f"when each agent of {run.name} waited for its first token, decoded and failed",
                min(10.0, max(2.0, 1.1 + 0.2 * rows)),
                lambda axes, run=run: _sessions(axes, run),  # type: ignore[misc]
            )
        )
    return found


def svg(plot: Plot) -> str:
    """One plot as an SVG document."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, plot.height), layout="constrained")
        _draw(figure.add_subplot(), plot)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def png(runs: Sequence[Run]) -> bytes:
    """All plots as one PNG, two beside each other."""
    drawn = plots(runs)
    pairs = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]
    heights = [max(plot.height for plot in pair) for pair in pairs]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2 * _WIDTH_IN, sum(heights)), layout="constrained", dpi=100)
        grid = figure.add_gridspec(len(pairs), 2, height_ratios=heights)
        for row, pair in enumerate(pairs):
            for column, plot in enumerate(pair):
                wide = slice(None) if len(pair) == 1 else column
                _draw(figure.add_subplot(grid[row, wide]), plot)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Axes, plot: Plot) -> None:
    plot.draw(axes)
    axes.set_title(plot.title, loc="left", fontsize=10, fontweight="bold")


def _hits(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set(xlabel="turn", ylabel="% of prompt tokens", ylim=(-3, 103))
    groups = _Groups(runs)
    theory = groups.shares(runs[0], lambda r: r.theoretical_cached, lambda r: r.prompt_tokens)
    axes.plot(*theory, color=_GREY, linestyle="--", label="infinite cache", zorder=3)
    for run, colour in _coloured(runs):
        achieved = groups.shares(
            run,
            lambda r: r.completion and r.completion.cached_tokens,
            lambda r: prompt_tokens(r, r.completion) if r.completion else 0,
        )
        axes.plot(*achieved, color=colour, marker="o", markersize=3, label=_label(run.name))
    _whole_turns(axes)
    _legend(axes)


def _times(
    axes: Axes, runs: Sequence[Run], value: Callable[[TurnRecord], float | None], unit: str, factor: float
) -> None:
    axes.set(xlabel="turn", ylabel=unit)
    groups = _Groups(runs)
    several = False
    for run, colour in _coloured(runs):
        samples = groups.samples(run, value)
        if not samples:
            continue
        x = list(samples)
        middle, high = (
            [factor * float(np.percentile(sample, q)) for sample in samples.values()] for q in (50, 95)
        )
        several = several or any(len(sample) > 1 for sample in samples.values())
        axes.plot(x, middle, color=colour, marker="o", markersize=3, label=_label(run.name))
        if high != middle:
            axes.plot(x, high, color=colour, linestyle=":", label=_label(f"{run.name}, p95"))
    axes.set_ylim(bottom=0)
    _whole_turns(axes)
    _legend(axes, "median and p95 of turns" if several else "")


def _traffic(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set(xlabel="seconds into the run", ylabel="MiB since the start")
    directions = (("bytes_to_device", "host to device", "-"), ("bytes_to_host", "device to host", "--"))
    drawn = False
    for run, colour in _coloured(runs):
        for counter, words, style in directions:
            points = [
                (s.at_s, s.counters[counter] / 2**20) for s in run.tier_samples if counter in s.counters
            ]
            if points:
                times, values = zip((0.0, 0.0), *points, strict=True)
                axes.plot(times, values, style, color=colour, label=_label(f"{run.name}, {words}"))
                drawn = True
    if drawn:
        axes.set_ylim(bottom=0)
        _legend(axes)
    else:
        axes.text(0.5, 0.5, "no server published tier counters", ha="center", transform=axes.transAxes)


def _sessions(axes: Axes, run: Run) -> None:
    rows = _rows(run)
    many = len(run.records) > _MOST_VECTORS
    by_row: dict[tuple[str, str], list[TurnRecord]] = defaultdict(list)
    for record in run.records:
        by_row[(record.conversation, record.agent)].append(record)
    # A turn of a millisecond in an hour is still to be seen.
    least = max((record.ended_s for record in run.records), default=0.0) / 800
    for y, row in enumerate(rows):
        prefill, decode, failed = [], [], []
        for record in by_row[row]:
            done = record.completion
            if done is None:
                failed.append(record.started_s)
                continue
            prefill.append((record.started_s, max(done.ttft_s, least)))
            decode.append((record.started_s + done.ttft_s, max(done.latency_s - done.ttft_s, 0.0)))
        axes.broken_barh(decode, (y - 0.35, 0.7), color=COLOURS[4], rasterized=many)
        axes.broken_barh(prefill, (y - 0.35, 0.7), color=COLOURS[0], rasterized=many)
        axes.plot(failed, [y] * len(failed), "x", color=_RED, markersize=6, rasterized=many)
    for at in run.resumed_s:
        axes.axvline(at, color=_GREY, linestyle=":")
    axes.set(xlabel="seconds into the run", ylim=(len(rows) - 0.4, -0.6), xlim=(0, None))
    step = max(1, len(rows) // 40)
    labels = [_short(f"{conversation} {agent.removeprefix('main/')}") for conversation, agent in rows]
    axes.set_yticks(range(0, len(rows), step), labels[::step], fontsize=7)
    keys: list[Patch | Line2D] = [
        Patch(color=COLOURS[0], label="to first token"),
        Patch(color=COLOURS[4], label="decode"),
    ]
    if any(r.error is not None for r in run.records):
        keys.append(Line2D([], [], color=_RED, marker="x", linestyle="", label="failed"))
    if run.resumed_s:
        keys.append(Line2D([], [], color=_GREY, linestyle=":", label="resumed"))
    axes.legend(
        handles=keys, fontsize=7, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 0.99)
    )


class _Groups:
    """Turns of all conversations by their number, neighbours together where there are very many."""

    def __init__(self, runs: Sequence[Run]):
        highest = max((r.number for run in runs for r in run.records), default=1)
        self._size = -(-highest // _MOST_GROUPS)

    def shares(
        self, run: Run, part: Callable[[TurnRecord], int | None], whole: Callable[[TurnRecord], int]
    ) -> tuple[list[float], list[float]]:
        """Turn numbers and percentages: the sum of parts over the sum of wholes where the part is known."""
        parts: dict[float, int] = defaultdict(int)
        wholes: dict[float, int] = defaultdict(int)
        for record in run.records:
            value = part(record)
            if value is not None:
                parts[self._middle(record)] += value
                wholes[self._middle(record)] += whole(record)
        x = sorted(turn for turn, total in wholes.items() if total)
        return x, [100 * parts[turn] / wholes[turn] for turn in x]

    def samples(self, run: Run, value: Callable[[TurnRecord], float | None]) -> dict[float, list[float]]:
        """Values by turn number, in ascending order of it."""
        found: dict[float, list[float]] = defaultdict(list)
        for record in run.records:
            measured = value(record)
            if measured is not None:
                found[self._middle(record)].append(measured)
        return dict(sorted(found.items()))

    def _middle(self, record: TurnRecord) -> float:
        """Middle of the group's turn numbers."""
        first = (record.number - 1) // self._size * self._size + 1
        return first + (self._size - 1) / 2


def _rows(run: Run) -> list[tuple[str, str]]:
    """Conversations and agents in the order in which they began."""
    begun = sorted(run.records, key=lambda record: record.started_s)
    first = dict.fromkeys(record.conversation for record in begun)
    agents = dict.fromkeys((record.conversation, record.agent) for record in begun)
    return [row for conversation in first for row in agents if row[0] == conversation]


def _coloured(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]


def _whole_turns(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def _legend(axes: Axes, title: str = "") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, title=title, title_fontsize=8)


def _short(text: str) -> str:
    return text if len(text) <= 28 else f"{text[:14]}…{text[-13:]}"


def _label(text: str) -> str:
    # matplotlib leaves labels that begin with an underscore out of legends.
    return f" {text}" if text.startswith("_") else text
