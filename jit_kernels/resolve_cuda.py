"""CUDA backend of the hot cache's ops (`resolve.py`): no host synchronisation, no size that depends on data.

Every op has the tables that its torch reference leaves, slot by slot. All of them go together: `claim_writes` keeps
the queue in which the others look for groups to replace. Addresses and sizes are the only arguments that a
captured graph holds; step, counts and lists are on the device.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from .layouts import C4_ENTRIES_PER_PAGE, PageLayout
from .nvcc import load
from .registry import register
from .resolve import LayerTables, Resolution, Scratch, SlotTables, TableError, place_writes

_STRETCH = 1024 * 8
"""Groups that a block of the queue's kernel covers."""

_MOST_WRITES = 1024
"""Entries that one block per layer claims slots for; a prefill's chunk with more goes through torch."""

_SHARED_BYTES = 196 * 1024
"""Shared memory of a block of `resolve`, at most; the rest of a Hopper multiprocessor's 228 KiB is L1."""

_WORD_BYTES = 8
"""What the kernels move at once."""

_FAULTS = {
    1: "step {step} needs {what} more groups and can replace {there}",
    2: "entry {what} is selected in step {step} before this layer wrote it",
    3: "entry {what} is selected in step {step} and lies beyond what its request has written",
    4: "entry {what} is written without being announced at the start of the step",
}


class _Tables(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("unit_group", "group_tag", "last_used", "held", "state", "clock")
        ),
        *((name, ctypes.c_int) for name in ("groups", "units", "shift", "layers")),
    )


class _Scratch(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in Scratch._fields)


