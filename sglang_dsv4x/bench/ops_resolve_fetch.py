"""resolve and fetch on a GPU against SGLang's HiSparse swap-in on the same misses, and what moves the limit.

Times are microseconds per call, medians over replays of a CUDA graph that holds 8 calls, each on tables of its
own, with launch gaps inside. Before every replay: new tables and selections, then 256 MiB are read (cold L2).
Host rows lie in one pinned pool; each request's entries are 512 pages at random places of it, as upstream's are.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..jit_kernels import resolve as reference
from ..jit_kernels import resolve_cuda as cuda
from ..jit_kernels.layouts import main_layout
from ..jit_kernels.paged_rows import gather_rows
from .record import record, write

CALLS = 8
"""Calls in one graph, each on tables of its own."""

HISTORY = 32768
"""Entries of a request: 128K tokens."""

LAYOUT = main_layout(64)
ROW = LAYOUT.row_bytes
GIB = 1 << 30
PAGE = 64


class Bench:
    """What every measurement shares: the pool, the flush, the clock."""

    def __init__(self, pool_gib: float, replays: int) -> None:
        self.replays = replays
        self.pool, self._mapping = _pinned(int(pool_gib * GIB))
        self.flush = torch.zeros(32 << 20, dtype=torch.int64, device="cuda")
        self.results: list[dict[str, Any]] = []

    def microseconds(
        self, calls: Sequence[Callable[[], object]], prepare: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Median and quartiles per call of one graph with all `calls`; `prepare` before every replay."""
        if prepare:
            prepare()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
        times = []
        for replay in range(self.replays + 2):
            if prepare:
                prepare()
            self.flush.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(200000)  # hides the launch
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(start.elapsed_time(end) * 1e3 / len(calls))
        del kept
        graph.reset()
        low, median, high = statistics.quantiles(times, n=4)
        return {"us": round(median, 2), "low": round(low, 2), "high": round(high, 2)}

    def add(self, section: str, timed: dict[str, float], **what: Any) -> None:
        self.results.append({"section": section, **what, **timed})
        shown = " ".join(f"{k}={v}" for k, v in what.items())
        print(f"{section:10s} {shown:62s} {timed['us']:9.2f} us", flush=True)


