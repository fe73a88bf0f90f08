"""Index scores and index quantisers on one GPU, against DeepGEMM and against the bytes.

`python -m sglang_dsv4x.bench.ops_index_score --json OUT`. The cases are those of the GPU tests. Every figure is the
median time per launch over replays of one CUDA graph that holds several launches, each on page tables of its own,
drawn anew before every replay; then a 256 MiB read leaves the L2 cold, as between two layers of a decode step.
Keys are random bytes on random pages of a pool larger than any case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..jit_kernels import registry
from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, INDEX_HEAD_DIM, index_layout

HEADS = 64
FP4, FP8 = index_layout("fp4"), index_layout("fp8")
FLUSH_BYTES = 256 << 20
REPLAYS = 20


@dataclass(frozen=True)
class Case:
    """`batch` requests of `entries` index entries each, with `queries` new tokens each: 1 is decode."""

    batch: int
    entries: int
    queries: int = 1

    @property
    def name(self) -> str:
        kind = "decode" if self.queries == 1 else f"prefill {self.queries}"
        return f"{kind}, {self.entries * 4 // 1024}K, batch {self.batch}"

    @property
    def pages(self) -> int:
        return -(-self.entries // C4_ENTRIES_PER_PAGE)

    def lens(self, device: torch.device) -> torch.Tensor:
        """int32 [batch * queries]: what each query sees; four tokens complete an entry."""
        behind = (self.queries - 1 - torch.arange(self.queries, device=device)) // 4
        return (self.entries - behind).clamp_min(0).to(torch.int32).repeat(self.batch)

    def seen(self) -> int:
        """Entries scored, summed over queries."""
        return self.batch * int(self.lens(torch.device("cpu"))[: self.queries].sum())


DECODE = tuple(Case(batch, k * 256) for k in (32, 128, 512, 1024) for batch in (1, 4, 16, 32))
PREFILL = tuple(Case(1, k * 256, queries) for k in (32, 128) for queries in (2048, 8192))
SMALL = (
    Case(1, 1),
    Case(1, 64),
    Case(1, 65),
    Case(3, 1000),
    Case(200, 130),
    Case(700, 70),
    Case(1, 700, 33),
    Case(5, 300, 7),
    Case(2, 3, 40),
)
"""For tests: one entry, whole pages, more requests than blocks, queries that see nothing."""


class Pool:
    """Pages of one key format with random keys; `count` pages."""

    def __init__(self, dtype: str, count: int, device: torch.device) -> None:
        layout = FP4 if dtype == "fp4" else FP8
        self.pages = torch.empty(count, layout.page_bytes, dtype=torch.uint8, device=device)
        ends = C4_ENTRIES_PER_PAGE * layout.value_bytes
        for block in self.pages.split(8192):
            if dtype == "fp4":
                block[:, :ends].random_(0, 256)
                block[:, ends:].random_(118, 126)
            else:
                values = torch.randn(len(block), ends, device=device).to(torch.float8_e4m3fn)
                block[:, :ends] = values.view(torch.uint8)
                scales = torch.rand(len(block), C4_ENTRIES_PER_PAGE, device=device) * 0.02 + 0.01
                block[:, ends:] = scales.view(torch.uint8)


class Timer:
    """Times launches by CUDA graph replays with a cold L2."""

    def __init__(self, device: torch.device, replays: int = REPLAYS) -> None:
        self.flush = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device=device)
        self.replays = replays

    def __call__(
        self, launches: Sequence[Callable[[], Any]], prepare: Callable[[], None]
    ) -> dict[str, float]:
        """Microseconds per launch: median, and the fastest and slowest replay."""
        prepare()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [launch() for launch in launches]
        times = []
        for replay in range(self.replays + 2):
            prepare()
            self.flush.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            # Keeps the GPU busy while the host enqueues, so that the launch of the graph is not timed.
            torch.cuda._sleep(200_000)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(start.elapsed_time(end) * 1e3 / len(launches))
        graph.reset()
        del kept
        times.sort()
        return {
            "us": round(times[len(times) // 2], 2),
            "fastest": round(times[0], 2),
            "slowest": round(times[-1], 2),
        }


def read_rate(device: torch.device) -> dict[str, float]:
    """What the device's memory gives, in bytes per second: a large sum (reads) and a large copy (reads + writes)."""
    x = torch.ones(1 << 30, dtype=torch.float32, device=device)
    y = torch.empty_like(x[: 1 << 29])
    rates = {}
    for name, size, work in (
        ("sum", x.nbytes, lambda: x.sum()),
        ("max", x.nbytes, lambda: x.amax()),
        ("copy", 2 * y.nbytes, lambda: y.copy_(x[: 1 << 29])),
    ):
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        rates[name] = size / (sorted(times)[len(times) // 2] * 1e-3)
    return rates


class Scores:
    """One case's inputs, and its launches in our kernel and in DeepGEMM."""

    def __init__(self, case: Case, pools: dict[str, Pool], device: torch.device, copies: int) -> None:
        self.case, self.pools, self.device = case, pools, device
        tokens = case.batch * case.queries
        self.tables = [
            torch.zeros(case.batch, case.pages, dtype=torch.int32, device=device) for _ in range(copies)
        ]
        self.tables_by_query = self.tables
        if case.queries > 1:
            self.tables_by_query = [table.repeat_interleave(case.queries, 0) for table in self.tables]
        self.lens = case.lens(device)
        self.request = torch.arange(case.batch, device=device).repeat_interleave(case.queries)
        self.q = [
            torch.randn(tokens, HEADS, INDEX_HEAD_DIM, device=device).to(torch.float8_e4m3fn)
            for _ in range(copies)
        ]
        self.weights = torch.randn(tokens, HEADS, device=device) * 0.1
        self.kernels = registry.select("auto", device)
        self.draw()

    def draw(self) -> None:
        """New page numbers, in both forms of the table."""
        for table, by_query in zip(self.tables, self.tables_by_query, strict=True):
            table.random_(0, len(self.pools["fp4"].pages))
            if by_query is not table:
                by_query.copy_(table.repeat_interleave(self.case.queries, 0))

    def ours(self, i: int, width: int | None = None, clean: bool = False) -> torch.Tensor:
        pages = self.pools["fp4"].pages
        return self.kernels.index_scores(
            self.q[i],
            self.weights,
            pages,
            FP4,
            "fp4",
            "released",
            self.tables[i],
            self.request,
            self.lens,
            self.case.entries if width is None else width,
            clean,
        )

    def error(self) -> float:
        """|ours - torch in fp64| / |torch in fp64| over the last query of every request."""
        last = slice(self.case.queries - 1, None, self.case.queries)
        got = self.ours(0)[last].double()
        fp64 = registry.select("torch", self.device)
        want = fp64.index_scores(
            self.q[0][last],
            self.weights[last],
            self.pools["fp4"].pages,
            FP4,
            "fp4",
            "released",
            self.tables[0],
            self.request[last],
            self.lens[last],
        )
        return float((got - want.double()).norm() / want.double().norm())

    def deep_gemm(self) -> Callable[[int], torch.Tensor]:
        """SGLang's call on the same shape with FP8 keys: one row of the page table per query."""
        deep_gemm = importlib.import_module("deep_gemm")

        lens = self.lens.view(-1, 1)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, C4_ENTRIES_PER_PAGE, deep_gemm.get_num_sms())
        keys = self.pools["fp8"].pages.view(-1, C4_ENTRIES_PER_PAGE, 1, FP8.row_bytes)
        width = self.case.pages * C4_ENTRIES_PER_PAGE

        def launch(i: int) -> torch.Tensor:
            q, table = self.q[i].unsqueeze(1), self.tables_by_query[i]
            return deep_gemm.fp8_paged_mqa_logits(q, keys, self.weights, lens, table, schedule, width, False)

        return launch

    def deep_gemm_contiguous(self) -> Callable[[int], torch.Tensor]:
        """SGLang's call for the prefill of one request, on keys already gathered (the gather is not timed)."""
        deep_gemm = importlib.import_module("deep_gemm")

        keys = torch.randn(self.case.entries, INDEX_HEAD_DIM, device=self.device).to(torch.float8_e4m3fn)
        scales = torch.rand(self.case.entries, device=self.device) * 0.02 + 0.01
        starts, ends = torch.zeros_like(self.lens), self.lens
        width = self.case.pages * C4_ENTRIES_PER_PAGE

        def launch(i: int) -> torch.Tensor:
            return deep_gemm.fp8_mqa_logits(
                self.q[i], (keys, scales), self.weights, starts, ends, clean_logits=False, max_seqlen_k=width
            )

        return launch


def bench_scores(
    cases: Sequence[Case], device: torch.device, pages: int, peer: bool, rate: float
) -> list[dict]:
    pools = {dtype: Pool(dtype, pages, device) for dtype in ("fp4", "fp8")}
    timer = Timer(device)
    rows = []
    for case in cases:
        decode = case.queries == 1
        copies = (16 if case.seen() <= 1 << 20 else 6 if case.seen() <= 1 << 22 else 4) if decode else 2
        scores = Scores(case, pools, device, copies)
        row: dict[str, Any] = {**asdict(case), "name": case.name, "relative_error": scores.error()}
        row["ours"] = timer([partial(scores.ours, i) for i in range(copies)], scores.draw)
        entries = case.batch * case.entries if decode else case.entries
        floor = entries * FP4.row_bytes / rate * 1e6
        if decode:
            row["bytes_us"] = round(floor, 2)
            row["of_bytes"] = round(floor / row["ours"]["us"], 3)
        else:
            row["tflops"] = round(case.seen() * HEADS * INDEX_HEAD_DIM * 2 / row["ours"]["us"] / 1e6, 1)
        if peer:
            launch = scores.deep_gemm()
            row["deep_gemm"] = timer([partial(launch, i) for i in range(copies)], scores.draw)
            row["ratio"] = round(row["deep_gemm"]["us"] / row["ours"]["us"], 2)
            if not decode:
                launch = scores.deep_gemm_contiguous()
                row["deep_gemm_contiguous"] = timer([partial(launch, i) for i in range(copies)], scores.draw)
        rows.append(row)
        _say(row)
    return rows


def bench_quantisers(device: torch.device) -> list[dict]:
    """Triton and torch, on the rows of a decode step and of a chunk."""
    timer = Timer(device)
    ours, torch_ops = registry.select("auto", device), registry.select("torch", device)
    rows = []
    for count in (16, 2048):
        keys = torch.randn(count, INDEX_HEAD_DIM, device=device)
        q = torch.randn(count, HEADS, INDEX_HEAD_DIM, device=device)
        weights = torch.randn(count, HEADS, device=device)
        for op, arguments in (
            ("hadamard", (q,)),
            ("pack_index_rows", (keys, "fp4", "released")),
            ("quantise_index_query", (q, "fp4", "released")),
            ("fold_index_query", (q, weights, "fp4")),
        ):
            mine, theirs = (getattr(kernels, op)(*arguments) for kernels in (ours, torch_ops))
            pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
            row: dict[str, Any] = {"name": f"{op}, {count} tokens", "backend": ours.chosen[op]}
            row["same_bits"] = all(
                torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                for a, b in pairs
            )
            for name, kernels in (("ours", ours), ("torch", torch_ops)):
                function = getattr(kernels, op)
                row[name] = timer([partial(function, *arguments)] * 4, lambda: None)
            rows.append(row)
            _say(row)
    return rows


def _say(row: dict[str, Any]) -> None:
    parts = [f"{row['name']:32}"]
    for key in ("ours", "deep_gemm", "deep_gemm_contiguous", "torch"):
        if key in row:
            parts.append(f"{key} {row[key]['us']:.1f} us")
    parts += [
        f"{key} {row[key]:.3g}" for key in ("ratio", "of_bytes", "tflops", "relative_error") if key in row
    ]
    if "same_bits" in row:
        parts.append("same bits" if row["same_bits"] else "OTHER BITS")
    print("  ".join(parts), flush=True)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, 1 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="ops_index_score", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write all figures there")
    parser.add_argument(
        "--commit", default=None, help="what to record as the commit, where git is not at hand"
    )
    parser.add_argument("--only", choices=("decode", "prefill", "quantisers"), help="one part of it")
    parser.add_argument(
        "--no-peer", action="store_true", help="do not time DeepGEMM, which need not be installed"
    )
    parser.add_argument(
        "--pool-pages", type=int, default=1 << 18, help="pages of the pool (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("ops_index_score: needs a CUDA device (torch.cuda.is_available() is False)", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    started = time.time()
    rates = read_rate(device)
    rate = max(rates.values())
    print(f"memory: {', '.join(f'{n} {r / 1e12:.2f} TB/s' for n, r in rates.items())}", flush=True)
    result: dict[str, Any] = {
        "command": [
            "python",
            "-m",
            "sglang_dsv4x.bench.ops_index_score",
            *(sys.argv[1:] if argv is None else argv),
        ],
        "commit": args.commit or _commit(),
        "device": torch.cuda.get_device_name(device),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "protocol": " ".join((__doc__ or "").split()),
        "memory_bytes_per_second": rates,
        "kernels": {
            op: registry.select("auto", device).chosen[op] for op in ("index_scores", "fold_index_query")
        },
    }
    for part, run in (
        ("decode", lambda: bench_scores(DECODE, device, args.pool_pages, not args.no_peer, rate)),
        ("prefill", lambda: bench_scores(PREFILL, device, 1 << 14, not args.no_peer, rate)),
        ("quantisers", lambda: bench_quantisers(device)),
    ):
        if args.only in (None, part):
            result[part] = run()
    result["seconds"] = round(time.time() - started, 1)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
