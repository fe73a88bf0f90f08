"""The hot cache's CUDA kernels against their torch reference: after the same calls, the same tables, slot by slot,
the same counters, and in every slot the bytes of its host row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sglang_dsv4x.jit_kernels import resolve as reference
from sglang_dsv4x.jit_kernels import resolve_cuda as cuda
from sglang_dsv4x.jit_kernels.layouts import PageLayout, main_layout
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows
from sglang_dsv4x.jit_kernels.resolve import ABSENT, FREE, VALID, SlotTables, TableError

ROWS = {"C4": main_layout(64), "small": PageLayout(64, 24, 8), "float32": main_layout(64, "float32")}


@dataclass(frozen=True)
class Case:
    """One series of calls on tables of two layers."""

    queries: int
    top_k: int
    unit: int = 1
    layout: str = "C4"
    entries: int = 4096
    """Per request; requests share the first half of theirs."""
    groups: int | None = None
    """None: half as many again as one step can need."""
    none: float = 0.05
    """Part of the selections that select nothing."""
    steps: int = 6
    in_flight: bool = False

    def __str__(self) -> str:
        return "-".join(f"{v}" for v in vars(self).values())


CASES = [
    *(Case(1, 512, unit) for unit in (1, 2, 4, 8)),
    *(Case(4, 512, unit) for unit in (1, 2, 4, 8)),
    *(Case(16, 512, unit, steps=4) for unit in (1, 2, 8)),
    Case(1, 512, in_flight=True),
    Case(5, 64, 4, in_flight=True),
    Case(1, 1),
    Case(3, 7, 2),
    Case(2, 2048, entries=2048),
    Case(7, 1024, 2, "small", entries=2048),
    Case(3, 512, 2, "float32", entries=1024),
    Case(64, 512, 1, "small", steps=3),
    Case(64, 512, 2, "small", steps=3),
    Case(64, 2048, 1, "small", steps=2),
    Case(90, 2048, 1, "small", steps=2, entries=8192),
    Case(90, 2048, 2, "small", steps=2, entries=8192),
    Case(2, 512, none=1.0),
    Case(17, 512, none=1.0),
    Case(4, 512, 8, "float32", entries=1024, steps=3),
    Case(1, 2000, 2, "small", entries=2048, groups=1 << 19),
]


def new_tables(layers: int, groups: int, units: int, unit: int, device: str) -> SlotTables:
    def full(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    scratch = cuda.new_scratch(layers, groups, units, torch.device(device)) if device == "cuda" else None
    return SlotTables(
        unit_group=full(layers, units + 1, value=groups),
        group_tag=full(layers, groups + 1, value=units),
        last_used=full(layers, groups + 1, value=FREE),
        held=full(layers, groups + 1, value=FREE, dtype=torch.int64),
        state=full(layers, groups + 1, unit, value=ABSENT, dtype=torch.uint8),
        order=torch.arange(groups, device=device).repeat(layers, 1),
        clock=full(1, value=0),
        scratch=scratch,
    )


class Pair:
    """The same calls on both, and everything compared."""

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, ROWS[case.layout]
        shared = case.entries // 2 // 64 * 64
        own = case.entries - shared
        self.total = 64 + shared + case.queries * own
        first = 64 + shared + torch.arange(case.queries)[:, None] * own
        self.entries_of = torch.cat(
            [(64 + torch.arange(shared)).expand(case.queries, -1), first + torch.arange(own)], 1
        ).int()
        units = -(-self.total // case.unit)
        groups = case.groups or case.queries * (case.top_k + 2) * 3 // 2 + 8
        self.tables = [new_tables(2, groups, units, case.unit, device) for device in ("cpu", "cuda")]
        self.counts = [torch.zeros((2, 15), dtype=torch.int64, device=device) for device in ("cpu", "cuda")]
        row_bytes = self.layout.row_bytes
        generator = torch.Generator().manual_seed(1)
        self.host_rows = torch.randint(
            0, 256, (2, self.total, row_bytes), dtype=torch.uint8, generator=generator
        ).pin_memory()
        self.pages = torch.full(
            (2, -(-groups * case.unit // 64), self.layout.page_bytes), 7, dtype=torch.uint8, device="cuda"
        )

    def same(self) -> None:
        for name, left, right in zip(SlotTables._fields, *(t.tensors for t in self.tables), strict=False):
            if name == "held":
                left, right = left >> reference.HELD_SHIFT, right >> reference.HELD_SHIFT
            if name in ("last_used", "held"):
                left, right = left[:, :-1], right[:, :-1]  # the reference also writes to the spare group's
            if name != "order":
                assert torch.equal(left, right.cpu()), name
        columns = slice(1, None)  # the kernel leaves ABSENT alone
        assert torch.equal(self.counts[0][:, columns], self.counts[1].cpu()[:, columns])
        assert self.tables[1].scratch.fault.tolist()[0] == 0

    def begin(self, entries: torch.Tensor, again: torch.Tensor | None, in_flight: bool) -> None:
        reference.claim_writes(self.tables[0], entries, again, in_flight, self.counts[0])
        cuda.claim_writes(
            self.tables[1], entries.cuda(), None if again is None else again.cuda(), in_flight, self.counts[1]
        )

    def write(self, layer: int, entries: torch.Tensor) -> None:
        rows = torch.randint(0, 256, (len(entries), self.layout.row_bytes), dtype=torch.uint8)
        torch.cuda.synchronize()
        expected = self.host_rows[layer].clone()
        reference.write_rows(
            self.tables[0].layer(layer),
            entries,
            rows,
            self.pages[layer].cpu(),
            self.layout,
            expected,
            self.counts[0][layer],
        )
        cuda.write_rows(
            self.tables[1].layer(layer),
            entries.cuda(),
            rows.cuda(),
            self.pages[layer],
            self.layout,
            self.host_rows[layer],
            self.counts[1][layer],
        )
        torch.cuda.synchronize()
        assert torch.equal(self.host_rows[layer], expected)

    def read(self, layer: int) -> None:
        """Every slot that is valid holds its host row."""
        tables = self.tables[1].layer(layer)
        slots = (tables.state.view(-1) == VALID).nonzero().squeeze(1)
        entries = tables.group_tag[slots // tables.unit].long() * tables.unit + slots % tables.unit
        expected = self.host_rows[layer].index_select(0, entries.cpu()).cuda()
        assert torch.equal(gather_rows(self.pages[layer], self.layout, slots), expected)

    def check_selection(self, slots: torch.Tensor, entries: torch.Tensor, layer: int) -> None:
        chosen = entries >= 64
        assert torch.equal(slots >= 0, chosen)
        rows = gather_rows(self.pages[layer], self.layout, slots[chosen].long().cuda())
        assert torch.equal(rows, self.host_rows[layer].index_select(0, entries[chosen].long()).cuda())


def selection(pair: Pair, step: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries and positions [T, K]: part of the last step's, distinct within a query."""
    case = pair.case
    order = torch.rand(case.queries, case.entries, generator=random)
    # Half of the selection stays from step to step.
    stay = torch.rand(case.queries, case.entries, generator=torch.Generator().manual_seed(9)).argsort(1)
    order.scatter_(1, stay[:, : case.top_k // 2], -1.0)
    positions = order.argsort(1)[:, : case.top_k].sort(1).values.int()
    entries = pair.entries_of.gather(1, positions.long())
    entries[torch.rand(entries.shape, generator=random) < case.none] = -1
    entries[0, 0] = step % 2 * 63  # page 0 counts as none
    return entries.contiguous(), positions.contiguous()


def series(case: Case, at_once: bool) -> None:
    pair = Pair(case)
    random = torch.Generator().manual_seed(0)
    lens = torch.full((case.queries,), case.entries, dtype=torch.int32)
    lens[0] -= case.unit  # the last unit of query 0 is not there yet, or not all of it
    for step in range(case.steps):
        entries, positions = selection(pair, step, random)
        beyond = positions >= lens[:, None]
        entries[beyond] = -1
        written = entries[:, -1].long().clamp(min=0)
        again = torch.rand(case.queries, generator=random) < 0.5 if step % 2 else None
        pair.begin(written, again, case.in_flight)
        pair.same()
        for layer in (1, 0):
            real = torch.unique(written[written >= 64])
            pair.write(layer, torch.cat([real, torch.zeros(2, dtype=torch.int64)]))
            pair.same()
            left, right = (t.layer(layer) for t in pair.tables)
            device_arguments = (entries.cuda(), positions.cuda(), lens.cuda())
            found = reference.resolve(left, entries, positions, lens, case.in_flight, pair.counts[0][layer])
            if at_once:
                reference.finish_fetch(left, found.fetch_slots, None)
                slots = cuda.resolve_rows(
                    right,
                    *device_arguments,
                    case.in_flight,
                    pair.counts[1][layer],
                    pair.pages[layer],
                    pair.layout,
                    pair.host_rows[layer],
                )
                assert torch.equal(slots.cpu(), found.slots)
            else:
                got = cuda.resolve(right, *device_arguments, case.in_flight, pair.counts[1][layer])
                assert torch.equal(got.slots.cpu(), found.slots)
                count = int(got.fetch_count)
                assert torch.equal(got.fetch_entries[:count].cpu().long(), found.fetch_entries)
                assert torch.equal(got.fetch_slots[:count].cpu().long(), found.fetch_slots)
                pair.same()
                cuda.fetch_rows(
                    pair.host_rows[layer],
                    pair.pages[layer],
                    pair.layout,
                    got.fetch_entries,
                    got.fetch_slots,
                    got.fetch_count,
                )
                if case.in_flight and step % 2:
                    continue  # stays on its way for good: the next steps go round it
                reference.finish_fetch(left, found.fetch_slots, None)
                cuda.finish_fetch(right, got.fetch_slots, got.fetch_count)
            pair.same()
            pair.check_selection(found.slots, entries, layer)
            pair.read(layer)
    if case.none < 1 and case.queries * case.top_k > 1:
        assert bool((pair.counts[0][:, reference.MISSES] > 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True], ids=["apart", "at once"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_leave_the_tables_that_the_reference_leaves(case: Case, at_once: bool) -> None:
    if case.in_flight and not at_once:
        # Two steps of six stay on their way: they need groups of their own.
        case = Case(**{**vars(case), "groups": case.queries * (case.top_k + 2) * 5})
    series(case, at_once)


@pytest.mark.gpu
def test_a_captured_graph_resolves_whatever_its_inputs_hold_when_it_is_replayed() -> None:
    case = Case(4, 512, 2)
    pair = Pair(case)
    random = torch.Generator().manual_seed(0)
    lens = torch.full((case.queries,), case.entries, dtype=torch.int32)
    entries, positions = (torch.empty((4, 512), dtype=torch.int32, device="cuda") for _ in range(2))
    written = torch.zeros(4, dtype=torch.int64, device="cuda")
    device_lens, tables = lens.cuda(), pair.tables[1]

    def step() -> list[torch.Tensor]:
        cuda.claim_writes(tables, written, None, False, pair.counts[1])
        slots = []
        for layer in range(2):
            arguments = (tables.layer(layer), entries, positions, device_lens, False, pair.counts[1][layer])
            where = (pair.pages[layer], pair.layout, pair.host_rows[layer])
            slots.append(cuda.resolve_rows(*arguments, *where))
        return slots

    entries.fill_(-1)
    positions.zero_()
    step()
    reference.claim_writes(pair.tables[0], torch.zeros(4, dtype=torch.int64), None, False, pair.counts[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = step()
    for number in range(5):
        chosen, places = selection(pair, number, random)
        entries.copy_(chosen)
        positions.copy_(places)
        graph.replay()
        reference.claim_writes(pair.tables[0], torch.zeros(4, dtype=torch.int64), None, False, pair.counts[0])
        for layer in range(2):
            left = pair.tables[0].layer(layer)
            found = reference.resolve(left, chosen, places, lens, False, pair.counts[0][layer])
            reference.finish_fetch(left, found.fetch_slots, None)
            assert torch.equal(slots[layer].cpu(), found.slots)
        pair.counts[0][:, reference.SELECTED] = pair.counts[1][:, reference.SELECTED].cpu()
        pair.same()


@pytest.mark.gpu
def test_selections_that_name_an_entry_twice_share_one_slot() -> None:
    pair = Pair(Case(2, 8))
    entries = torch.tensor([[100, 101, 100, 102, 101, -1, 100, 103], [103, 100, 104, 104, -1, -1, 102, 100]])
    entries = entries.int()
    lens = torch.full((2,), 4096, dtype=torch.int32)
    nothing = torch.zeros(1, dtype=torch.int64)
    pair.begin(nothing, None, False)
    found = reference.resolve(pair.tables[0].layer(0), entries, entries - 64, lens, False, pair.counts[0][0])
    reference.finish_fetch(pair.tables[0].layer(0), found.fetch_slots, None)
    where = (pair.pages[0], pair.layout, pair.host_rows[0])
    on = (entries.cuda(), (entries - 64).cuda(), lens.cuda())
    slots = cuda.resolve_rows(pair.tables[1].layer(0), *on, False, pair.counts[1][0], *where)
    assert torch.equal(slots.cpu(), found.slots)
    pair.same()
    pair.read(0)


FAULTS = {
    "beyond what its request has written": (100, 36, 36, 64),
    r"needs 200 more groups and can replace 100": (range(100, 300), 0, 1000, 64),
    "before this layer wrote it": (100, 0, 100, 100),
}


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_reported_and_no_kernel_hangs(message: str, at_once: bool) -> None:
    chosen, position, length, written = FAULTS[message]
    chosen = [chosen] if isinstance(chosen, int) else list(chosen)
    pair = Pair(Case(1, len(chosen), groups=100))
    tables, counts = pair.tables[1], pair.counts[1]
    cuda.claim_writes(tables, torch.tensor([written if written >= 100 else 0]).cuda(), None, False, counts)
    entries = torch.tensor([chosen], dtype=torch.int32, device="cuda")
    lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    arguments = (tables.layer(0), entries, torch.full_like(entries, position), lens, False, counts[0])
    if at_once:
        cuda.resolve_rows(*arguments, pair.pages[0], pair.layout, pair.host_rows[0])
    else:
        cuda.resolve(*arguments)
    torch.cuda.synchronize()
    with pytest.raises(TableError, match=message):
        cuda.raise_fault(tables)


@pytest.mark.gpu
def test_a_write_that_was_not_announced_is_reported() -> None:
    pair = Pair(Case(1, 8))
    tables = pair.tables[1]
    cuda.claim_writes(tables, torch.tensor([100]).cuda(), None, False, pair.counts[1])
    rows = torch.zeros((1, 584), dtype=torch.uint8, device="cuda")
    where = (pair.pages[0], pair.layout, pair.host_rows[0], pair.counts[1][0])
    cuda.write_rows(tables.layer(0), torch.tensor([101]).cuda(), rows, *where)
    torch.cuda.synchronize()
    with pytest.raises(TableError, match="entry 101 is written without being announced"):
        cuda.raise_fault(tables)


@pytest.mark.gpu
def test_more_writes_than_one_block_takes_are_placed_alike() -> None:
    pair = Pair(Case(8, 512, 2))
    for written in (torch.arange(64, 1364), torch.arange(900, 1500), torch.arange(64, 1364)):
        pair.begin(written, torch.arange(len(written)) % 3 > 0, False)
        pair.same()
        for layer in range(2):
            pair.write(layer, written)
        pair.same()


@pytest.mark.parametrize("selections", [1, 31, 512, 2048, 2049, 8192, 32768, 131072, 131073, 540672])
@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("groups", [1000, 1 << 20])
@pytest.mark.parametrize("multiprocessors", [132, 20, 1024])
def test_a_launch_covers_every_selection_with_blocks_that_fit_at_once(
    selections: int, queries: int, groups: int, multiprocessors: int
) -> None:
    if selections > multiprocessors * 4096:
        with pytest.raises(ValueError, match="--max-running-requests"):
            cuda.plan_launch(selections, queries, groups, 592, multiprocessors)
        return
    plan = cuda.plan_launch(selections, queries, groups, 592, multiprocessors)
    if plan.items == 0:
        assert 64 * plan.warps >= selections and plan.lanes >= 2 * selections
        assert plan.lanes & (plan.lanes - 1) == 0 and plan.blocks * 32 >= selections
    else:
        assert plan.blocks * plan.warps * plan.lanes * plan.items >= selections
        assert plan.lanes <= 32
    assert plan.blocks <= min(multiprocessors, 256) and plan.warps <= 32