def _pinned(size: int) -> tuple[torch.Tensor, mmap.mmap]:
    """uint8 [size] on huge pages, pinned, filled with random bytes."""
    huge = 2 << 20
    mapping = mmap.mmap(-1, size + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    offset = -address % huge
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(size), 14)  # MADV_HUGEPAGE
    pool = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=size)
    parts = pool.split(256 << 20)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda part: part.fill_(0), parts))
    status = int(torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), size, 0))
    if status:
        raise SystemExit(
            f"{size} bytes of host memory cannot be pinned: CUDA error {status}; lower --pool-gib"
        )
    for part in parts:
        part.copy_(
            torch.randint(-(1 << 62), 1 << 62, (len(part) // 8 + 1,), device="cuda").view(torch.uint8)[
                : len(part)
            ]
        )
    return pool, mapping


class Want(NamedTuple):
    """One shape of call."""

    batch: int
    top_k: int
    misses: int
    """Per request; rounded to whole units."""
    unit: int = 1
    hot_per_request: int = 1024
    shared: bool = False
    """All requests have the same history and select the same entries."""


def _new_tables(layers: int, groups: int, units: int, unit: int) -> reference.SlotTables:
    device = torch.device("cuda")

    def full(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return reference.SlotTables(
        unit_group=full(layers, units + 1, value=groups),
        group_tag=full(layers, groups + 1, value=units),
        last_used=full(layers, groups + 1, value=reference.FREE),
        held=full(layers, groups + 1, value=reference.FREE, dtype=torch.int64),
        state=full(layers, groups + 1, unit, value=reference.ABSENT, dtype=torch.uint8),
        order=torch.arange(groups, device=device).repeat(layers, 1),
        clock=full(1, value=0),
        scratch=cuda.new_scratch(layers, groups, units, device),
    )


class Tier:
    """Tables and pages of one layer, put into a state in which `misses` of each request's selection are cold."""

    def __init__(self, want: Want, host_rows: torch.Tensor) -> None:
        self.want, self.host_rows = want, host_rows
        self.total = len(host_rows)
        self.units, self.groups = self.total // want.unit, want.batch * want.hot_per_request
        device = torch.device("cuda")
        self.tables = _new_tables(1, self.groups, self.units, want.unit)
        self.tables.clock.fill_(1000)
        self.pages = torch.zeros(
            (-(-self.groups * want.unit // PAGE), LAYOUT.page_bytes), dtype=torch.uint8, device=device
        )
        self.entries = torch.full((want.batch, want.top_k), -1, dtype=torch.int32, device=device)
        self.positions = torch.zeros_like(self.entries)
        self.lens = torch.full((want.batch,), HISTORY, dtype=torch.int32, device=device)
        self.counts = torch.zeros((1, 15), dtype=torch.int64, device=device)
        self.fetched = torch.empty(0, dtype=torch.int64, device=device)

    def prepare(self) -> None:
        """Random pages, selections, hot entries and ages."""
        want, unit, tables = self.want, self.want.unit, self.tables
        requests = 1 if want.shared else want.batch
        pages = torch.randperm(self.total // PAGE - 1, device="cuda")[: requests * (HISTORY // PAGE)] + 1
        pages = pages.view(requests, -1)
        units = HISTORY // unit
        # Whole units are selected, members and all, so that one miss is one unit of misses.
        mixed = torch.rand(requests, units, device="cuda").argsort(1)
        chosen, cold = want.top_k // unit, want.misses // unit
        hot = want.hot_per_request * (want.batch // requests)

        def entries_of(mixed_units: torch.Tensor) -> torch.Tensor:
            places = (mixed_units[:, :, None] * unit + torch.arange(unit, device="cuda")).flatten(1)
            return pages.gather(1, places // PAGE) * PAGE + places % PAGE

        selected = mixed[:, :chosen].sort(1).values  # as top-k hands them over: by position
        places = (selected[:, :, None] * unit + torch.arange(unit, device="cuda")).flatten(1)
        entries = (pages.gather(1, places // PAGE) * PAGE + places % PAGE).int()
        self.entries.copy_(entries.expand(want.batch, -1))
        self.positions.copy_(places.int().expand(want.batch, -1))
        cold_units = mixed[:, :cold]
        self.fetched = entries_of(cold_units.sort(1).values).reshape(-1)
        hot_units = (
            entries_of(mixed[:, cold : cold + hot]).view(requests, -1, unit)[:, :, 0] // unit
        ).reshape(-1)
        groups = torch.randperm(self.groups, device="cuda")[: len(hot_units)]
        tables.unit_group.fill_(self.groups)
        tables.group_tag.fill_(self.units)
        tables.state.zero_()
        tables.state[0, groups] = reference.VALID
        tables.unit_group[0, hot_units] = (groups | ((1 << unit) - 1) << reference.GROUP_BITS).int()
        tables.group_tag[0, groups] = hot_units.int()
        tables.last_used[0, :-1] = torch.randint(1, 1000, (self.groups,), device="cuda", dtype=torch.int32)
        tables.held.copy_(tables.last_used.long() << reference.HELD_SHIFT)
        key = tables.last_used[0, :-1].long() * self.groups + torch.arange(self.groups, device="cuda")
        assert tables.scratch is not None
        tables.scratch.queue[0, int(tables.clock) & 1] = key.argsort().int()

    def resolve_rows(self) -> torch.Tensor:
        layer = self.tables.layer(0)
        where = (self.pages, LAYOUT, self.host_rows)
        return cuda.resolve_rows(
            layer, self.entries, self.positions, self.lens, False, self.counts[0], *where
        )

    def resolve(self) -> reference.Resolution:
        return cuda.resolve(
            self.tables.layer(0), self.entries, self.positions, self.lens, False, self.counts[0]
        )

    def apart(self) -> reference.Resolution:
        found = self.resolve()
        cuda.fetch_rows(
            self.host_rows, self.pages, LAYOUT, found.fetch_entries, found.fetch_slots, found.fetch_count
        )
        return found

    def check(self, slots: torch.Tensor) -> None:
        """The last call missed what it should have, and every selected slot holds its host row."""
        assert self.tables.scratch is not None and int(self.tables.scratch.fault[0]) == 0
        chosen = self.entries.view(-1).long()
        rows = gather_rows(self.pages, LAYOUT, slots.view(-1).long())
        expected = self.host_rows.index_select(0, chosen.cpu()).cuda()
        hot = ~torch.isin(chosen, self.fetched)
        assert torch.equal(rows[~hot], expected[~hot]), "fetched rows differ from host rows"
        want = self.want
        assert int((~hot).sum()) == want.batch * (want.misses // want.unit * want.unit)


def rows_view(pool: torch.Tensor, stride: int = ROW, layer: int = 0, layers: int = 1) -> torch.Tensor:
    """uint8 [E, 584] of a part of the pool, `stride` bytes from row to row, E whole pages."""
    part = len(pool) // layers // 4096 * 4096
    count = part // stride // PAGE * PAGE
    return pool[layer * part : layer * part + count * stride].view(count, stride)[:, :ROW]


def against_upstream(bench: Bench, batches: Sequence[int], misses: Sequence[int], compact: bool) -> None:
    """resolve and fetch, together and apart, the plain gather of the same contiguous rows, and the swap-in."""
    upstream = None if compact else Upstream.find(bench.pool)
    for batch in batches:
        for missed in misses:
            _ours(bench, batch, missed, compact)
            if upstream is not None:
                bench.add("swap-in", upstream.measure(bench, batch, missed), batch=batch, misses=missed)


def _parts(bench: Bench, batch: int) -> int:
    pages = len(bench.pool) // (ROW * PAGE)
    return min(CALLS, pages // (batch * (HISTORY // PAGE) + 64))


def _ours(bench: Bench, batch: int, missed: int, compact: bool) -> None:
    """compact: each call's rows lie in a part of the pool, an eighth if that holds all histories."""
    layers = _parts(bench, batch) if compact else 1
    tiers = Tiers(
        Want(batch, 512, missed),
        [rows_view(bench.pool, layer=i % layers, layers=layers) for i in range(CALLS)],
    )
    what = {"batch": batch, "misses": missed, **({"compact": True} if compact else {})}
    tiers.at_once(bench, "at once", **what)
    bench.add("apart", bench.microseconds([tier.apart for tier in tiers.all], tiers.prepare), **what)
    bench.add("resolve", bench.microseconds([tier.resolve for tier in tiers.all], tiers.prepare), **what)
    if not missed:
        return
    count = batch * missed
    lists = [torch.zeros(count, dtype=torch.int32, device="cuda") for _ in tiers.all]
    places = torch.arange(count, dtype=torch.int32, device="cuda")
    target = torch.zeros(count * ROW // 8, dtype=torch.int64, device="cuda")
    both = list(zip(tiers.all, lists, strict=True))

    def prepare() -> None:
        tiers.prepare()
        for tier, entries in both:
            entries.copy_(tier.fetched)

    plain = [partial(plain_gather, tier.host_rows, entries, target) for tier, entries in both]
    bench.add("gather", bench.microseconds(plain, prepare), **what)
    fetches = [
        partial(cuda.fetch_rows, tier.host_rows, tier.pages, LAYOUT, entries, places, None)
        for tier, entries in both
    ]
    bench.add("fetch", bench.microseconds(fetches, prepare), **what)


class Tiers:
    """One tier for each call of a graph."""

    def __init__(self, want: Want, host_rows: Sequence[torch.Tensor]) -> None:
        self.all = [Tier(want, rows) for rows in host_rows]

    def prepare(self) -> None:
        for tier in self.all:
            tier.prepare()

    def at_once(self, bench: Bench, section: str, **what: Any) -> None:
        """Times `resolve_rows`, and checks misses and bytes of the last replay's first call."""
        slots: list[torch.Tensor] = []

        def first() -> torch.Tensor:
            slots[:] = [self.all[0].resolve_rows()]
            return slots[0]

        calls = [first, *(tier.resolve_rows for tier in self.all[1:])]
        timed = bench.microseconds(calls, self.prepare)
        self.all[0].check(slots[0])
        bench.add(section, timed, **what)


class Upstream:
    """SGLang's `load_cache_to_device_buffer_dsv4_mla`, top-k 512, 1,024 slots a request, block 960."""

    def __init__(self, swap_in: Callable[..., None], pool: torch.Tensor) -> None:
        self.swap_in = swap_in
        self.host = pool[: len(pool) // LAYOUT.page_bytes * LAYOUT.page_bytes].view(-1, LAYOUT.page_bytes)
        self.device = torch.zeros(8192, LAYOUT.page_bytes, dtype=torch.uint8, device="cuda")

    @classmethod
    def find(cls, pool: torch.Tensor) -> Upstream | None:
        try:
            from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_dsv4_mla
        except ImportError as error:
            print(f"swap-in    not measured: {error}", flush=True)
            return None
        return cls(load_cache_to_device_buffer_dsv4_mla, pool)

    def measure(self, bench: Bench, batch: int, misses: int) -> dict[str, float]:
        states = [_SwapInState(self, batch) for _ in range(CALLS)]
        before: list[torch.Tensor] = []

        def prepare() -> None:
            for state in states:
                state.prepare(misses)
            before[:] = [states[0].tokens.clone()]

        timed = bench.microseconds([state.run for state in states], prepare)
        swapped = int((states[0].tokens != before[0]).sum())
        assert swapped == batch * misses, f"the swap-in brought {swapped} rows, not {batch * misses}"
        return timed


class _SwapInState:
    def __init__(self, upstream: Upstream, batch: int, slots: int = 1024) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        self.upstream, self.batch, self.slots = upstream, batch, slots
        self.top, self.out = zeros(batch, 512), zeros(batch, 512)
        self.tokens, self.locations = zeros(batch, slots + 64), zeros(batch, slots + 64)
        self.lru = zeros(batch, slots, dtype=torch.int16)
        self.host = zeros(batch, HISTORY + 64, dtype=torch.int64)
        self.requests = torch.arange(batch, device="cuda")
        self.lens = zeros(batch).fill_(HISTORY)
        self.real = zeros(1).fill_(batch)
        self.in_page = torch.arange(64, device="cuda")

    def prepare(self, misses: int) -> None:
        batch, slots = self.batch, self.slots
        mixed = torch.rand(batch, HISTORY - 1, device="cuda").argsort(1)[:, : slots + 512].int()
        self.top.copy_(mixed[:, :512][:, torch.randperm(512, device="cuda")])
        self.tokens[:, :slots] = mixed[:, misses : misses + slots]
        self.tokens[:, slots:] = -1
        self.lru.copy_(torch.rand(batch, slots, device="cuda").argsort(1))
        pages = torch.rand(len(self.upstream.device), device="cuda").argsort()
        pages = pages[: batch * (slots // 64 + 1)].view(batch, -1, 1)
        self.locations.copy_((pages * 64 + self.in_page).view(batch, -1))
        pages = torch.randint(0, len(self.upstream.host), (batch, HISTORY // 64 + 1, 1), device="cuda")
        self.host.copy_((pages * 64 + self.in_page).view(batch, -1))

    def run(self) -> None:
        self.upstream.swap_in(
            top_k_tokens=self.top,
            device_buffer_tokens=self.tokens,
            host_cache_locs=self.host,
            device_buffer_locs=self.locations,
            host_cache=self.upstream.host,
            device_buffer=self.upstream.device,
            top_k_device_locs=self.out,
            req_pool_indices=self.requests,
            seq_lens=self.lens,
            lru_slots=self.lru,
            item_size_bytes=ROW,
            num_top_k=512,
            hot_buffer_size=self.slots,
            page_size=1,
            block_size=960,
            num_real_reqs=self.real,
        )


def _gather_kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def contiguous(source, entries, target, stride, WORDS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0)
        column = tl.arange(0, LANES)
        entry = tl.load(entries + row).to(tl.int64)
        value = tl.load(source + entry * stride + column, mask=column < WORDS, other=0)
        tl.store(target + row.to(tl.int64) * WORDS + column, value, mask=column < WORDS)

    @triton.jit
    def pages(source, entries, target):  # type: ignore[no-untyped-def]
        row = tl.program_id(0)
        column = tl.arange(0, 128)
        entry = tl.load(entries + row).to(tl.int64)
        place = tl.where(column < 72, entry % 64 * 72 + column, 64 * 72 + entry % 64)
        value = tl.load(source + entry // 64 * 4680 + place, mask=column < 73, other=0)
        tl.store(target + row.to(tl.int64) * 73 + column, value, mask=column < 73)

    return contiguous, pages


_kernels: list[Any] = []


def plain_gather(host_rows: torch.Tensor, entries: torch.Tensor, target: torch.Tensor) -> None:
    """One block of 64 threads per contiguous row; nothing but the copy."""
    if not _kernels:
        _kernels.extend(_gather_kernels())
    words = host_rows.view(torch.int64) if host_rows.is_contiguous() else None
    stride = host_rows.stride(0) // 8
    source = _Pointer(host_rows) if words is None else words
    _kernels[0][(len(entries),)](source, entries, target, stride, 73, 128, num_warps=2)


def paged_gather(pages: torch.Tensor, entries: torch.Tensor, target: torch.Tensor) -> None:
    """The same from SGLang's page layout: 576 bytes, and 8 bytes elsewhere in the page."""
    if not _kernels:
        _kernels.extend(_gather_kernels())
    _kernels[1][(len(entries),)](pages.view(torch.int64), entries, target, num_warps=2)


class _Pointer:
    """A tensor's address as Triton takes it, for rows with gaps between them."""

    dtype = torch.int64

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


class Fetches:
    """Fetches alone, of `misses` rows for each request."""

    def __init__(self, bench: Bench, batch: int, misses: int) -> None:
        self.bench, self.batch, self.misses = bench, batch, misses
        count = batch * misses
        self.lists = [torch.zeros(count, dtype=torch.int32, device="cuda") for _ in range(CALLS)]
        self.slots = torch.randperm(count, device="cuda").int()
        self.pages = torch.zeros((-(-count // PAGE), LAYOUT.page_bytes), dtype=torch.uint8, device="cuda")
        self.target = torch.zeros(count * 73, dtype=torch.int64, device="cuda")

    def draw(self, total: int, unit: int = 1, ordered: bool = False) -> None:
        """Random runs of `unit` rows, in 512 pages a request at random places among `total` rows."""
        for entries in self.lists:
            runs = torch.rand(self.batch, HISTORY // unit, device="cuda").argsort(1)
            runs = runs[:, : self.misses // unit + 1].sort(1).values
            places = (runs[:, :, None] * unit + torch.arange(unit, device="cuda")).flatten(1)
            owned = torch.randperm(total // PAGE, device="cuda")[: self.batch * (HISTORY // PAGE)]
            found = owned.view(self.batch, -1).gather(1, places // PAGE) * PAGE + places % PAGE
            found = found[:, : self.misses].reshape(-1)
            entries.copy_(found.sort().values if ordered else found)

    def ours(self, rows: torch.Tensor, blocks: int | None = None, **drawn: Any) -> dict[str, float]:
        calls = [
            partial(cuda.fetch_rows, rows, self.pages, LAYOUT, entries, self.slots, None, blocks=blocks)
            for entries in self.lists
        ]
        return self.bench.microseconds(calls, lambda: self.draw(len(rows), **drawn))

    def plain(self, gather: Callable[..., None], rows: torch.Tensor, total: int) -> dict[str, float]:
        calls = [partial(gather, rows, entries, self.target) for entries in self.lists]
        return self.bench.microseconds(calls, lambda: self.draw(total))


def levers(bench: Bench, batches: Sequence[int], misses: int) -> None:
    """The fetch alone: layout of host rows, order of the list, neighbours, size of the region, blocks."""
    whole = rows_view(bench.pool)
    paged = bench.pool[: len(bench.pool) // LAYOUT.page_bytes * LAYOUT.page_bytes].view(-1, LAYOUT.page_bytes)
    for batch in batches:
        fetches = Fetches(bench, batch, misses)
        what = {"batch": batch, "misses": misses}
        for stride in (ROW, 592, 640):
            bench.add("layout", fetches.ours(rows_view(bench.pool, stride)), **what, stride=stride)
        bench.add("layout", fetches.plain(plain_gather, whole, len(whole)), **what, rows="584, plain gather")
        apart = fetches.plain(paged_gather, paged, len(paged) * PAGE)
        bench.add("layout", apart, **what, rows="576 + 8 apart, plain gather")
        for unit in (1, 2, 4, 8):
            bench.add("runs", fetches.ours(whole, unit=unit), **what, unit=unit)
        bench.add("sorted", fetches.ours(whole, ordered=True), **what)
        for layers in (2, *([_parts(bench, batch)] if _parts(bench, batch) > 2 else [])):
            region = rows_view(bench.pool, layers=layers)
            bench.add("region", fetches.ours(region), **what, gib=round(len(region) * ROW / GIB, 2))
        for blocks in (16, 32, 64, 132, 264, 528):
            bench.add("blocks", fetches.ours(whole, blocks), **what, blocks=blocks)


def units(bench: Bench, batches: Sequence[int], misses: int) -> None:
    """resolve and fetch with units of neighbours: whole units are selected, so that the rows are as many."""
    for batch in batches:
        for unit in (1, 2, 4, 8):
            for missed in (0, misses // 8 * 8):
                tiers = Tiers(Want(batch, 512, missed, unit), [rows_view(bench.pool)] * CALLS)
                tiers.at_once(bench, "unit", batch=batch, misses=missed, unit=unit)


def no_misses(bench: Bench, shapes: Sequence[tuple[int, int]]) -> None:
    """A call that misses nothing."""
    for batch, top_k in shapes:
        parts = _parts(bench, batch)
        rows = [rows_view(bench.pool, layer=i % parts, layers=parts) for i in range(CALLS)]
        tiers = Tiers(Want(batch, top_k, 0, hot_per_request=2 * top_k), rows)
        tiers.at_once(bench, "no misses", batch=batch, top_k=top_k)


def shared_prefix(bench: Bench, batches: Sequence[int], misses: int) -> None:
    """All requests select the same entries of one history: each missing row is brought once."""
    for batch in batches:
        tiers = Tiers(Want(batch, 512, misses, shared=True), [rows_view(bench.pool)] * CALLS)
        tiers.at_once(bench, "shared", batch=batch, misses=misses)


def begin_step(bench: Bench, layers: int, batches: Sequence[int]) -> None:
    """The start of a step for all layers: the order of groups, and slots for one write per request."""
    for batch in batches:
        groups, entries = batch * 2048, 1 << 20
        tables = _new_tables(layers, groups, entries, 1)
        counts = torch.zeros((layers, 15), dtype=torch.int64, device="cuda")
        written = torch.zeros(batch, dtype=torch.int64, device="cuda")
        call = partial(cuda.claim_writes, tables, written, None, False, counts)
        timed = bench.microseconds([call] * CALLS, partial(written.random_, PAGE, entries))
        bench.add("begin step", timed, batch=batch, layers=layers, groups=groups)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="sglang-dsv4x bench ops-resolve-fetch", description=__doc__)
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results, with commit and device, to FILE"
    )
    made.add_argument("--pool-gib", type=float, default=8.0, help="pinned host rows, GiB (default 8)")
    made.add_argument("--replays", type=int, default=15, help="timed replays per number (default 15)")
    made.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="requests (default 1 4 16 64)"
    )
    made.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help="what to measure (default: everything)",
    )
    return made


SECTIONS: dict[str, Callable[[Bench, Sequence[int]], None]] = {
    "none": lambda bench, batches: no_misses(bench, [(b, k) for k in (512, 1024, 2048) for b in batches]),
    "upstream": lambda bench, batches: against_upstream(bench, batches, (0, 69, 150, 512), False),
    "compact": lambda bench, batches: against_upstream(bench, batches, (69,), True),
    "units": lambda bench, batches: units(bench, batches, 69),
    "shared": lambda bench, batches: shared_prefix(bench, batches, 69),
    "levers": lambda bench, batches: levers(bench, batches, 69),
    "begin": lambda bench, batches: begin_step(bench, 21, batches),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 when every number was measured."""
    arguments = parser().parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device (torch.cuda.is_available() is False)")
    bench = Bench(arguments.pool_gib, arguments.replays)
    for name in arguments.sections:
        SECTIONS[name](bench, arguments.batches)
        if arguments.json is not None:
            settings = {"pool_gib": arguments.pool_gib, "replays": arguments.replays, "calls": CALLS}
            given = list(argv) if argv is not None else []
            write(arguments.json, record("ops-resolve-fetch", given, settings, bench.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
