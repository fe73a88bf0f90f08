"""What each operation of the cache promises, one promise a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_dsv4x.hicache import IntegrityError, TieredCache, TierError
from sglang_dsv4x.jit_kernels.layouts import C4_ENTRIES_PER_PAGE
from tier_oracle import fill, read_slots, select, write_step

NOTHING = torch.zeros(1, dtype=torch.int64)
Maker = Callable[..., TieredCache]


def rows_of(cache: TieredCache, count: int, value: int) -> torch.Tensor:
    return torch.full((count, cache.shape.layout.row_bytes), value, dtype=torch.uint8)


def hot(cache: TieredCache, layer: int) -> set[int]:
    """Entries with valid slots."""
    groups, members = (cache._tables.state[layer] == 1).nonzero(as_tuple=True)
    return set((cache._tables.group_tag[layer][groups].long() * cache.shape.unit + members).tolist())


# Writing


def test_a_write_reaches_slot_and_host_row_in_the_same_call(make_cache: Maker) -> None:
    cache = make_cache()
    entries = torch.tensor([70, 71, 300])
    cache.begin_step(entries)
    rows = torch.randint(0, 256, (3, 584), dtype=torch.uint8)
    cache.write(1, entries, rows)
    assert torch.equal(cache._store.read(1, entries), rows)
    slots = select(cache, 1, [[70, 71, 300]], 70, 300)
    assert torch.equal(read_slots(cache, 1, slots), rows)
    assert cache.counters().hits == 3
    assert not cache._store.rows[0].any()


def test_entries_of_page_0_are_never_written_and_never_tagged(make_cache: Maker) -> None:
    cache = make_cache()
    entries = torch.tensor([0, 0, 5, 63, 64])
    write_step(cache, entries, [rows_of(cache, 5, 9)] * 2)
    assert not cache._store.rows[:, :C4_ENTRIES_PER_PAGE].any()
    assert hot(cache, 0) == {64}
    assert cache.counters().bytes_to_host == 2 * 584


def test_a_selection_in_page_0_counts_as_none(make_cache: Maker) -> None:
    cache = make_cache()
    cache.begin_step(NOTHING)
    assert select(cache, 0, [[-1, 0, 63]], 0, 64).tolist() == [[-1, -1, -1]]
    assert cache.counters().selected == 0


def test_an_entry_that_the_step_did_not_announce_cannot_be_written(make_cache: Maker) -> None:
    cache = make_cache()
    cache.begin_step(torch.tensor([64]))
    with pytest.raises(TierError, match=r"\[66\].*announced"):
        cache.write(0, torch.tensor([66]), rows_of(cache, 1, 1))


def test_an_announced_entry_cannot_be_selected_before_its_layer_wrote_it(make_cache: Maker) -> None:
    cache = make_cache()
    fill(cache, torch.arange(64, 70))
    cache.begin_step(torch.tensor([70]))
    cache.write(0, torch.tensor([70]), rows_of(cache, 1, 1))
    select(cache, 0, [[70]], 64, 7)
    with pytest.raises(TierError, match=r"\[70\].*before this layer wrote"):
        select(cache, 1, [[70]], 64, 7)


def test_a_rewritten_location_shows_its_new_owners_bytes_only(make_cache: Maker) -> None:
    cache = make_cache()
    entries = torch.arange(64, 68)
    fill(cache, entries)
    cache.begin_step(entries)
    assert hot(cache, 0) == set()
    cache.write(0, entries, rows_of(cache, 4, 17))
    slots = select(cache, 0, [entries.tolist()], 64, 4)
    assert bool((read_slots(cache, 0, slots) == 17).all())
    assert cache.counters().fetched_entries == 0


# Resolving


def test_only_one_query_fetches_what_two_queries_miss(make_cache: Maker) -> None:
    cache = make_cache(unit=1)
    rows = fill(cache, torch.arange(64, 192))
    cold = sorted(set(range(64, 192)) - hot(cache, 0))[:2]
    cache.begin_step(NOTHING)
    slots = select(cache, 0, [cold, cold[::-1]], 64, 128)
    cache.join(0)
    assert slots[0].tolist() == slots[1].tolist()[::-1]
    assert torch.equal(read_slots(cache, 0, slots[0]), rows[0][torch.tensor(cold) - 64])
    counters = cache.counters()
    assert (counters.misses, counters.fetched_entries) == (4, 2)


def test_what_is_on_its_way_counts_as_pending_and_is_not_fetched_again(make_cache: Maker) -> None:
    cache = make_cache(unit=1, copy_delay_s=0.05)
    fill(cache, torch.arange(64, 192))
    cold = sorted(set(range(64, 192)) - hot(cache, 0))[:2]
    cache.begin_step(NOTHING)
    first = select(cache, 0, [cold], 64, 128)
    assert torch.equal(select(cache, 0, [cold], 64, 128), first)
    counters = cache.counters()
    assert (counters.selected, counters.misses, counters.pending, counters.fetched_entries) == (4, 2, 2, 2)


@pytest.mark.parametrize("unit", [2, 4, 8])
def test_a_unit_brings_the_neighbours_that_their_owner_has_written_and_no_others(
    unit: int, make_cache: Maker
) -> None:
    cache = make_cache(unit=unit)
    rows = fill(cache, torch.arange(64, 64 + unit + unit // 2))
    shadow = cache._shadow
    assert shadow is not None
    cache._store.write(0, torch.arange(64 + unit + unit // 2, 64 + 2 * unit), rows_of(cache, unit // 2, 99))
    cache.reset()
    cache.begin_step(NOTHING)
    first = 64 + unit
    slots = select(cache, 0, [[first]], 64, unit + unit // 2)
    cache.join(0)
    assert hot(cache, 0) == set(range(first, first + unit // 2))
    assert torch.equal(read_slots(cache, 0, slots)[0], rows[0][unit])


@pytest.mark.parametrize("unit", [2, 4, 8])
def test_a_unit_is_filled_as_far_as_the_query_that_sees_most_of_it(unit: int, make_cache: Maker) -> None:
    cache = make_cache(unit=unit, pages=4)
    fill(cache, torch.arange(64, 64 + unit))
    cache.reset()
    cache.begin_step(NOTHING)
    entries = torch.tensor([[64], [64]], dtype=torch.int32)
    cache.resolve(0, entries, torch.zeros_like(entries), torch.tensor([1, unit - 1], dtype=torch.int32))
    cache.join(0)
    assert hot(cache, 0) == set(range(64, 64 + unit - 1))


def test_members_that_are_already_there_are_not_fetched_again(make_cache: Maker) -> None:
    cache = make_cache(unit=8)
    rows = fill(cache, torch.arange(64, 72))
    cache.reset()
    entry = torch.tensor([67])
    write_step(cache, entry, [layer_rows[3:4] for layer_rows in rows])
    cache.begin_step(NOTHING)
    slots = select(cache, 0, [[64]], 64, 8)
    cache.join(0)
    assert cache.counters().fetched_entries == 7
    assert hot(cache, 0) == set(range(64, 72))
    unit = read_slots(cache, 0, torch.arange(8) + slots[0, 0] // 8 * 8)
    assert torch.equal(unit, rows[0])


def test_a_fetch_leaves_out_members_that_this_step_writes(make_cache: Maker) -> None:
    """The hint order: the fetch is asked for between the announcement and the write."""
    cache = make_cache(unit=4, copy_delay_s=0.05)
    fill(cache, torch.arange(64, 67))
    cache.reset()
    cache.begin_step(torch.tensor([67]))
    select(cache, 0, [[64]], 64, 4)
    assert cache.counters().fetched_entries == 3
    cache.write(0, torch.tensor([67]), rows_of(cache, 1, 8))
    cache.join(0)
    assert hot(cache, 0) == {64, 65, 66, 67}
    cache.check_integrity()


def test_a_selection_beyond_what_the_request_has_written_is_refused(make_cache: Maker) -> None:
    cache = make_cache()
    fill(cache, torch.arange(64, 68))
    cache.reset()
    cache.begin_step(NOTHING)
    with pytest.raises(TierError, match=r"\[68\].*beyond"):
        select(cache, 0, [[67, 68]], 64, 4)


# Replacement


def test_the_group_unused_longest_is_replaced_first(make_cache: Maker) -> None:
    cache = make_cache(unit=1, max_requests=1, top_k=2, chunk_tokens=4, layers=1)
    assert cache.shape.slots == 5
    fill(cache, torch.arange(64, 69))
    cache.begin_step(NOTHING)
    select(cache, 0, [[64]], 64, 5)
    cache.begin_step(torch.tensor([69]))
    assert hot(cache, 0) == {64, 66, 67, 68}
    assert cache.counters().replaced == 1


def test_entries_that_a_prefill_does_not_use_again_leave_first(make_cache: Maker) -> None:
    cache = make_cache(unit=1, max_requests=1, top_k=2, chunk_tokens=8, layers=1)
    old = torch.arange(64, 68)
    fill(cache, old)
    part = torch.tensor([68, 69])
    again = torch.tensor([False, True])
    write_step(cache, part, [rows_of(cache, 2, 1)], again)
    write_step(cache, torch.tensor([70]), [rows_of(cache, 1, 1)])
    assert cache.shape.slots == 6
    assert hot(cache, 0) == {64, 65, 66, 67, 69, 70}


def test_a_unit_with_one_member_used_again_stays(make_cache: Maker) -> None:
    cache = make_cache(unit=2, layers=1)
    cache.begin_step(torch.tensor([64, 65, 66, 67]), torch.tensor([False, True, False, False]))
    ages = cache._tables.last_used[0][cache._tables.unit_group[0][[32, 33]].long()]
    assert ages.tolist() == [1, 0]


def test_nothing_used_pending_or_written_in_a_step_is_replaced_in_it(make_cache: Maker) -> None:
    """At exactly the bound, with every slot needed by the step."""
    cache = make_cache(unit=1, max_requests=2, top_k=4, chunk_tokens=4, layers=1, pages=8)
    rows = fill(cache, torch.arange(64, 64 + 40))
    for round_ in range(5):
        new = torch.tensor([200 + 2 * round_, 201 + 2 * round_])
        cache.begin_step(new)
        cache.write(0, new, rows_of(cache, 2, round_))
        chosen = [[64 + (7 * round_ + 5 * i + 3 * q) % 40 for i in range(4)] for q in range(2)]
        slots = select(cache, 0, chosen, 64, 40)
        cache.join(0)
        assert torch.equal(read_slots(cache, 0, slots), rows[0][torch.tensor(chosen).view(-1) - 64])
        assert {200 + 2 * round_, 201 + 2 * round_} <= hot(cache, 0)
        cache.check_integrity()


def test_beyond_the_bound_the_error_says_how_many_groups_are_missing(make_cache: Maker) -> None:
    cache = make_cache(unit=1, max_requests=1, top_k=2, chunk_tokens=4, layers=1)
    fill(cache, torch.arange(64, 80))
    cache.begin_step(NOTHING)
    with pytest.raises(TierError, match=r"needs 6 more of 5 groups and can replace 5.*--dsv4x-hot-entries"):
        select(cache, 0, [list(range(64, 70))], 64, 16)
    with pytest.raises(TierError, match=r"layer 0: step 18 needs 6 more of 5"):
        cache.begin_step(torch.arange(128, 134))


# Prefill


def test_gather_reads_hot_and_cold_rows_alike_and_counts_them(make_cache: Maker) -> None:
    cache = make_cache()
    entries = torch.arange(64, 64 + 128)
    rows = fill(cache, entries)
    mixed = torch.randperm(128)
    before = [table.clone() for table in cache._tables.tensors]
    for layer in range(2):
        assert torch.equal(cache.gather(layer, entries[mixed]), rows[layer][mixed])
        cache.verify_read(layer, entries[mixed], cache.gather(layer, entries[mixed]))
    assert all(torch.equal(table, old) for table, old in zip(cache._tables.tensors, before, strict=True))
    counters = cache.counters()
    valid = len(hot(cache, 0))
    assert 0 < valid < 128
    assert counters.per_layer["prefill_hot"] == [2 * valid] * 2
    assert counters.prefill_host == 4 * (128 - valid)
    assert counters.bytes_to_device == counters.prefill_host * 584


def test_gather_joins_a_fetch_that_is_still_on_its_way(make_cache: Maker) -> None:
    cache = make_cache(copy_delay_s=0.1)
    entries = torch.arange(64, 192)
    rows = fill(cache, entries)
    cold = sorted(set(entries.tolist()) - hot(cache, 0))[:4]
    cache.begin_step(NOTHING)
    select(cache, 0, [cold], 64, 128)
    assert torch.equal(cache.gather(0, entries), rows[0])
    assert set(cold) <= hot(cache, 0)


# Life cycle


def test_forgotten_locations_are_cold_poisoned_and_unreadable(make_cache: Maker) -> None:
    cache = make_cache(unit=4)
    entries = torch.arange(64, 96)
    fill(cache, entries)
    slots = select_all_hot(cache)
    freed = torch.arange(64, 80)
    cache.forget(torch.cat([freed, torch.tensor([0, 3])]))
    assert hot(cache, 0) == set(range(80, 96)) & set(slots)
    for entry in range(64, 80):
        if entry in slots:
            assert bool((read_slots(cache, 0, torch.tensor([slots[entry]])) == 0xFF).all())
    assert bool((cache._store.rows[:, 64:80] == 0xFF).all())
    assert not (cache._store.rows[:, :64] == 0xFF).any()
    with pytest.raises(IntegrityError, match=r"layer 1, entry 70: .*has not written"):
        cache.verify_read(1, torch.tensor([70]), cache.gather(1, torch.tensor([70])))
    cache.check_integrity()


def select_all_hot(cache: TieredCache) -> dict[int, int]:
    """entry -> slot in layer 0."""
    tags, unit = cache._tables.group_tag[0], cache.shape.unit
    state = cache._tables.state[0]
    return {
        int(tags[group]) * unit + member: group * unit + member
        for group in range(cache.shape.groups)
        for member in range(unit)
        if state[group, member] == 1
    }


def test_poison_is_nan_in_every_storage_format() -> None:
    poison = torch.full((16,), 0xFF, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        assert bool(poison.view(dtype).float().isnan().all())


def test_a_forgotten_unit_keeps_the_members_that_were_not_freed(make_cache: Maker) -> None:
    cache = make_cache(unit=8)
    rows = fill(cache, torch.arange(64, 72))
    cache.forget(torch.tensor([64, 65]))
    assert hot(cache, 0) == set(range(66, 72))
    assert torch.equal(cache.gather(0, torch.arange(66, 72)), rows[0][2:])
    cache.check_integrity()


def test_reset_leaves_everything_cold_and_counters_running(make_cache: Maker) -> None:
    cache = make_cache(copy_delay_s=0.05)
    fill(cache, torch.arange(64, 192))
    cache.begin_step(NOTHING)
    select(cache, 0, [[64, 65]], 64, 128)
    before = cache.counters()
    addresses = [table.data_ptr() for table in cache._tables.tensors] + [cache.device_pages(1).data_ptr()]
    cache.reset()
    assert [table.data_ptr() for table in cache._tables.tensors] + [
        cache.device_pages(1).data_ptr()
    ] == addresses
    assert hot(cache, 0) == hot(cache, 1) == set()
    assert cache.counters() == before
    cache.check_integrity()
    with pytest.raises(IntegrityError, match="has not written"):
        cache.verify_read(0, torch.tensor([64]), cache.gather(0, torch.tensor([64])))


def test_forget_and_verify_read_need_the_resident_copy(make_cache: Maker) -> None:
    cache = make_cache(checks=False)
    with pytest.raises(TierError, match="--dsv4x-checks step"):
        cache.forget(torch.tensor([64]))
    with pytest.raises(TierError, match="--dsv4x-checks step"):
        cache.verify_read(0, torch.tensor([64]), rows_of(cache, 1, 0))
    fill(cache, torch.arange(64, 80))
    cache.check_integrity()


def test_verify_read_skips_places_without_a_selection(make_cache: Maker) -> None:
    cache = make_cache()
    rows = fill(cache, torch.arange(64, 66))
    both = torch.cat([rows[0][:1], rows_of(cache, 1, 1), rows[0][1:]])
    cache.verify_read(0, torch.tensor([64, -1, 65]), both)


def test_totals_are_the_sums_of_the_layers(make_cache: Maker) -> None:
    cache = make_cache(layers=3)
    fill(cache, torch.arange(64, 192))
    for layer in (0, 2):
        cache.begin_step(NOTHING)
        select(cache, layer, [[64, 65, 190, -1]], 64, 128)
        cache.join(layer)
        cache.gather(layer, torch.arange(64, 100))
    counters = cache.counters()
    assert counters.selected == 6 and counters.per_layer["selected"] == [3, 0, 3]
    assert counters.selected == counters.hits + counters.misses + counters.pending
    for name, values in counters.per_layer.items():
        assert getattr(counters, name) == sum(values)
    assert set(counters.per_layer) == set(counters._fields) - {"per_layer"}
    rows = counters.fetched_entries + counters.prefill_host
    assert counters.bytes_to_device == rows * 584
    assert counters.bytes_to_host == 3 * 128 * 584
