"""Every invariant of the tables and the bytes, checked against the tensors themselves. Nothing is
modified."""

from __future__ import annotations

import torch

from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, PageLayout
from ..jit_kernels.paged_rows import gather_rows
from ..jit_kernels.resolve import ABSENT, GROUP_BITS, GROUP_MASK, PENDING, VALID, SlotTables
from .counters import TierCounters
from .errors import IntegrityError
from .host_store import HostStore
from .shadow import ShadowStore


def _first(mask: torch.Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()


def check_tables(tables: SlotTables, outstanding: list[torch.Tensor]) -> None:
    """Tags and groups are inverse maps, page 0 is untouched, used and free groups add up, only tagged groups
    have slots that are not absent, units' words say which members are valid, and the pending slots of each layer
    are those of its outstanding fetches (`outstanding[layer]` int [F]). Raises IntegrityError."""
    unit, spare_group, spare_unit = tables.unit, tables.groups, tables.units
    tags, words = tables.group_tag[:, :spare_group].long(), tables.unit_group[:, :spare_unit].long()
    groups = words & GROUP_MASK

    def fail(wrong: torch.Tensor, what: str) -> None:
        """wrong: bool [L, G]."""
        if bool(wrong.any()):
            layer, group = _first(wrong)
            entry = int(tags[layer, group]) * unit
            raise IntegrityError(f"layer {layer}, entry {entry} (group {group}): {what}")

    hot = groups != spare_group
    if bool(hot[:, : C4_ENTRIES_PER_PAGE // unit].any()):
        layer, first = _first(hot)
        raise IntegrityError(f"layer {layer}, entry {first * unit}: the reserved page 0 is tagged")
    lost = hot & (tables.group_tag.gather(1, groups) != torch.arange(spare_unit, device=tags.device))
    if bool(lost.any()):
        layer, first = _first(lost)
        raise IntegrityError(
            f"layer {layer}, entry {first * unit}: points to group {int(groups[layer, first])}, which is "
            f"tagged otherwise"
        )
    used = tags != spare_unit
    own = torch.arange(spare_group, device=tags.device)
    fail(
        used & (tables.unit_group.gather(1, tags) & GROUP_MASK != own),
        "the tag's unit is in another group or cold",
    )
    free = tables.last_used[:, :spare_group] < 0
    fail(used == free, "neither used nor free: tag and age contradict each other")
    fail(~used & (tables.state[:, :spare_group] != ABSENT).any(2), "a free group has slots in use")
    if bool((tables.state[:, spare_group] != ABSENT).any()):
        raise IntegrityError(
            f"layer {_first(tables.state[:, spare_group])[0]}: a slot of the spare group is in use"
        )
    for layer, slots in enumerate(outstanding):
        pending = (tables.state[layer].view(-1) & PENDING) != 0
        expected = torch.zeros_like(pending).index_fill_(0, slots, True)
        if not torch.equal(pending, expected):
            slot = _first(pending != expected)[0]
            entry = int(tables.group_tag[layer, slot // unit]) * unit + slot % unit
            what = "pending without a fetch" if pending[slot] else "being fetched and not pending"
            raise IntegrityError(f"layer {layer}, entry {entry} (slot {slot}): {what}")
    members = torch.arange(unit, device=tags.device)
    noted = (tables.unit_group.gather(1, tags)[:, :, None] >> (GROUP_BITS + members)) & 1 != 0
    fail(
        used & (noted != (tables.state[:, :spare_group] == VALID)).any(2),
        "the unit's word says otherwise than the slots which members are valid",
    )


def check_bytes(
    tables: SlotTables,
    pages: torch.Tensor,
    layout: PageLayout,
    store: HostStore,
    shadow: ShadowStore | None,
    live: torch.Tensor | None,
) -> None:
    """Every hot+clean entry equals its host row, and every written entry's host row its shadow row, byte for
    byte. `live` int64 [N] limits both to these entries. Raises IntegrityError."""
    unit = tables.unit
    among = None
    if live is not None:
        among = torch.zeros(store.rows.shape[1], dtype=torch.bool, device=pages.device)
        among.index_fill_(0, live, True)
    for layer in range(tables.state.shape[0]):
        slots = (tables.state[layer].view(-1) == VALID).nonzero().squeeze(1)
        entries = tables.group_tag[layer].index_select(0, slots // unit).long() * unit + slots % unit
        if among is not None:
            kept = among.index_select(0, entries)
            slots, entries = slots[kept], entries[kept]
        hot = gather_rows(pages[layer], layout, slots)
        _same(hot, store.read(layer, entries).to(pages.device), layer, entries, "hot copy", "host row")
        if shadow is not None:
            written = shadow.written[layer] if among is None else shadow.written[layer] & among
            entries = written.nonzero().squeeze(1)
            host = store.read(layer, entries).to(pages.device)
            _same(
                host, shadow.rows[layer].index_select(0, entries), layer, entries, "host row", "resident copy"
            )


def _same(
    left: torch.Tensor, right: torch.Tensor, layer: int, entries: torch.Tensor, one: str, other: str
) -> None:
    if torch.equal(left, right):
        return
    row, byte = _first(left != right)
    raise IntegrityError(
        f"layer {layer}, entry {int(entries[row])}: {one} and {other} differ from byte {byte} on "
        f"({int(left[row, byte]):#04x} and {int(right[row, byte]):#04x})"
    )


def check_counters(counters: TierCounters) -> None:
    """selected = hits + misses + pending in every layer. Raises IntegrityError."""
    each = counters.per_layer
    for layer, selected in enumerate(each["selected"]):
        parts = each["hits"][layer] + each["misses"][layer] + each["pending"][layer]
        if selected != parts:
            raise IntegrityError(
                f"layer {layer}: {selected} selections were counted, and {parts} hits, misses and pending"
            )
