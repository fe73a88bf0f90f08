"""The demonstration behind `make demo`: one trace against a server without the tier and one with it.

Both are real `sglang.launch_server` processes on a tiny random DeepSeek-V4. The tier's hot cache is as small
as it may be, so that most reads miss it, and the closing table says whether every output bit was the same all
the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sglang_dsv4x import configs
from sglang_dsv4x.hicache.shape import TierShape
from sglang_dsv4x.jit_kernels.layouts import C4_ENTRIES_PER_PAGE, main_layout
from sglang_dsv4x.launch import LaunchError, Server
from sglang_dsv4x.make_model import MakeModelError, make_model
from sglang_dsv4x.replay import compare, report, table
from sglang_dsv4x.replay.client import RequestError, Sampling
from sglang_dsv4x.replay.formats import load_trace, trace_path
from sglang_dsv4x.replay.interrupt import exit_code, run_until_signal, sigterm_interrupts
from sglang_dsv4x.replay.progress import Progress
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.session import Settings, State, replay
from sglang_dsv4x.replay.summary import miss_share, summarise

MODEL = "tiny"
TRACE = "small"
MAX_REQUESTS = 2
CHUNK_TOKENS = 256
FETCH_UNIT = 2
LEAST_MISS_SHARE = 0.5

Serve = Callable[[list[str], Path], AbstractContextManager[Server]]


class DemoStopped(Exception):
    """The demonstration cannot go on. `code` is the exit code."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `run_demo` reads."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/demo"),
        metavar="DIR",
        help="folder for the model, the servers' logs and both reports (default %(default)s)",
    )
    parser.add_argument(
        "--max-turns", type=int, metavar="N", help="replay only the first N turns (default: all of them)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")


def run_demo(args: argparse.Namespace, serve: Serve = Server) -> int:
    """Runs it and prints the closing table.

    Returns 0 when every output bit of the two servers is equal while at least half of the entries that decode
    selected missed the hot cache; 1 when not, or when something failed; 130 when interrupted.
    """
    out = args.out.expanduser().resolve()
    runs: dict[str, Run] = {}
    try:
        print(f"model: {MODEL}, random weights, in {out / 'model'}", flush=True)
        make_model(configs.load(MODEL), out / "model", seed=0, force=True)
        for tier in ("off", "on"):
            argv = server_arguments(out / "model", tier)
            with sigterm_interrupts():
                runs[tier] = replayed(
                    tier, argv, out, serve, max_turns=args.max_turns, progress=not args.no_progress
                )
    except (MakeModelError, LaunchError, RequestError, OSError) as error:
        return _stop(str(error), 1)
    except DemoStopped as error:
        return _stop(str(error), error.code)
    except KeyboardInterrupt as error:
        return _stop("interrupted", exit_code(error))
    print(closing_table(runs["off"], runs["on"]))
    faults = verdict(runs["off"], runs["on"])
    for fault in faults:
        print(f"FAILED: {fault}")
    if not faults:
        print("OK: the tier changed no output bit.")
    print(f"reports: {out / 'off.json'}, {out / 'on.json'}")
    return 1 if faults else 0


def smallest_hot_entries(max_requests: int, chunk_tokens: int, fetch_unit: int) -> int:
    """The fewest --dsv4x-hot-entries that a server on the tiny model accepts: `TierShape.bound`."""
    return TierShape(
        layers=1,
        entries=2 * C4_ENTRIES_PER_PAGE,
        slots=0,
        unit=fetch_unit,
        layout=main_layout(C4_ENTRIES_PER_PAGE),
        top_k=int(configs.load(MODEL)["index_topk"]),
        max_requests=max_requests,
        chunk_tokens=chunk_tokens,
    ).bound


def server_arguments(
    model: Path,
    tier: str,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    fetch_unit: int = FETCH_UNIT,
    extra: Sequence[str] = (),
) -> list[str]:
    """Arguments of `launch_server` for the demonstration: chunks and hot cache small against the contexts."""
    values: dict[str, Any] = {
        "--model-path": model,
        "--device": "cpu",
        # Without it SGLang sizes the pool from free memory: tens of millions of tokens for a model this
        # small.
        "--max-total-tokens": 32768,
        "--max-running-requests": MAX_REQUESTS,
        "--chunked-prefill-size": chunk_tokens,
        # The default 0.1 leaves a window pool of a few pages, on which stock's scheduler can spin for ever.
        "--swa-full-tokens-ratio": 0.5,
        "--dsv4x-tier": tier,
        "--dsv4x-fetch-unit": fetch_unit,
        "--dsv4x-hot-entries": smallest_hot_entries(MAX_REQUESTS, chunk_tokens, fetch_unit),
    }
    flags = ["--enable-dsv4x", "--skip-server-warmup"]
    return [*flags, *(str(word) for pair in values.items() for word in pair), *extra]


