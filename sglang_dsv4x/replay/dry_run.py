"""`sglang-dsv4x replay --dry-run`: what caches of given sizes and policies would serve, without a server."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from sglang_dsv4x.replay.connection_arguments import positive_float, positive_int
from sglang_dsv4x.replay.conversation import Conversation
from sglang_dsv4x.replay.facts import DEFAULT_PAGE_SIZE
from sglang_dsv4x.replay.plan import PlannedConversation, make_plan
from sglang_dsv4x.replay.simulate import Service, Simulation, Totals, count_turns
from sglang_dsv4x.replay.simulated_cache import (
    EVICTION_POLICIES,
    SERVER_POLICIES,
    Counts,
    ResumePolicy,
    SimulatedCache,
    SwaPool,
)
from sglang_dsv4x.replay.table import aligned, percent

KIND = "sglang-dsv4x dry run"
SCHEMA = 1
# What SGLang 0.5.17 takes on GPUs of 60 to 160 GB.
DEFAULT_CHUNK = 8192
# DeepSeek-V4's sliding window, in tokens.
WINDOW = 128
RESUME_PLACES = ("prompt", "output", "fork")
# Of the replay's arguments, those that a simulation cannot honour.
_ONLINE = {
    "html": None, "png": None, "resume": None, "against": None, "duration": None, "logprobs": False,
    "flush_cache": False, "retries": 0,
}  # fmt: skip


class DryRunError(ValueError):
    """Arguments that do not go together; the message names them."""


class Row(NamedTuple):
    """One simulated cache: what it was, what came out. `capacity` in tokens, None: no limit."""

    capacity: int | None
    eviction: str
    totals: Totals
    counts: Counts
    page_size: int


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds what only a dry run reads."""
    group.add_argument(
        "--capacity",
        nargs="+",
        type=tokens,
        metavar="TOKENS",
        help="sizes of the KV cache to try, as in max_total_num_tokens; K and M are thousands and millions of tokens "
        "(default: no limit)",
    )
    group.add_argument(
        "--eviction",
        nargs="+",
        choices=list(EVICTION_POLICIES),
        default=["lru"],
        metavar="POLICY",
        help=f"eviction policies to try: {', '.join(EVICTION_POLICIES)} (default lru). SGLang's "
        f"--radix-eviction-policy takes {', '.join(SERVER_POLICIES)}",
    )
    group.add_argument(
        "--swa-tokens",
        type=tokens,
        metavar="TOKENS",
        help="size of the SWA pool: a hit ends where SWA rows are live, or at a resume point (default: no limit, so "
        "that a hit may end at every page)",
    )
    group.add_argument(
        "--resume-at",
        nargs="+",
        choices=RESUME_PLACES,
        default=[],
        metavar="PLACE",
        help=f"keep a resume point at the end of every prompt, of every output, where a prompt leaves a cached one: "
        f"{', '.join(RESUME_PLACES)}",
    )
    group.add_argument(
        "--resume-interval",
        type=tokens,
        metavar="TOKENS",
        help="keep a resume point every so many tokens too",
    )
    group.add_argument(
        "--resume-points",
        type=positive_int,
        metavar="N",
        help="keep no more points than this; the one unused longest goes first (default: no limit)",
    )
    group.add_argument(
        "--chunk",
        type=tokens,
        default=DEFAULT_CHUNK,
        metavar="TOKENS",
        help="tokens of a prefill step, as in --chunked-prefill-size (default %(default)s)",
    )
    group.add_argument(
        "--prefill-speed",
        type=positive_float,
        default=float("inf"),
        metavar="X",
        help="tokens per second at which a prompt's uncached part is computed (default: at once)",
    )
    group.add_argument(
        "--decode-speed",
        type=positive_float,
        default=float("inf"),
        metavar="X",
        help="tokens per second of one answer (default: at once). With both speeds left out, requests overlap in "
        "nothing, and only pauses decide the order",
    )


