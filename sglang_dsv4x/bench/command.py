"""`sglang-dsv4x bench NAME ...`: one benchmark program, each a module of this package with main(argv) -> exit code."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "throughput": "prefill and decode tokens/s through a server, tier off and on, in turns (a tiny model, no GPU)",
    "tier-axes": "a trace with the tier off and on, bit by bit, over fetch units, chunks and late copies (no GPU)",
    "replay-against-bench-serving": "TTFT and inter-token latency by replay and by SGLang's bench_serving (no GPU)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `run` reads."""
    width = max(map(len, BENCHMARKS))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks (each has its own --help):\n" + "\n".join(
        f"  {name:{width}}  {what}" for name, what in BENCHMARKS.items()
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="NAME", help="one of those below")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the benchmark's arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Runs one benchmark. Returns its exit code."""
    module = importlib.import_module(f"{__package__}.{args.benchmark.replace('-', '_')}")
    return int(module.main(args.arguments))
