"""Faults put in on purpose: a cache that breaks one guarantee is caught by the checks, the intact one is not.

Each fault runs the same small workload as the intact cache, with a delayed copy worker.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_dsv4x.hicache import IntegrityError, TieredCache
from sglang_dsv4x.hicache.copy_stream import Fetch, WorkerCopyStream
from sglang_dsv4x.hicache.host_store import HostStore
from sglang_dsv4x.hicache.shadow import ShadowStore
from sglang_dsv4x.jit_kernels import registry
from sglang_dsv4x.jit_kernels import resolve as ops
from tier_oracle import fill, read_slots, write_step

Fault = Callable[[pytest.MonkeyPatch], None]


def workload(cache: TieredCache) -> None:
    """Prefill, decode with many misses, locations that are freed and change hands, decode again."""
    length = 128
    entries = torch.arange(64, 64 + length)
    fill(cache, entries)
    generator = torch.Generator().manual_seed(1)

    def decode(steps: int) -> None:
        for _ in range(steps):
            cache.begin_step(torch.zeros(1, dtype=torch.int64))
            positions = torch.stack([torch.randperm(length, generator=generator)[:8] for _ in range(2)]).int()
            chosen = entries[positions.long()].int()
            for layer in range(cache.shape.layers):
                slots = cache.resolve(layer, chosen, positions, torch.full((2,), length, dtype=torch.int32))
                cache.join(layer)
                cache.verify_read(layer, chosen.view(-1).long(), read_slots(cache, layer, slots))
            cache.check_integrity()

    decode(20)
    freed = entries[64:]
    cache.forget(freed)
    cache.check_integrity()
    fill(cache, freed, seed=2)
    rows = cache.gather(0, entries)
    cache.verify_read(0, entries, rows)
    decode(20)


def join_without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerCopyStream, "wait", lambda self, fetch: None)


def fetch_of_the_wrong_rows(patch: pytest.MonkeyPatch) -> None:
    right = WorkerCopyStream.fetch

    def wrong(self: WorkerCopyStream, layer: int, entries: torch.Tensor, *rest: torch.Tensor) -> Fetch:
        return right(self, layer, entries.roll(1), *rest)

    patch.setattr(WorkerCopyStream, "fetch", wrong)


def fetch_from_another_layer(patch: pytest.MonkeyPatch) -> None:
    right = WorkerCopyStream.fetch

    def wrong(self: WorkerCopyStream, layer: int, *rest: torch.Tensor) -> Fetch:
        return right(self, 1 - layer, *rest)

    patch.setattr(WorkerCopyStream, "fetch", wrong)


def write_without_write_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "copy_rows", lambda target, locs, rows: None)


def replacement_in_use_order_reversed_within_the_step(patch: pytest.MonkeyPatch) -> None:
    """Groups that this step uses may be replaced in it."""
    right = ops._oldest

    def wrong(
        last_used: torch.Tensor, order: torch.Tensor, replaceable: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return right(-last_used, order, torch.ones_like(replaceable), count)

    patch.setattr(ops, "_oldest", wrong)


def drop_that_keeps_the_tags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "drop", lambda tables, entries: entries[:0])


def stale_hot_copies_survive_a_rewrite(patch: pytest.MonkeyPatch) -> None:
    """The write reaches the host row only."""
    right = ops.finish_writes

    def wrong(tables: ops.LayerTables, entries: torch.Tensor) -> torch.Tensor:
        return right(tables, entries).roll(1)

    patch.setattr(ops, "finish_writes", wrong)


def fetch_finished_for_the_wrong_slots(patch: pytest.MonkeyPatch) -> None:
    def wrong(tables: ops.LayerTables, slots: torch.Tensor, count: torch.Tensor | None) -> None:
        ops.finish_fetch(tables, slots[1:], count)

    patch.setitem(registry._registered["finish_fetch"], "torch", wrong)


FAULTS = [
    join_without_waiting,
    fetch_of_the_wrong_rows,
    fetch_from_another_layer,
    write_without_write_through,
    replacement_in_use_order_reversed_within_the_step,
    drop_that_keeps_the_tags,
    stale_hot_copies_survive_a_rewrite,
    fetch_finished_for_the_wrong_slots,
]


def test_the_intact_cache_passes_the_workload(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(copy_delay_s=0.002)
    workload(cache)
    counters = cache.counters()
    assert counters.misses > counters.selected / 4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_removed_guarantee_is_caught(
    fault: Fault, make_cache: Callable[..., TieredCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    cache = make_cache(copy_delay_s=0.002)
    with pytest.raises(IntegrityError):
        workload(cache)


def test_without_the_wait_in_write_a_late_fetch_overwrites_the_new_owners_row(
    make_cache: Callable[..., TieredCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `write` waits for. The worker reads the host row before the write-through and stores it after."""
    cache = make_cache(copy_delay_s=0.2)
    entries = torch.arange(64, 128)
    fill(cache, entries)
    cache.reset()
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    one = torch.tensor([[64]], dtype=torch.int32)
    cache.resolve(0, one, one - 64, torch.tensor([1], dtype=torch.int32))
    new = torch.full((1, 584), 3, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerCopyStream, "wait", lambda self, fetch: None)
        old = cache._store.read(0, torch.tensor([64]))
        read = HostStore.read
        patch.setattr(
            HostStore, "read", lambda self, layer, rows: old if len(rows) == 1 else read(self, layer, rows)
        )
        write_step(cache, torch.tensor([64]), [new, new], outstanding_ok=True)
        fetch = cache._outstanding[0][0]
        assert fetch.arrived.wait(5)
    cache.join(0)
    with pytest.raises(IntegrityError, match="layer 0, entry 64: hot copy and host row"):
        cache.check_integrity()


def test_without_the_announcement_a_freed_rows_shadow_would_still_count_as_written(
    make_cache: Callable[..., TieredCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    entries = torch.arange(64, 72)
    rows = fill(cache, entries)
    cache.begin_step(entries)
    with pytest.raises(IntegrityError, match="has not written"):
        cache.verify_read(0, entries, rows[0])
    monkeypatch.setattr(ShadowStore, "announce", lambda self, entries: None)
    fill(cache, entries)
    cache.begin_step(entries)
    cache.verify_read(0, entries, cache._store.read(0, entries))
