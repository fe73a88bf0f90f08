"""The hot cache's tables: which entries are in which slots, and every operation that changes that.

An aligned run of u neighbouring entries is a *unit*; a *group* is u neighbouring slots and holds one unit or
none. Entry e of a unit in group g sits in slot g * u + e % u.

Total order: these operations run on the forward stream, one after the other, and nothing else changes the
tables. Victims are the groups unused longest, the lower group number first among equals, so that a run is
reproducible.

The tables have one group and one unit more than there are: group G is where cold units point to, unit U is
what free groups are tagged with. Neither ever has a slot in use. So no operation branches on cold or free:
what it would write for them lands in the spare place.

This is the torch reference and the backend of a machine without a GPU. On CPU torch sizes some results by
their data; a CUDA kernel keeps these counts on the device (marked *device-side count*) and launches the fetch
over the upper bound T * K * u instead. What raises `TableError` here sets a device flag there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .layouts import C4_ENTRIES_PER_PAGE

ABSENT, VALID, PENDING, WRITING = 0, 1, 2, 4
"""State of a slot, bits. VALID: it holds its entry's bytes. PENDING: a fetch into it is on its way. WRITING:
this step writes its entry and this layer has not done so yet; until then there is nothing to read. ABSENT:
nobody asked for the entry, or its owner has not written it yet. PENDING goes with one of the others when a
location changed hands while a fetch for its previous owner was on its way."""

STATES = 8
"""Length of a histogram of states."""

FREE = -1
"""Age of a group that holds nothing."""

NO_SLOT = -1

NEVER = torch.iinfo(torch.int64).max
"""Sort key of a group that must not be replaced."""


class TableError(RuntimeError):
    """Too few groups, or operations out of order. The tables cannot be used any more."""


class LayerTables(NamedTuple):
    """State of one layer: views into `SlotTables`, and its constants."""

    unit_group: torch.Tensor
    """int32 [U + 1]: the group that holds a unit; G: cold."""
    group_tag: torch.Tensor
    """int32 [G + 1]: the unit that a group holds; U: free."""
    last_used: torch.Tensor
    """int32 [G + 1]: step of the last use; 0 after a prefill wrote it without using it again; -1: free."""
    held: torch.Tensor
    """int32 [G + 1]: last step that selected or wrote a member; in that step the group is not replaced."""
    state: torch.Tensor
    """uint8 [G + 1, u]: ABSENT, or bits VALID, PENDING, WRITING."""
    order: torch.Tensor
    """int64 [G]: 0, 1, 2, ...: which of two equally old groups goes first. Constant."""
    unit: int
    """u: 1, 2, 4 or 8."""
    shift: int
    """log2(u)."""
    groups: int
    """G."""
    units: int
    """U."""


class SlotTables(NamedTuple):
    """State of L layers: the tensors of `LayerTables` with a leading dimension L."""

    unit_group: torch.Tensor
    group_tag: torch.Tensor
    last_used: torch.Tensor
    held: torch.Tensor
    state: torch.Tensor
    order: torch.Tensor

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
    """int64 [F]: entries whose bytes must be brought, ascending, each once."""
    fetch_slots: torch.Tensor
    """int64 [F]: where they go."""
    selected: torch.Tensor
    """int64 scalar: selections other than none."""
    states: torch.Tensor
    """int64 [8]: how many of the T * K found their slot in each state; where none was selected it is
    ABSENT."""
    missing: int
    """Selections that found their slot ABSENT (device-side count)."""
    replaced: torch.Tensor | None
    """int64 scalar: groups whose unit was replaced; None when nothing was missing."""


class Lookup(NamedTuple):
    """Result of `lookup`."""

    slots: torch.Tensor
    """int64 [N]: slot of each entry; one of the spare group's where its unit is cold."""
    state: torch.Tensor
    """uint8 [N]: what is in the slot now."""


def lookup(tables: LayerTables, entries: torch.Tensor) -> Lookup:
    """Where entries of one layer are. Does not modify the tables. entries: int64 [N] in [0, E)."""
    groups = tables.unit_group.index_select(0, entries >> tables.shift)
    slots = (groups << tables.shift) + (entries & (tables.unit - 1))
    return Lookup(slots, tables.state.view(-1).index_select(0, slots))


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