class _Pages(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("host_rows", ctypes.c_void_p),
        ("host_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("page_bytes", "value_bytes", "scale_bytes")),
    )


class _Resolve(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        ("scratch", _Scratch),
        ("pages", _Pages),
        *(
            (name, ctypes.c_void_p)
            for name in ("entries", "positions", "lens", "slots", *Resolution._fields[1:], "counts")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("selections", "top_k", "chunk_lanes", "buffered_rows", "in_flight")
        ),
    )


class _Fetch(ctypes.Structure):
    _fields_ = (
        ("pages", _Pages),
        *((name, ctypes.c_void_p) for name in ("entries", "slots", "count")),
        ("most", ctypes.c_int),
    )


class _Finish(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        *((name, ctypes.c_void_p) for name in ("slots", "count")),
        ("most", ctypes.c_int),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        ("scratch", _Scratch),
        *((name, ctypes.c_void_p) for name in ("entries", "used_again", "counts")),
        *((name, ctypes.c_int) for name in ("count_columns", "writes", "in_flight")),
    )


class _Write(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        ("scratch", _Scratch),
        ("pages", _Pages),
        *((name, ctypes.c_void_p) for name in ("entries", "rows", "counts")),
        ("writes", ctypes.c_int),
    )


class Launch(NamedTuple):
    """How `resolve` covers a selection of a given size."""

    items: int
    """Selections per lane: 1 or 4. 0: few selections, which every block looks up alike."""
    lanes: int
    """Lanes of a warp that look selections up: fewer where there are few, so that reading rows is spread over
    the whole chip. With few selections: places of the hash table."""
    blocks: int
    warps: int


_FEW = 2048
_FEW_QUERIES = 4
_FEW_GROUPS = 1 << 18
_FEW_BLOCKS = 64
"""Up to which selections, queries and groups every block looks everything up, in its own shared memory
(`resolve_few.cuh`); and with how many blocks. Few queries, since each reads what it misses by itself."""

_ROWS_IN_FLIGHT = 8192
"""Rows that one call has on their way at most, about: the link needs fewer, and more slow each other down."""


_FEW_BYTES = 96 * 1024
"""Rows on their way in a block of that kernel, at most."""


def plan_launch(selections: int, queries: int, groups: int, row_bytes: int, multiprocessors: int) -> Launch:
    """One block per multiprocessor at most, since blocks wait for each other. row_bytes: shared memory for the
    rows that one selection may bring.

    Raises: ValueError for more selections than one launch covers (540,672 on a chip of 132 multiprocessors).
    """
    few = selections <= _FEW and queries <= _FEW_QUERIES and groups <= _FEW_GROUPS
    few &= -(-selections // _FEW_BLOCKS) * row_bytes <= _FEW_BYTES
    if few and multiprocessors >= _FEW_BLOCKS:
        warps = min(32, max(8, -(-selections // 32)))
        return Launch(0, 2 << max(5, (selections - 1).bit_length()), min(selections, _FEW_BLOCKS), warps)
    chip = min(multiprocessors, 256)
    if selections > chip * 32 * 32 * 4:
        raise ValueError(
            f"{selections} selections are more than the {chip * 32 * 32 * 4} that one call resolves; "
            f"lower --max-running-requests"
        )
    for items, lanes in ((1, 8), (1, 16), (1, 32), (4, 32)):
        warps = -(-selections // (items * lanes * chip))
        if warps <= 32:
            break
    return Launch(items, lanes, min(chip, -(-selections // (items * lanes * warps))), warps)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def new_scratch(layers: int, groups: int, units: int, device: torch.device) -> Scratch:
    """Memory of this backend for tables of that size."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Scratch(
        queue=torch.arange(groups, dtype=torch.int32, device=device).repeat(layers, 2, 1),
        stretch_counts=zeros(layers, -(-groups // _STRETCH), 4),
        previous_clock=zeros(1),
        claims=zeros(units + 1, dtype=torch.int64).fill_(-1),
        leading=zeros(units + 1, dtype=torch.int64),
        chunk_counts=zeros(32 * _multiprocessors(device), dtype=torch.int64),
        arrived=zeros(1, dtype=torch.int64).fill_(1 << 16),
        failed=zeros(1),
        fault=torch.zeros(4, dtype=torch.int32).pin_memory(),
    )


def raise_fault(tables: SlotTables) -> None:
    """Raises TableError if a kernel has reported a fault. Looks at host memory and waits for nothing: a fault may
    show one step late."""
    if tables.scratch is None:
        return
    kind, what, there, step = tables.scratch.fault.tolist()
    if kind:
        raise TableError(_FAULTS[kind].format(what=what, there=there, step=step))


def _scratch(scratch: Scratch | None) -> Scratch:
    if scratch is None:
        raise ValueError("the CUDA backend needs tables that were made for a CUDA device")
    return scratch


def _tables(tables: LayerTables | SlotTables, layers: int) -> _Tables:
    return _Tables(
        tables.unit_group.data_ptr(),
        tables.group_tag.data_ptr(),
        tables.last_used.data_ptr(),
        tables.held.data_ptr(),
        tables.state.data_ptr(),
        tables.clock.data_ptr(),
        tables.groups,
        tables.units,
        tables.unit.bit_length() - 1,
        layers,
    )


def _scratch_of(scratch: Scratch | None, layer: int) -> _Scratch:
    made = _scratch(scratch)
    pointers = [tensor.data_ptr() for tensor in made]
    pointers[Scratch._fields.index("queue")] = made.queue[layer].data_ptr()
    return _Scratch(*pointers)


def _pages(pages: torch.Tensor, layout: PageLayout, host_rows: torch.Tensor) -> _Pages:
    if layout.entries != C4_ENTRIES_PER_PAGE:
        raise ValueError(f"a C4 page has {C4_ENTRIES_PER_PAGE} entries, not {layout.entries}")
    if (
        layout.value_bytes % _WORD_BYTES
        or layout.scale_bytes % _WORD_BYTES
        or host_rows.stride(0) % _WORD_BYTES
    ):
        raise ValueError(
            f"values, scales and host rows must be multiples of {_WORD_BYTES} bytes, not {layout}"
        )
    if pages.dtype != torch.uint8 or host_rows.dtype != torch.uint8 or not pages.is_contiguous():
        raise ValueError("pages and host rows must be uint8, pages contiguous")
    if host_rows.device.type == "cpu" and not host_rows.is_pinned():
        raise ValueError("host rows must be pinned, for the device to read them")
    return _Pages(
        pages.data_ptr(),
        host_rows.data_ptr(),
        host_rows.stride(0),
        layout.page_bytes,
        layout.value_bytes,
        layout.scale_bytes,
    )


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cuda:
        raise ValueError(
            f"{name} must be contiguous {dtype} on a CUDA device, not {tensor.dtype} {tensor.device} "
            f"{list(tensor.shape)} strides {list(tensor.stride())}"
        )
    return tensor.data_ptr()


@lru_cache
def _library(name: str) -> ctypes.CDLL:
    library = load(name)
    _check(library.tier_prepare(), name)
    return library


def prepare() -> None:
    """Builds and loads all kernels of this module now, for the current device.

    Raises: KernelError where nvcc is missing or fails.
    """
    for name in ("resolve", "fetch_rows", "claim_writes"):
        _library(name)


def _stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _check(error: int, op: str) -> None:
    if error:
        raise RuntimeError(f"the CUDA kernel of {op} cannot be launched: CUDA error {error}")


def _launch_resolve(
    tables: LayerTables,
    entries: torch.Tensor,
    positions: torch.Tensor,
    lens: torch.Tensor,
    in_flight: bool,
    counts: torch.Tensor,
    slots: torch.Tensor,
    pages: _Pages | None,
    found: Resolution | None,
) -> None:
    for name, tensor in (("entries", entries), ("positions", positions), ("lens", lens)):
        _expect(name, tensor, torch.int32)
    if positions.shape != entries.shape or lens.shape != entries.shape[:1]:
        raise ValueError(
            f"entries {list(entries.shape)}, positions {list(positions.shape)} and lens {list(lens.shape)} must be "
            f"[T, K], [T, K] and [T]"
        )
    # The copy engine moves whole 16 bytes (`Rows` in resolve.cu).
    buffer = 0 if pages is None else -(-(pages.value_bytes + pages.scale_bytes + 8) // 16) * 16
    plan = plan_launch(
        entries.numel(),
        entries.shape[0],
        tables.groups,
        buffer * tables.unit,
        _multiprocessors(entries.device),
    )
    threads = 32 * plan.warps
    if plan.items == 0:
        shared = 4 * (4 * plan.lanes + entries.numel() + tables.groups // 32 + 1)
        shared = -(-shared // 16) * 16
        rows = -(-entries.numel() // plan.blocks) * tables.unit
        shared += rows * buffer
    else:
        shared = threads * plan.items * 4
        rows = min(
            plan.lanes * plan.items * tables.unit,
            -(-_ROWS_IN_FLIGHT // (plan.blocks * plan.warps)),
            (_SHARED_BYTES - shared) // (plan.warps * max(buffer, 1)),
        )
        shared += plan.warps * rows * buffer
    lists = (0, 0, 0)
    if found is not None:
        assert found.fetch_count is not None
        lists = (found.fetch_entries.data_ptr(), found.fetch_slots.data_ptr(), found.fetch_count.data_ptr())
    arguments = _Resolve(
        _tables(tables, 1),
        _scratch_of(tables.scratch, tables.layer_index),
        _Pages() if pages is None else pages,
        entries.data_ptr(),
        positions.data_ptr(),
        lens.data_ptr(),
        slots.data_ptr(),
        *lists,
        _expect("counts", counts, torch.int64),
        entries.numel(),
        entries.shape[1],
        plan.lanes,
        rows,
        in_flight,
    )
    error = _library("resolve").tier_resolve(
        ctypes.byref(arguments),
        plan.items,
        pages is not None,
        plan.blocks,
        threads,
        shared,
        _stream(entries.device),
    )
    _check(error, "resolve")


@register("resolve", "cuda")
def resolve(
    tables: LayerTables,
    entries: torch.Tensor,
    positions: torch.Tensor,
    lens: torch.Tensor,
    in_flight: bool,
    counts: torch.Tensor,
) -> Resolution:
    """`resolve.resolve`; the lists have room for T * K * u rows, of which `fetch_count` count."""
    most = entries.numel() * tables.unit
    lists = torch.empty((2, most), dtype=torch.int32, device=entries.device)
    count = torch.empty(1, dtype=torch.int32, device=entries.device)
    found = Resolution(torch.empty_like(entries), lists[0], lists[1], count)
    if most == 0:
        count.zero_()
        return found
    _launch_resolve(tables, entries, positions, lens, in_flight, counts, found.slots, None, found)
    return found


@register("resolve_rows", "cuda")
def resolve_rows(
    tables: LayerTables,
    entries: torch.Tensor,
    positions: torch.Tensor,
    lens: torch.Tensor,
    in_flight: bool,
    counts: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    host_rows: torch.Tensor,
) -> torch.Tensor:
    """`resolve.resolve_rows` in one kernel, which looks for groups while the rows are on their way."""
    if host_rows.data_ptr() % 16 or host_rows.shape[0] * host_rows.stride(0) % 16:
        raise ValueError("host rows must begin and end at multiples of 16 bytes, for the copy engine")
    slots = torch.empty_like(entries)
    if entries.numel():
        where = _pages(pages, layout, host_rows)
        _launch_resolve(tables, entries, positions, lens, in_flight, counts, slots, where, None)
    return slots


@register("fetch_rows", "cuda")
def fetch_rows(
    host_rows: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    entries: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor | None,
    *,
    blocks: int | None = None,
) -> None:
    """`resolve.fetch_rows`, from pinned memory by the device. blocks: of 8 warps, a row each; None: four per
    multiprocessor."""
    most = entries.shape[0]
    if most == 0:
        return
    arguments = _Fetch(
        _pages(pages, layout, host_rows),
        _expect("entries", entries, torch.int32),
        _expect("slots", slots, torch.int32),
        0 if count is None else _expect("count", count, torch.int32),
        most,
    )
    limit = 4 * _multiprocessors(pages.device) if blocks is None else blocks
    error = _library("fetch_rows").tier_fetch_rows(
        ctypes.byref(arguments), min(limit, most), 256, _stream(pages.device)
    )
    _check(error, "fetch_rows")


@register("finish_fetch", "cuda")
def finish_fetch(tables: LayerTables, slots: torch.Tensor, count: torch.Tensor | None) -> None:
    """`resolve.finish_fetch`."""
    if slots.shape[0] == 0:
        return
    arguments = _Finish(
        _tables(tables, 1),
        _expect("slots", slots, torch.int32),
        0 if count is None else _expect("count", count, torch.int32),
        slots.shape[0],
    )
    blocks = min(_multiprocessors(slots.device), -(-slots.shape[0] // 256))
    error = _library("fetch_rows").tier_finish_fetch(
        ctypes.byref(arguments), blocks, 256, _stream(slots.device)
    )
    _check(error, "finish_fetch")


@register("claim_writes", "cuda")
def claim_writes(
    tables: SlotTables,
    entries: torch.Tensor,
    used_again: torch.Tensor | None,
    in_flight: bool,
    counts: torch.Tensor,
) -> None:
    """`resolve.claim_writes`, and the order in which this step's ops replace groups. More than 1,024 writes, a
    prefill's, are placed by torch, which waits for the device."""
    entries = entries.long().contiguous()
    few = entries.shape[0] <= _MOST_WRITES
    again = None if used_again is None else used_again.contiguous().view(torch.uint8)
    arguments = _Step(
        _tables(tables, tables.state.shape[0]),
        _scratch_of(tables.scratch, 0),
        entries.data_ptr(),
        0 if again is None else again.data_ptr(),
        _expect("counts", counts, torch.int64),
        counts.shape[1],
        entries.shape[0],
        in_flight,
    )
    threads = 32 * -(-entries.shape[0] // 32) if few else 0
    stretches = _scratch(tables.scratch).stretch_counts.shape[1]
    error = _library("claim_writes").tier_begin_step(
        ctypes.byref(arguments), stretches, threads, _stream(tables.clock.device)
    )
    _check(error, "claim_writes")
    if not few:
        place_writes(tables, entries, used_again, in_flight, counts)


@register("write_rows", "cuda")
def write_rows(
    tables: LayerTables,
    entries: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    host_rows: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """`resolve.write_rows`, with the host rows written by the device."""
    if rows.shape != (entries.shape[0], layout.row_bytes):
        raise ValueError(f"rows must be [{entries.shape[0]}, {layout.row_bytes}], not {list(rows.shape)}")
    if entries.shape[0] == 0:
        return
    rows = rows.contiguous()
    if rows.data_ptr() % _WORD_BYTES:
        rows = rows.clone()
    arguments = _Write(
        _tables(tables, 1),
        _scratch_of(tables.scratch, tables.layer_index),
        _pages(pages, layout, host_rows),
        _expect("entries", entries, torch.int64),
        _expect("rows", rows, torch.uint8),
        _expect("counts", counts, torch.int64),
        entries.shape[0],
    )
    error = _library("claim_writes").tier_write_rows(
        ctypes.byref(arguments), -(-entries.shape[0] // 4), 128, _stream(pages.device)
    )
    _check(error, "write_rows")
