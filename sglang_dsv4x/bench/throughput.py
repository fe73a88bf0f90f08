"""Prefill and decode throughput of one request through a server, tier off and on, in turns.

Both servers run at once and sleep while the other is measured (SGLang's --sleep-on-idle), and each round measures both
with the same fresh prompt: their ratio is of one run on one machine. The hot cache is by default as small as it may be,
so that most of what decode selects is fetched: the tier's cost at its worst.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import requests

from .. import configs
from ..demo import smallest_hot_entries
from ..launch import LaunchError, Server
from ..make_model import MakeModelError, make_model
from .record import record, write

MODEL = "tiny"
REQUEST_TIMEOUT_S = 600.0


class Round(NamedTuple):
    """Tokens per second of one prompt on one server."""

    prefill: float
    decode: float


def main(argv: Sequence[str]) -> int:
    """Runs it and prints a table. Returns 1 when a server fails, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        "sglang-dsv4x bench throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result as JSON")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="prompts per server (default %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=2048, metavar="N", help="length of each (default %(default)s)"
    )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=48,
        metavar="N",
        help="decode steps measured (default %(default)s)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=256,
        metavar="N",
        help="--chunked-prefill-size (default %(default)s)",
    )
    parser.add_argument(
        "--fetch-unit", type=int, default=2, metavar="N", help="--dsv4x-fetch-unit (default %(default)s)"
    )
    parser.add_argument(
        "--hot-entries",
        type=int,
        metavar="N",
        help="--dsv4x-hot-entries (default: the fewest that are allowed)",
    )
    args = parser.parse_args(argv)
    for name in ("rounds", "prompt_tokens", "output_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.hot_entries is None:
        args.hot_entries = smallest_hot_entries(1, args.chunk_tokens, args.fetch_unit)
    try:
        results = measure(args)
    except (MakeModelError, LaunchError, requests.RequestException) as error:
        print(f"sglang-dsv4x bench throughput: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang-dsv4x bench throughput: interrupted", file=sys.stderr)
        return 130
    print(as_table(results))
    if args.json is not None:
        settings = {k: v for k, v in vars(args).items() if k != "json"} | {"model": MODEL}
        write(args.json, record("throughput", argv, settings, results))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts both servers and measures them in turns. Raises LaunchError, requests.RequestException."""
    rounds: dict[str, list[Round]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="dsv4x-bench-") as folder, ExitStack() as stack:
        out = Path(folder)
        make_model(configs.load(MODEL), out / "model", seed=0)
        servers = {}
        for tier in rounds:
            print(f"starting the server with the tier {tier}", flush=True)
            server = Server(server_arguments(args, out / "model", tier), out / f"{tier}.log")
            servers[tier] = stack.enter_context(server)
        draw = random.Random(0)
        for number in range(args.rounds + 1):
            # The first prompt of a server also allocates and warms caches, and is not counted.
            prompt = [draw.randrange(10, 500) for _ in range(args.prompt_tokens)]
            for tier, server in servers.items():
                seen = one_round(server.base_url, prompt, args.output_tokens)
                label = "warm-up" if number == 0 else f"round {number}/{args.rounds}"
                print(
                    f"{label}, tier {tier}: prefill {seen.prefill:.1f}, decode {seen.decode:.2f} tokens/s",
                    flush=True,
                )
                if number > 0:
                    rounds[tier].append(seen)
        info = requests.get(f"{servers['on'].base_url}/server_info", timeout=60).json()
        counters = info["internal_states"][0]["dsv4x"]["counters"]
    medians = {
        tier: Round(*(statistics.median(column) for column in zip(*seen, strict=True)))
        for tier, seen in rounds.items()
    }
    # Each round's pair saw the same load of the machine; the ratio's median is steadier than the medians' ratio.
    ratios = [
        Round(on.prefill / off.prefill, on.decode / off.decode)
        for off, on in zip(rounds["off"], rounds["on"], strict=True)
    ]
    return {
        "rounds": {tier: [r._asdict() for r in seen] for tier, seen in rounds.items()},
        "median_tokens_per_s": {tier: r._asdict() for tier, r in medians.items()},
        "on_over_off": {
            name: {
                "median": statistics.median(column),
                "smallest": min(column),
                "largest": max(column),
            }
            for name, column in zip(Round._fields, zip(*ratios, strict=True), strict=True)
        },
        "tier": {
            "selected": counters["selected"],
            "miss_share": counters["misses"] / counters["selected"] if counters["selected"] else None,
            "bytes_to_device": counters["bytes_to_device"],
            "bytes_to_host": counters["bytes_to_host"],
        },
    }


def server_arguments(args: argparse.Namespace, model: Path, tier: str) -> list[str]:
    """Arguments of `launch_server`."""
    pages = (args.rounds + 1) * (args.prompt_tokens // 256 + 2) + 8
    return [
        *("--model-path", str(model), "--device", "cpu", "--skip-server-warmup", "--sleep-on-idle"),
        *("--max-total-tokens", str(pages * 256), "--swa-full-tokens-ratio", "0.5"),
        *("--max-running-requests", "1", "--chunked-prefill-size", str(args.chunk_tokens)),
        *("--enable-dsv4x", "--dsv4x-tier", tier, "--dsv4x-fetch-unit", str(args.fetch_unit)),
        *("--dsv4x-hot-entries", str(args.hot_entries)),
    ]


def one_round(url: str, prompt: list[int], output_tokens: int) -> Round:
    """Prefills a new prompt, then decodes from its prefix hit; the hit's own cost is measured and taken off."""
    cold = _seconds(url, prompt, 1)
    hit = _seconds(url, prompt, 1)
    decode = _seconds(url, prompt, 1 + output_tokens) - hit
    return Round(len(prompt) / cold, output_tokens / decode)


def as_table(results: dict[str, Any]) -> str:
    """The closing table."""
    medians, ratios, tier = results["median_tokens_per_s"], results["on_over_off"], results["tier"]
    lines = [
        "",
        f"{'tokens/s, median':20}{'tier off':>10}{'tier on':>10}   on / off (smallest to largest)",
    ]
    for name in Round._fields:
        r = ratios[name]
        lines.append(
            f"{name:20}{medians['off'][name]:10.1f}{medians['on'][name]:10.1f}   "
            f"{r['median']:.3f} ({r['smallest']:.3f} to {r['largest']:.3f})"
        )
    if tier["selected"]:
        lines.append(
            f"\ndecode selected {tier['selected']:,} entries, {tier['miss_share']:.1%} missed the hot cache"
        )
    return "\n".join(lines)


def _seconds(url: str, prompt: list[int], output_tokens: int) -> float:
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    start = time.perf_counter()
    reply = requests.post(
        f"{url}/generate",
        json={"input_ids": prompt, "sampling_params": sampling},
        timeout=REQUEST_TIMEOUT_S,
    )
    reply.raise_for_status()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
