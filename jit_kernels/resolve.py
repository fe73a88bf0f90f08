"""The hot cache's tables: which entries are in which slots, and every operation that changes that.

An aligned run of u neighbouring entries is a *unit*; a *group* is u neighbouring slots and holds one unit or
none. Entry e of a unit in group g sits in slot g * u + e % u.

Total order: these operations run on the forward stream, one after the other, and nothing else changes the
tables. Victims are the groups unused longest, the lower group number first among equals. What a step writes
takes them in rising order of the units, what a layer misses in the order in which the selection first names
it. So a run is reproducible, and a kernel that does as much at once ends with the same tables.

The tables have one group and one unit more than there are: group G is where cold units point to, unit U is
what free groups are tagged with. Neither ever has a slot in use. So no operation branches on cold or free:
what it would write for them lands in the spare place.

This is the torch reference and the backend of a machine without a GPU. On CPU torch sizes some results by
their data; the CUDA backend (`resolve_cuda.py`) keeps these counts on the device (marked *device-side count*).
What raises `TableError` here sets a flag there, which the host looks at without waiting (`Scratch.fault`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .layouts import C4_ENTRIES_PER_PAGE, PageLayout
from .paged_rows import copy_rows, scatter_rows
from .registry import register

ABSENT, VALID, PENDING, WRITING = 0, 1, 2, 4
"""State of a slot, bits. VALID: it holds its entry's bytes. PENDING: a fetch into it is on its way. WRITING:
this step writes its entry and this layer has not done so yet; until then there is nothing to read. ABSENT:
nobody asked for the entry, or its owner has not written it yet. PENDING goes with one of the others when a
location changed hands while a fetch for its previous owner was on its way."""

STATES = 8
"""Length of a histogram of states."""

SELECTED, MISSES, REPLACED, FETCHED, WRITTEN = range(STATES, STATES + 5)
"""Columns of a layer's counters; the first STATES say how many selections found their slot in each state,
where ABSENT also counts those that selected nothing (the CUDA backend leaves that column alone)."""

GROUP_BITS = 23
GROUP_MASK = (1 << GROUP_BITS) - 1
"""A word of `unit_group` is a group and, above it, a bit per member."""

FREE = -1
"""Age of a group that holds nothing."""

NO_SLOT = -1

HELD_SHIFT = 32

NEVER = torch.iinfo(torch.int64).max
"""Sort key of a group that must not be replaced."""


class TableError(RuntimeError):
    """Too few groups, or operations out of order. The tables cannot be used any more."""


class LayerTables(NamedTuple):
    """State of one layer: views into `SlotTables`, and its constants."""

    unit_group: torch.Tensor
    """int32 [U + 1]: the group that holds a unit; G: cold. Bit 23 + j: member j's slot is VALID and nothing
    else, so that a hit needs this word only."""
    group_tag: torch.Tensor
    """int32 [G + 1]: the unit that a group holds; U: free."""
    last_used: torch.Tensor
    """int32 [G + 1]: step of the last use; 0 after a prefill wrote it without using it again; -1: free."""
    held: torch.Tensor
    """int64 [G + 1]: last step that selected or wrote a member, times 2**32; in that step the group is not
    replaced. The CUDA backend notes in the lower half which call gave the group away. -1: free."""
    state: torch.Tensor
    """uint8 [G + 1, u]: ABSENT, or bits VALID, PENDING, WRITING."""
    order: torch.Tensor
    """int64 [G]: 0, 1, 2, ...: which of two equally old groups goes first. Constant."""
    clock: torch.Tensor
    """int32 [1], of all layers: the step. `claim_writes` begins a new one. On the device, since a captured
    graph must not hold the number of the step in which it was captured."""
    scratch: Scratch | None
    """What the CUDA backend needs besides; None where it cannot serve."""
    layer_index: int
    """Number of the layer."""
    unit: int
    """u: 1, 2, 4 or 8."""
    shift: int
    """log2(u)."""
    groups: int
    """G."""
    units: int
    """U."""


class Scratch(NamedTuple):
    """Memory of the CUDA backend, of all layers, that says nothing about the cache's content between steps."""

    queue: torch.Tensor
    """int32 [L, 2, G]: all groups, unused longest first, as of the start of the step; which of two: the
    clock's parity."""
    stretch_counts: torch.Tensor
    """int32 [L, stretches, 4]."""
    previous_clock: torch.Tensor
    """int32 [1]."""
    claims: torch.Tensor
    """int64 [U + 1]: who claimed a unit in which call; later calls count as lower, so it is never reset."""
    leading: torch.Tensor
    """int64 [U + 1]: how far a claimed unit is filled, and in which call."""
    chunk_counts: torch.Tensor
    """int64 [32 * multiprocessors]: claims of each warp."""
    arrived: torch.Tensor
    """int64 [1]: blocks that have arrived at the barrier, 65,536 a call."""
    failed: torch.Tensor
    """int32 [1]."""
    fault: torch.Tensor
    """int32 [4], pinned host memory: kind (0: none), what, how many there are, step."""


