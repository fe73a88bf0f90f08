"""The plot of a plan: requests that fit against their context, one line per way to serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .errors import PlanError
from .plan import Variant, variants_of
from .question import Question

SHORTEST = 4096


def contexts(longest: int) -> list[int]:
    """Powers of two from 4K on, and the longest."""
    found = []
    context = SHORTEST
    while context < longest:
        found.append(context)
        context *= 2
    return [*found, longest]


def series(question: Question) -> dict[str, list[tuple[int, int]]]:
    """(context, requests) of every way to serve, without the question's own number of requests."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for context in contexts(question.context):
        each: list[Variant] = variants_of(replace(question, context=context, requests=None))
        for variant in each:
            lines.setdefault(variant.name, []).append((context, variant.requests))
    return lines


def draw(question: Question, path: Path) -> None:
    """Writes the plot; the file's name decides its format.

    Raises: PlanError when matplotlib is not installed or the file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise PlanError(
            "--plot needs matplotlib, which is not installed: pip install 'sglang-dsv4x[plot]'."
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in series(question).items():
        fitting = [(context, requests) for context, requests in points if requests > 0]
        axes.plot([p[0] for p in fitting], [p[1] for p in fitting], marker="o", markersize=3, label=name)
    machine = question.machine
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of one request",
        ylabel="requests at once" + ("" if machine.dp == 1 else ", each replica"),
        title=f"{question.name}: {machine.gpus} x {machine.gpu_memory / 2**30:g} GiB",
    )
    marks = contexts(question.context)
    axes.set_xticks(marks, [_short(mark) for mark in marks])
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _short(tokens: int) -> str:
    if tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else f"{tokens:,}"
