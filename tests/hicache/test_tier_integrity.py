"""Every invariant of check_integrity, broken on purpose: the error names layer and entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_dsv4x.hicache import IntegrityError, TieredCache
from sglang_dsv4x.jit_kernels.resolve import GROUP_BITS
from tier_oracle import fill, select

Maker = Callable[..., TieredCache]


@pytest.fixture
def cache(make_cache: Maker) -> TieredCache:
    """Entries 64..127 written in two layers, units of two, some of them hot; clean."""
    cache = make_cache(unit=2, max_requests=1, pages=4)
    fill(cache, torch.arange(64, 128))
    cache.check_integrity()
    return cache


def hot_group(cache: TieredCache, layer: int) -> tuple[int, int]:
    """(group, first entry) of some hot unit."""
    group = int((cache._tables.group_tag[layer] < cache.shape.units).nonzero()[0])
    return group, int(cache._tables.group_tag[layer, group]) * cache.shape.unit


def free_group(cache: TieredCache) -> int:
    """Makes and names a free group of layer 0."""
    group, entry = hot_group(cache, 0)
    cache._tables.unit_group[0, entry // 2] = cache.shape.groups
    cache._tables.group_tag[0, group] = cache.shape.units
    cache._tables.last_used[0, group] = -1
    cache._tables.held[0, group] = -1
    cache._tables.state[0, group] = 0
    cache.check_integrity()
    return group


def test_a_tag_whose_unit_is_cold(cache: TieredCache) -> None:
    group, entry = hot_group(cache, 1)
    cache._tables.unit_group[1, entry // 2] = cache.shape.groups
    with pytest.raises(IntegrityError, match=rf"layer 1, entry {entry} \(group {group}\)"):
        cache.check_integrity()


def test_a_unit_that_points_to_another_units_group(cache: TieredCache) -> None:
    group, _ = hot_group(cache, 0)
    cold = int((cache._tables.unit_group[0, 32:64] == cache.shape.groups).nonzero()[0]) + 32
    cache._tables.unit_group[0, cold] = group
    with pytest.raises(IntegrityError, match=f"layer 0, entry {cold * 2}: points to group {group}"):
        cache.check_integrity()


def test_a_unit_in_two_groups(cache: TieredCache) -> None:
    group = free_group(cache)
    other, entry = hot_group(cache, 0)
    cache._tables.group_tag[0, group] = cache._tables.group_tag[0, other]
    cache._tables.last_used[0, group] = 1
    with pytest.raises(IntegrityError, match=f"layer 0, entry {entry} .*another group"):
        cache.check_integrity()


def test_a_units_word_that_calls_another_member_valid(cache: TieredCache) -> None:
    _, entry = hot_group(cache, 1)
    cache._tables.unit_group[1, entry // 2] ^= 1 << GROUP_BITS
    with pytest.raises(IntegrityError, match=rf"layer 1, entry {entry} .*which members are valid"):
        cache.check_integrity()


def test_page_0_tagged(cache: TieredCache) -> None:
    group = free_group(cache)
    cache._tables.unit_group[0, 3] = group
    cache._tables.group_tag[0, group] = 3
    cache._tables.last_used[0, group] = 1
    with pytest.raises(IntegrityError, match="layer 0, entry 6: the reserved page 0"):
        cache.check_integrity()


@pytest.mark.parametrize("state", [1, 2, 4])
def test_a_slot_in_use_in_a_free_group(cache: TieredCache, state: int) -> None:
    group = free_group(cache)
    cache._tables.state[0, group, 1] = state
    with pytest.raises(IntegrityError, match=rf"\(group {group}\): a free group has slots in use"):
        cache.check_integrity()


def test_a_slot_of_the_spare_group_in_use(cache: TieredCache) -> None:
    cache._tables.state[1, cache.shape.groups, 0] = 1
    with pytest.raises(IntegrityError, match="layer 1: a slot of the spare group"):
        cache.check_integrity()


@pytest.mark.parametrize("age", [-1, 3])
def test_a_group_that_is_neither_used_nor_free(cache: TieredCache, age: int) -> None:
    group = hot_group(cache, 0)[0] if age < 0 else free_group(cache)
    cache._tables.last_used[0, group] = age
    with pytest.raises(IntegrityError, match=rf"\(group {group}\): neither used nor free"):
        cache.check_integrity()


def test_a_pending_slot_without_a_fetch(cache: TieredCache) -> None:
    group, entry = hot_group(cache, 1)
    cache._tables.state[1, group, 1] = 2
    with pytest.raises(IntegrityError, match=f"layer 1, entry {entry + 1} .*pending without a fetch"):
        cache.check_integrity()


def test_a_fetch_into_a_slot_that_is_not_pending(cache: TieredCache) -> None:
    cold = int((cache._tables.unit_group[0, 32:64] == cache.shape.groups).nonzero()[0]) * 2 + 64
    cache.begin_step(torch.tensor([0]))
    slots = select(cache, 0, [[cold]], 64, 64)
    cache.check_integrity()
    cache._tables.state[0].view(-1)[slots[0].long()] = 0
    with pytest.raises(IntegrityError, match=f"layer 0, entry {cold} .*being fetched and not pending"):
        cache.check_integrity()


def test_a_hot_copy_that_differs_from_its_host_row_in_one_scale_byte(cache: TieredCache) -> None:
    group, entry = hot_group(cache, 0)
    slot = group * 2
    page, offset = divmod(slot, 64)
    cache.device_pages(0)[page, 64 * 576 + offset * 8 + 5] ^= 1
    with pytest.raises(IntegrityError, match=f"layer 0, entry {entry}: hot copy and host row .* byte 581"):
        cache.check_integrity()


def test_a_host_row_that_differs_from_the_resident_copy(cache: TieredCache) -> None:
    cold = int((cache._tables.unit_group[1, 32:64] == cache.shape.groups).nonzero()[0]) * 2 + 64
    cache._store.rows[1, cold, 9] ^= 0x10
    with pytest.raises(IntegrityError, match=f"layer 1, entry {cold}: host row and resident copy .* byte 9 "):
        cache.check_integrity()


def test_only_live_entries_are_compared_when_they_are_given(cache: TieredCache) -> None:
    group, entry = hot_group(cache, 0)
    cold = int((cache._tables.unit_group[1, 32:64] == cache.shape.groups).nonzero()[0]) * 2 + 64
    cache._store.rows[1, cold, 9] ^= 0x10
    cache.device_pages(0)[group * 2 // 64, group * 2 % 64 * 576] ^= 1
    others = [e for e in range(64, 128) if e not in (entry, cold)]
    cache.check_integrity(torch.tensor(others))
    with pytest.raises(IntegrityError, match=f"entry {entry}"):
        cache.check_integrity(torch.tensor([*others, entry]))
    with pytest.raises(IntegrityError, match=f"entry {cold}"):
        cache.check_integrity(torch.tensor([*others, cold]))


def test_counters_that_do_not_add_up(cache: TieredCache) -> None:
    cache._counters._cells[1][8].add_(1)
    with pytest.raises(IntegrityError, match="layer 1: 1 selections were counted"):
        cache.check_integrity()


def test_verify_read_names_the_first_differing_byte(cache: TieredCache) -> None:
    entries = torch.tensor([100, 101])
    rows = cache.gather(0, entries)
    rows[1, 77] ^= 0xFF
    with pytest.raises(IntegrityError, match=r"layer 0, entry 101: attention in step .* from byte 77 on"):
        cache.verify_read(0, entries, rows)


def test_verify_read_rejects_the_dummy_page(cache: TieredCache) -> None:
    with pytest.raises(IntegrityError, match=r"entry 0: .*has not written"):
        cache.verify_read(0, torch.tensor([0]), cache.gather(0, torch.tensor([0])))


def test_checking_modifies_nothing(cache: TieredCache) -> None:
    everything = [*cache._tables.tensors, cache._pages, cache._store.rows, cache._counters.all]
    before = [tensor.clone() for tensor in everything]
    cache.check_integrity()
    assert all(torch.equal(a, b) for a, b in zip(everything, before, strict=True))