def tokens(text: str) -> int:
    """A positive number of tokens with K or M for thousands or millions, for `type=` of an argument."""
    unit = {"K": 1000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    value = float(text[:-1] if unit > 1 else text)
    if not 1 <= value * unit <= 2**40 or value * unit != int(value * unit):
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens such as 65536, 500K or 2M")
    return int(value * unit)


def run(args: argparse.Namespace, conversations: Sequence[Conversation]) -> int:
    """Simulates, prints the table and returns the exit code 0; 1 when the report could not be written."""
    page_size = args.page_size or DEFAULT_PAGE_SIZE
    began = time.perf_counter()
    plan = make_plan(
        conversations,
        page_size=page_size,
        scale=args.scale,
        max_turns=args.max_turns,
        output_tokens=args.output_tokens,
        copies=args.copies,
    )
    rows = simulate(args, plan, page_size)
    print(render(rows, args))
    print(f"{time.perf_counter() - began:,.1f} s for {len(rows)} caches", file=sys.stderr)
    if args.json is not None:
        return _write(args, rows, len(plan))
    return 0


def check(args: argparse.Namespace) -> None:
    """Raises DryRunError for arguments that do not go together."""
    page_size = args.page_size or DEFAULT_PAGE_SIZE
    for name, default in _ONLINE.items():
        if getattr(args, name) != default:
            raise DryRunError(f"--{name.replace('_', '-')} needs a server, which --dry-run has none of")
    if args.chunk < page_size:
        raise DryRunError(f"--chunk {args.chunk} is less than a page of {page_size} tokens (--page-size)")
    points = args.resume_at or args.resume_interval
    if points and args.swa_tokens is None:
        raise DryRunError("--resume-at and --resume-interval change nothing without --swa-tokens")
    if args.resume_points is not None and not points:
        raise DryRunError("--resume-points limits points that --resume-at or --resume-interval ask for")
    if args.resume_interval and args.resume_interval % page_size:
        raise DryRunError(f"--resume-interval {args.resume_interval} must be whole pages of {page_size}")
    least = -(-args.chunk // page_size) * page_size + 2 * page_size
    if args.swa_tokens is not None and args.swa_tokens < least:
        raise DryRunError(
            f"--swa-tokens {args.swa_tokens} cannot hold a prefill step: at least {least} are needed, or a "
            "smaller --chunk"
        )


def simulate(args: argparse.Namespace, plan: Sequence[PlannedConversation], page_size: int) -> list[Row]:
    """A row for each capacity and policy."""
    wanted = list(itertools.product(args.capacity or [None], args.eviction))
    rows = []
    with tqdm(
        total=count_turns(plan) * len(wanted),
        desc="simulate",
        unit=" turns",
        disable=args.no_progress,
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        file=sys.stderr,
    ) as bar:
        for capacity, eviction in wanted:
            cache = SimulatedCache(
                None if capacity is None else capacity // page_size,
                eviction,
                SwaPool(
                    None if args.swa_tokens is None else args.swa_tokens // page_size,
                    -(-WINDOW // page_size),
                ),
                ResumePolicy(
                    prompt_end="prompt" in args.resume_at,
                    output_end="output" in args.resume_at,
                    fork="fork" in args.resume_at,
                    interval=(args.resume_interval or 0) // page_size,
                    most=args.resume_points,
                ),
            )
            simulation = Simulation(
                cache,
                page_size,
                concurrency=args.concurrency,
                think_time_scale=args.think_time_scale,
                service=Service(args.prefill_speed, args.decode_speed, args.chunk),
                on_turn=bar.update,
            )
            rows.append(Row(capacity, eviction, simulation.run(plan), cache.counts, page_size))
    return rows


def render(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """The table and what its columns mean, without colour."""
    first = rows[0].totals
    header = (
        "capacity",
        "eviction",
        "prefix hits",
        "of infinite",
        "evicted",
        "no SWA rows",
        "points used",
        "refused",
    )
    table = [header]
    for row in rows:
        totals = row.totals
        share = totals.cached / totals.theoretical_cached if totals.theoretical_cached else None
        table.append(
            (
                "no limit" if row.capacity is None else f"{row.capacity:,}",
                row.eviction,
                percent(totals.cached / totals.prompt if totals.prompt else None),
                percent(share),
                f"{row.counts.evicted * row.page_size:,}",
                f"{totals.unresumable:,}",
                f"{row.counts.points_used:,}",
                f"{totals.refused:,}",
            )
        )
    theory = percent(first.theoretical_cached / first.prompt if first.prompt else None)
    lines = [
        f"{first.turns + first.refused:,} turns, {first.prompt:,} prompt tokens, {first.output:,} generated; "
        f"{args.concurrency} at a time, pauses x{args.think_time_scale:g}",
        f"an infinite cache serves {theory} of the prompt tokens",
        "",
        *aligned(table),
        "",
        "evicted, no SWA rows: tokens that were given up, and tokens that were there but behind no place to go on from",
    ]
    if any(row.totals.refused for row in rows):
        lines.append("refused: turns that do not fit into the cache; they are in no other number")
    return "\n".join(lines)


def document(args: argparse.Namespace, rows: Sequence[Row], conversations: int) -> dict[str, Any]:
    """The report as JSON values; tokens unless named otherwise."""
    names = (
        "scale", "max_turns", "output_tokens", "copies", "concurrency", "think_time_scale", "swa_tokens", "resume_at",
        "resume_interval", "resume_points", "chunk",
    )  # fmt: skip
    speeds = {
        name: None if (value := getattr(args, name)) == float("inf") else value
        for name in ("prefill_speed", "decode_speed")
    }
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "traces": args.traces,
        "conversations": conversations,
        "page_size": rows[0].page_size,
        "settings": {**{name: getattr(args, name) for name in names}, **speeds},
        "caches": [
            {
                "capacity": row.capacity,
                "eviction": row.eviction,
                "turns": row.totals.turns,
                "refused_turns": row.totals.refused,
                "prompt_tokens": row.totals.prompt,
                "output_tokens": row.totals.output,
                "theoretical_cached_tokens": row.totals.theoretical_cached,
                "cached_tokens": row.totals.cached,
                "unresumable_tokens": row.totals.unresumable,
                "evicted_tokens": row.counts.evicted * row.page_size,
                "evicted_swa_tokens": row.counts.swa_evicted * row.page_size,
                "most_used_tokens": row.counts.most_used * row.page_size,
                "resume_points_written": row.counts.points_written,
                "resume_points_evicted": row.counts.points_evicted,
                "resume_points_used": row.counts.points_used,
                "simulated_s": row.totals.ends_at_s,
            }
            for row in rows
        ],
    }


def _write(args: argparse.Namespace, rows: Sequence[Row], conversations: int) -> int:
    path: Path = args.json
    try:
        path.write_text(json.dumps(document(args, rows, conversations), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(
            f"sglang-dsv4x replay: --json {path}: cannot be written: {error.strerror or error}",
            file=sys.stderr,
        )
        return 1
    return 0