def claim_writes(
    tables: SlotTables,
    entries: torch.Tensor,
    used_again: torch.Tensor | None,
    step: int,
    in_flight: bool = False,
) -> torch.Tensor | None:
    """Start of a step: every layer gets slots for the entries that this step completes. Modifies the tables.

    The entries' slots turn WRITING: a copy that is there belongs to a previous owner of the location.

    Args:
        entries: int64 (or int32) [W], in any order, duplicates allowed; those of page 0 are SGLang's dummies and
            dropped.
        used_again: bool [W]; False: enters at the least-recently-used end. None: all True.
        step: this step, larger than the last one.
        in_flight: fetches of earlier steps are not joined yet; their groups stay.
    Returns: int64 [L], groups whose unit was replaced; None when there was nothing to write.
    Raises: TableError when a layer has too few replaceable groups.
    """
    real = entries >= C4_ENTRIES_PER_PAGE
    entries = entries.masked_select(real).long()  # device-side count
    if entries.shape[0] == 0:
        return None
    unit, spare = tables.unit, tables.groups
    units, inverse = torch.unique(entries // unit, return_inverse=True)  # device-side count
    groups = tables.unit_group.index_select(1, units).long()
    tables.held.scatter_(1, groups, step)
    cold = groups == spare
    needed = cold.sum(1)
    most = int(needed.max())  # device-side count
    replaced = torch.zeros_like(needed)
    if most:
        replaceable = tables.held[:, :spare] < step
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
        replaced = (old < tables.units).sum(1)
        tables.unit_group.scatter_(1, old.long(), spare)
        tables.unit_group.scatter_(1, units.expand_as(groups), groups.int())
        tables.group_tag.scatter_(1, groups, units.int().expand_as(groups))
        fresh = groups.masked_fill(~cold, spare)[:, :, None].expand(-1, -1, unit)
        tables.state.scatter_(1, fresh, ABSENT)
        tables.held.scatter_(1, groups, step)
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
    return replaced


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
    return found.slots


def resolve(
    tables: LayerTables,
    entries: torch.Tensor,
    positions: torch.Tensor,
    lens: torch.Tensor,
    step: int,
    in_flight: bool = False,
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
    Raises: TableError for a selection beyond `lens`, for an entry that this step announced and has not
        written in this layer yet, and when the groups do not suffice.
    """
    flat = entries.reshape(-1)
    real = flat >= C4_ENTRIES_PER_PAGE
    wanted = flat.clamp_min(0).long()  # page 0 is never tagged: it finds the spare group
    units = wanted >> tables.shift
    offsets = wanted & (tables.unit - 1)
    groups = tables.unit_group.index_select(0, units).long()
    slots = (groups << tables.shift) + offsets
    state = tables.state.view(-1).index_select(0, slots)
    states = torch.bincount(state, minlength=STATES)
    if bool(states[WRITING:].any()):
        early = wanted[state >= WRITING][:4].tolist()
        raise TableError(f"entries {early} are selected in step {step} before this layer wrote them")
    missing = torch.lt(state, real).nonzero().squeeze(1)  # ABSENT (0) and selected (1); device-side count
    tables.held.index_fill_(0, groups, step)
    fetch_entries = fetch_slots = missing[:0]
    replaced = None
    if missing.shape[0]:
        queries = missing // entries.shape[1]
        reach = lens.index_select(0, queries) - positions.reshape(-1).index_select(0, missing)
        absent = wanted.index_select(0, missing)
        fetch_entries, fetch_slots, replaced = _claim_missing(tables, absent, reach, step, in_flight)
        groups = tables.unit_group.index_select(0, units).long()
        slots = (groups << tables.shift) + offsets
        tables.held.index_fill_(0, groups, step)
    tables.last_used.index_fill_(0, groups, step)
    return Resolution(
        torch.where(real, slots, NO_SLOT).int().view_as(entries),
        fetch_entries,
        fetch_slots,
        torch.count_nonzero(real),
        states,
        missing.shape[0],
        replaced,
    )


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
    groups = tables.unit_group.index_select(0, units).long()
    cold = groups == spare
    needed = int(torch.count_nonzero(cold))  # device-side count
    replaced = inverse.new_zeros(())
    if needed:
        replaceable = tables.held[:spare] < step
        if in_flight:
            replaceable &= (tables.state[:spare] & PENDING).amax(1) == 0
        keys, victims = _oldest(tables.last_used[:spare], tables.order, replaceable, needed)
        if victims.shape[0] < needed or int(keys[-1]) == NEVER:
            raise _too_few("", needed, int((keys < NEVER).sum()), spare, step)
        groups.masked_scatter_(cold, victims)
        old = tables.group_tag.index_select(0, victims)
        replaced = torch.count_nonzero(old < tables.units)
        tables.unit_group.index_fill_(0, old.long(), spare)
        tables.unit_group.index_copy_(0, units, groups.int())
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


def finish_fetch(tables: LayerTables, slots: torch.Tensor) -> None:
    """The bytes of a fetch have arrived: its slots turn valid, no longer pending. Modifies the tables.

    A slot that is WRITING stays so: what arrived are bytes of the location's previous owner.

    Args:
        slots: int64 [F], `Resolution.fetch_slots`.
    """
    state = tables.state.view(-1)
    writing = state.index_select(0, slots) >= WRITING
    arrived = torch.full_like(writing, VALID, dtype=torch.uint8)
    state.index_copy_(0, slots, arrived.masked_fill_(writing, WRITING))


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
    groups = torch.unique(slots >> tables.shift)
    empty = groups[tables.state.index_select(0, groups).amax(1) == ABSENT]
    tables.unit_group.index_fill_(0, tables.group_tag.index_select(0, empty).long(), tables.groups)
    tables.group_tag.index_fill_(0, empty, tables.units)
    tables.last_used.index_fill_(0, empty, FREE)
    tables.held.index_fill_(0, empty, FREE)
    return slots