class SlotTables(NamedTuple):
    """State of L layers: the tensors of `LayerTables` with a leading dimension L."""

    unit_group: torch.Tensor
    group_tag: torch.Tensor
    last_used: torch.Tensor
    held: torch.Tensor
    state: torch.Tensor
    order: torch.Tensor
    clock: torch.Tensor
    scratch: Scratch | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them but the scratch."""
        return self[:-1]

    @property
    def unit(self) -> int:
        return self.state.shape[2]

    @property
    def groups(self) -> int:
        return self.group_tag.shape[1] - 1

    @property
    def units(self) -> int:
        return self.unit_group.shape[1] - 1

    def layer(self, index: int) -> LayerTables:
        """One layer's tables, sharing memory with these."""
        return LayerTables(
            self.unit_group[index],
            self.group_tag[index],
            self.last_used[index],
            self.held[index],
            self.state[index],
            self.order[index],
            self.clock,
            self.scratch,
            index,
            self.unit,
            self.unit.bit_length() - 1,
            self.groups,
            self.units,
        )


class Resolution(NamedTuple):
    """Result of `resolve`. Slots of missing and pending entries may be read only after their fetch is
    joined."""

    slots: torch.Tensor
    """int32 [T, K]: slot of each selected entry, -1 where none was selected."""
    fetch_entries: torch.Tensor
    """int [F]: entries whose bytes must be brought, each once, units in the order in which the selection
    first names a missing member, members of a unit in rising order."""
    fetch_slots: torch.Tensor
    """int [F]: where they go."""
    fetch_count: torch.Tensor | None
    """int32 [1]: how many of the F count; None: all."""


class Lookup(NamedTuple):
    """Result of `lookup`."""

    slots: torch.Tensor
    """int64 [N]: slot of each entry; one of the spare group's where its unit is cold."""
    state: torch.Tensor
    """uint8 [N]: what is in the slot now."""


def lookup(tables: LayerTables, entries: torch.Tensor) -> Lookup:
    """Where entries of one layer are. Does not modify the tables. entries: int64 [N] in [0, E)."""
    groups = tables.unit_group.index_select(0, entries >> tables.shift) & GROUP_MASK
    slots = (groups << tables.shift) + (entries & (tables.unit - 1))
    return Lookup(slots, tables.state.view(-1).index_select(0, slots))


def _note_valid(
    unit_group: torch.Tensor, group_tag: torch.Tensor, state: torch.Tensor, groups: torch.Tensor
) -> None:
    """Sets the member bits of the words of `groups` (int64 [..., N], possibly repeated) from their slots'
    states. Modifies unit_group [..., U + 1]; group_tag [..., G + 1] and state [..., G + 1, u] as in the
    tables."""
    unit = state.shape[-1]
    here = groups.unsqueeze(-1).expand(*groups.shape, unit)
    bits = torch.arange(GROUP_BITS, GROUP_BITS + unit, device=groups.device)
    words = ((state.gather(-2, here) == VALID).long() << bits).sum(-1) + groups
    unit_group.scatter_(-1, group_tag.gather(-1, groups).long(), words.int())