def closing_table(off: Run, on: Run) -> str:
    """The two runs side by side, and how many of their bits are equal."""
    totals = {"tier off": summarise(off), "tier on": summarise(on)}
    both = list(totals.values())
    on_tier = on.tier or {}
    moved = {
        name: f"{value / 2**20:,.1f} MiB" for name, value in on_tier.items() if name.startswith("bytes_")
    }
    rows = [
        ("", *totals),
        ("turns answered", *(f"{t.turns} of {off.planned_turns}" for t in both)),
        ("prompt tokens", *(f"{t.prompt_tokens:,}" for t in both)),
        ("prefix hits", *(f"{t.cached_tokens or 0:,} ({table.percent(t.hit_rate)})" for t in both)),
        (
            "with an infinite cache",
            *(f"{t.theoretical_cached_tokens:,} ({table.percent(t.theoretical_hit_rate)})" for t in both),
        ),
        ("prefill", *(table.rate(t.prefill_tokens_per_s) for t in both)),
        ("decode", *(table.rate(t.decode_tokens_per_s) for t in both)),
        ("entries decode selected", "-", f"{on_tier['selected']:,}" if "selected" in on_tier else "-"),
        ("... of them missed", "-", table.percent(totals["tier on"].miss_share)),
        ("prefill rows from host", "-", table.percent(totals["tier on"].prefill_host_share)),
        ("host to device", "-", moved.get("bytes_to_device", "-")),
        ("device to host", "-", moved.get("bytes_to_host", "-")),
    ]
    result = compare.compare(compare.outputs_of(off), compare.outputs_of(on))
    return "\n".join(
        [
            "",
            *table.aligned(rows),
            "",
            f"equal turns             {result.equal_turns} of {result.turns}",
            f"equal output tokens     {result.equal_tokens} of {result.tokens}",
            f"equal log-probabilities {result.equal_logprobs} of {result.logprobs}, bit for bit",
        ]
    )


def verdict(off: Run, on: Run) -> list[str]:
    """What is wrong; empty when the demonstration shows what it should."""
    faults = []
    result = compare.compare(compare.outputs_of(off), compare.outputs_of(on))
    if not result.identical or result.logprobs == 0:
        faults.append(f"outputs differ: {result.first_difference or 'no log-probabilities were recorded'}")
    share = miss_share(on.tier)
    if share is None:
        faults.append("the server with the tier on publishes no tier counters")
    elif share < LEAST_MISS_SHARE:
        faults.append(
            f"only {table.percent(share)} of the selected entries missed the hot cache; equal bits show little "
            f"below {table.percent(LEAST_MISS_SHARE)}"
        )
    return faults


def replayed(
    label: str,
    argv: list[str],
    out: Path,
    serve: Serve = Server,
    *,
    max_turns: int | None = None,
    progress: bool = True,
) -> Run:
    """Replays the shipped trace against a server of its own and writes `out`/`label`.{log,json}.

    Raises LaunchError, RequestError, DemoStopped when any turn failed, OSError.
    """
    log = out / f"{label}.log"
    print(f"tier {label}: python -m sglang.launch_server {' '.join(argv)}", flush=True)
    state, bar = State(), Progress(enabled=progress, label=f"tier {label}")
    settings = Settings(sampling=Sampling(logprobs=True), max_turns=max_turns)
    conversations = load_trace(trace_path(TRACE), "weka")
    with serve(argv, log) as server:
        try:
            signalled = run_until_signal(
                replay(server.base_url, conversations, settings, state, bar, server.ended)
            )
        finally:
            bar.close()
    if signalled is not None:
        raise DemoStopped("interrupted", 128 + signalled)
    run = state.run
    if run is None:
        raise DemoStopped(f"tier {label}: nothing was replayed; log: {log}")
    report.write_json([run], sys.argv, out / f"{label}.json")
    if run.partial is not None:
        raise DemoStopped(f"tier {label}: {run.partial}\n{server.log_tail()}")
    for record in run.records:
        if record.error is not None:
            raise DemoStopped(f"tier {label}: turn {record.number} failed: {record.error}; log: {log}")
    return run


def _stop(message: str, code: int) -> int:
    print(f"sglang-dsv4x demo: {message}", file=sys.stderr)
    return code