def _oldest(
    last_used: torch.Tensor, order: torch.Tensor, replaceable: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` replaceable groups unused longest: keys and groups, int64 [..., count], oldest first. A key
    NEVER says that there are fewer. last_used int32, order int64 and replaceable bool [..., G]."""
    total = order.shape[-1]
    age = torch.add(order, last_used, alpha=total).masked_fill_(~replaceable, NEVER)
    keys, groups = age.topk(min(count, total), largest=False, sorted=True)
    return keys, groups


def _too_few(where: str, needed: int, enough: int, total: int, step: int) -> TableError:
    return TableError(f"{where}step {step} needs {needed} more of {total} groups and can replace {enough}")


@register("claim_writes", "torch")
def claim_writes(
    tables: SlotTables,
    entries: torch.Tensor,
    used_again: torch.Tensor | None,
    in_flight: bool,
    counts: torch.Tensor,
) -> None:
    """Start of a step: the clock advances, and every layer gets slots for the entries that this step
    completes. Modifies the tables.

    The entries' slots turn WRITING: a copy that is there belongs to a previous owner of the location.

    Args:
        entries: int64 (or int32) [W], in any order, duplicates allowed; those of page 0 are SGLang's dummies and
            dropped.
        used_again: bool [W]; False: enters at the least-recently-used end. None: all True.
        in_flight: fetches of earlier steps are not joined yet; their groups stay.
        counts: int64 [L, at least 13], to whose REPLACED the units that lost their slots are added.
    Raises: TableError when a layer has too few replaceable groups.
    """
    tables.clock.add_(1)
    place_writes(tables, entries, used_again, in_flight, counts)


def place_writes(
    tables: SlotTables,
    entries: torch.Tensor,
    used_again: torch.Tensor | None,
    in_flight: bool,
    counts: torch.Tensor,
) -> None:
    """`claim_writes` without the clock."""
    real = entries >= C4_ENTRIES_PER_PAGE
    entries = entries.masked_select(real).long()  # device-side count
    if entries.shape[0] == 0:
        return
    step = int(tables.clock)
    unit, spare = tables.unit, tables.groups
    units, inverse = torch.unique(entries // unit, return_inverse=True)  # device-side count
    groups = tables.unit_group.index_select(1, units).long() & GROUP_MASK
    tables.held.scatter_(1, groups, step << HELD_SHIFT)
    cold = groups == spare
    needed = cold.sum(1)
    most = int(needed.max())  # device-side count
    if most:
        replaceable = tables.held[:, :spare] < step << HELD_SHIFT
        if in_flight:
            replaceable &= (tables.state[:, :spare] & PENDING).amax(2) == 0
        keys, victims = _oldest(tables.last_used[:, :spare], tables.order, replaceable, most)
        enough = (keys < NEVER).sum(1)
        if bool((enough < needed).any()):
            layer = int((needed - enough).argmax())
            raise _too_few(f"layer {layer}: ", int(needed[layer]), int(enough[layer]), spare, step)
        rank = (cold.cumsum(1) - 1).clamp_min_(0)
        groups = victims.gather(1, rank).where(cold, groups)
        old = tables.group_tag.gather(1, groups).masked_fill_(~cold, tables.units)
        counts[:, REPLACED] += (old < tables.units).sum(1)
        tables.unit_group.scatter_(1, old.long(), spare)
        tables.group_tag.scatter_(1, groups, units.int().expand_as(groups))
        fresh = groups.masked_fill(~cold, spare)[:, :, None].expand(-1, -1, unit)
        tables.state.scatter_(1, fresh, ABSENT)
        tables.held.scatter_(1, groups, step << HELD_SHIFT)
    age = tables.last_used.gather(1, groups).masked_fill_(cold, 0)
    if used_again is None:
        age.fill_(step)
    else:
        again = torch.zeros_like(units)
        again.scatter_reduce_(0, inverse, used_again.masked_select(real).long(), "amax")
        age.masked_fill_(again > 0, step)
    tables.last_used.scatter_(1, groups, age)
    slots = groups.index_select(1, inverse) * unit + (entries & (unit - 1))
    state = tables.state.flatten(1)
    state.scatter_(1, slots, (state.gather(1, slots) & PENDING) | WRITING)
    _note_valid(tables.unit_group, tables.group_tag, tables.state, groups)


@register("write_rows", "torch")
def write_rows(
    tables: LayerTables,
    entries: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    host_rows: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Rows of this step's entries to their slots and through to their host rows. Modifies all of them.

    Args:
        entries: int64 [W], each announced to `claim_writes` and not written since; those of page 0 are
            dropped with their rows.
        rows: u8 [W, row_bytes].
        pages: u8 [P, page_bytes], the layer's.
        host_rows: u8 [E, row_bytes], the layer's.
        counts: int64 [at least 13], to whose WRITTEN the rows are added.
    Raises: TableError for any other entry.
    """
    real = (entries >= C4_ENTRIES_PER_PAGE).nonzero().squeeze(1)  # device-side count
    if real.shape[0] != entries.shape[0]:
        entries, rows = entries.index_select(0, real), rows.index_select(0, real)
    if entries.shape[0] == 0:
        return
    slots = finish_writes(tables, entries)
    scatter_rows(pages, layout, slots, rows)
    copy_rows(host_rows, entries.to(host_rows.device), rows.to(host_rows.device))
    counts[WRITTEN] += entries.shape[0]


def finish_writes(tables: LayerTables, entries: torch.Tensor) -> torch.Tensor:
    """The slots that the bytes of this step's entries go to; they count as valid from here on. Modifies the
    tables.

    Args:
        entries: int64 [W], without page 0; each announced to `claim_writes` and not written since.
    Returns: int64 [W], slots.
    Raises: TableError for any other entry.
    """
    found = lookup(tables, entries)
    announced = found.state >= WRITING
    if not bool(announced.all()):
        others = entries[~announced][:4].tolist()
        raise TableError(f"entries {others} are written without being announced at the start of the step")
    tables.state.view(-1).index_copy_(0, found.slots, (found.state & PENDING) | VALID)
    _note_valid(tables.unit_group, tables.group_tag, tables.state, found.slots.long() >> tables.shift)
    return found.slots


@register("resolve", "torch")
def resolve(
    tables: LayerTables,
    entries: torch.Tensor,
    positions: torch.Tensor,
    lens: torch.Tensor,
    in_flight: bool,
    counts: torch.Tensor,
) -> Resolution:
    """Selected entries of one layer to slots; claims units for what is missing. Modifies the tables.

    Every selected group counts as used in this step. A missing entry is claimed once however many queries
    select it. Its unit's other members come along when their owner has written them (position < lens: a unit
    lies inside one page of its request, so member j has position `position - entry % u + j`), are not here
    yet, and are not written by this step.

    Args:
        entries: int32 [T, K]; -1 (or anything in page 0, which holds nobody's data): none.
        positions: int32 [T, K], position of the entry among the entries of its request.
        lens: int32 [T], entries of that request written so far, this step's included.
        in_flight: a fetch of this layer of an earlier step is not joined yet; its groups stay.
        counts: int64 [at least 13], to which states, SELECTED, MISSES, REPLACED and FETCHED are added.
    Raises: TableError for a selection beyond `lens`, for an entry that this step announced and has not
        written in this layer yet, and when the groups do not suffice.
    """
    step = int(tables.clock)
    flat = entries.reshape(-1)
    real = flat >= C4_ENTRIES_PER_PAGE
    wanted = flat.clamp_min(0).long()  # page 0 is never tagged: it finds the spare group
    units = wanted >> tables.shift
    offsets = wanted & (tables.unit - 1)
    groups = tables.unit_group.index_select(0, units).long() & GROUP_MASK
    slots = (groups << tables.shift) + offsets
    state = tables.state.view(-1).index_select(0, slots)
    states = torch.bincount(state, minlength=STATES)
    if bool(states[WRITING:].any()):
        early = wanted[state >= WRITING][:4].tolist()
        raise TableError(f"entries {early} are selected in step {step} before this layer wrote them")
    missing = torch.lt(state, real).nonzero().squeeze(1)  # ABSENT (0) and selected (1); device-side count
    tables.held.index_fill_(0, groups, step << HELD_SHIFT)
    fetch_entries = fetch_slots = missing[:0]
    counts[:STATES] += states
    counts[SELECTED] += torch.count_nonzero(real)
    if missing.shape[0]:
        queries = missing // entries.shape[1]
        reach = lens.index_select(0, queries) - positions.reshape(-1).index_select(0, missing)
        absent = wanted.index_select(0, missing)
        fetch_entries, fetch_slots, replaced = _claim_missing(tables, absent, reach, step, in_flight)
        groups = tables.unit_group.index_select(0, units).long() & GROUP_MASK
        slots = (groups << tables.shift) + offsets
        tables.held.index_fill_(0, groups, step << HELD_SHIFT)
        counts[MISSES] += missing.shape[0]
        counts[FETCHED] += fetch_slots.shape[0]
        counts[REPLACED] += replaced
    tables.last_used.index_fill_(0, groups, step)
    return Resolution(
        torch.where(real, slots, NO_SLOT).int().view_as(entries), fetch_entries, fetch_slots, None
    )


@register("resolve_rows", "torch")
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
    """`resolve`, `fetch_rows` and `finish_fetch` in one: nothing is pending, every slot may be read.

    Arguments and errors are theirs. Modifies tables and pages.
    Returns: int32 [T, K], slot of each selected entry, -1 where none was selected.
    """
    found = resolve(tables, entries, positions, lens, in_flight, counts)
    if found.fetch_slots.shape[0]:
        fetch_rows(host_rows, pages, layout, found.fetch_entries, found.fetch_slots, None)
        finish_fetch(tables, found.fetch_slots, None)
    return found.slots


@register("fetch_rows", "torch")
def fetch_rows(
    host_rows: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    entries: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor | None,
) -> None:
    """Host rows of entries into slots. Modifies the pages and nothing else.

    Args:
        host_rows: u8 [E, row_bytes], the layer's; pinned when the pages are on a GPU.
        pages: u8 [P, page_bytes], the layer's.
        entries, slots: int [F], as in `Resolution`.
        count: int32 [1], how many of them; None: all.
    """
    if count is not None:
        entries, slots = entries[: int(count)], slots[: int(count)]
    rows = host_rows.index_select(0, entries.to(host_rows.device).long())
    scatter_rows(pages, layout, slots.long(), rows.to(pages.device))


def _claim_missing(
    tables: LayerTables, absent: torch.Tensor, reach: torch.Tensor, step: int, in_flight: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Claims the cold units of absent entries and turns the members to fetch pending. Modifies the tables.

    Args:
        absent: int64 [M], entries, possibly repeated, whose hot groups (if any) already carry held = step.
        reach: int32 [M], how many entries from this one on its request has written; below 1: not even this
            one.
    Returns: int64 [F] entries and int64 [F] slots to fetch, int64 scalar units replaced.
    """
    unit, spare = tables.unit, tables.groups
    if bool((reach < 1).any()):
        beyond = absent[reach < 1][:4].tolist()
        raise TableError(
            f"entries {beyond} are selected in step {step} and lie beyond what their requests have written"
        )
    units, inverse = torch.unique(absent >> tables.shift, return_inverse=True)  # device-side count
    first = torch.full_like(units, absent.shape[0])
    first.scatter_reduce_(0, inverse, torch.arange(absent.shape[0], device=absent.device), "amin")
    first, by_first = first.sort()
    units = units.index_select(0, by_first)
    inverse = by_first.argsort().index_select(0, inverse)
    words = tables.unit_group.index_select(0, units).long()
    groups = words & GROUP_MASK
    cold = groups == spare
    needed = int(torch.count_nonzero(cold))  # device-side count
    replaced = inverse.new_zeros(())
    if needed:
        replaceable = tables.held[:spare] < step << HELD_SHIFT
        if in_flight:
            replaceable &= (tables.state[:spare] & PENDING).amax(1) == 0
        keys, victims = _oldest(tables.last_used[:spare], tables.order, replaceable, needed)
        if victims.shape[0] < needed or int(keys[-1]) == NEVER:
            raise _too_few("", needed, int((keys < NEVER).sum()), spare, step)
        groups.masked_scatter_(cold, victims)
        old = tables.group_tag.index_select(0, victims)
        replaced = torch.count_nonzero(old < tables.units)
        tables.unit_group.index_fill_(0, old.long(), spare)
        tables.unit_group.index_copy_(0, units, words.masked_scatter(cold, victims).int())
        tables.group_tag.index_copy_(0, groups, units.int())
        tables.state.index_fill_(0, victims, ABSENT)

    members = tables.order[:unit]
    fetch = tables.state.index_select(0, groups) == ABSENT
    if unit > 1:
        leading = torch.zeros_like(units)
        leading.scatter_reduce_(0, inverse, (absent & (unit - 1)) + reach, "amax")
        fetch &= members < leading[:, None]
    chosen = fetch.view(-1).nonzero().squeeze(1)  # device-side count
    slots = ((groups << tables.shift)[:, None] + members).view(-1).index_select(0, chosen)
    entries = ((units << tables.shift)[:, None] + members).view(-1).index_select(0, chosen)
    tables.state.view(-1).index_fill_(0, slots, PENDING)
    return entries, slots, replaced


@register("finish_fetch", "torch")
def finish_fetch(tables: LayerTables, slots: torch.Tensor, count: torch.Tensor | None) -> None:
    """The bytes of a fetch have arrived: its slots turn valid, no longer pending. Modifies the tables.

    A slot that is WRITING stays so: what arrived are bytes of the location's previous owner.

    Args:
        slots, count: `Resolution.fetch_slots` and `fetch_count`.
    """
    if count is not None:
        slots = slots[: int(count)]
    slots = slots.long()
    state = tables.state.view(-1)
    writing = state.index_select(0, slots) >= WRITING
    arrived = torch.full_like(writing, VALID, dtype=torch.uint8)
    state.index_copy_(0, slots, arrived.masked_fill_(writing, WRITING))
    _note_valid(tables.unit_group, tables.group_tag, tables.state, slots >> tables.shift)


def drop(tables: LayerTables, entries: torch.Tensor) -> torch.Tensor:
    """Forgets the hot copies of entries; a unit of which no member is left loses its group. Modifies the
    tables.

    Args:
        entries: int64 [N], distinct; no fetch of the layer is outstanding.
    Returns: int64 [M], the slots that belonged to these entries.
    """
    slots = lookup(tables, entries).slots
    slots = slots[slots < tables.groups << tables.shift]
    tables.state.view(-1).index_fill_(0, slots, ABSENT)
    groups = torch.unique(slots >> tables.shift).long()
    _note_valid(tables.unit_group, tables.group_tag, tables.state, groups)
    empty = groups[tables.state.index_select(0, groups).amax(1) == ABSENT]
    tables.unit_group.index_fill_(0, tables.group_tag.index_select(0, empty).long(), tables.groups)
    tables.group_tag.index_fill_(0, empty, tables.units)
    tables.last_used.index_fill_(0, empty, FREE)
    tables.held.index_fill_(0, empty, FREE)
    return slots
