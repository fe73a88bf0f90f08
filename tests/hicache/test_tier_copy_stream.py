"""The copy worker: asynchronous, delayed, hanging, failing, closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from sglang_dsv4x.hicache import TieredCache, TierError
from sglang_dsv4x.hicache.copy_stream import WorkerCopyStream
from sglang_dsv4x.hicache.host_store import HostStore
from tier_oracle import fill, read_slots, select, write_step

ENTRIES = torch.arange(64, 64 + 128)


def filled_then_cold(cache: TieredCache) -> list[torch.Tensor]:
    """Rows of entries 64..191, all of them in the host store only."""
    rows = fill(cache, ENTRIES)
    written = None if cache._shadow is None else cache._shadow.written.clone()
    cache.reset()
    if cache._shadow is not None and written is not None:
        cache._shadow.written.copy_(written)
    return rows


def test_resolve_returns_before_the_bytes_are_there(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(copy_delay_s=0.4)
    rows = filled_then_cold(cache)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    start = time.monotonic()
    slots = select(cache, 0, [[64, 65, 66, 67]], 64, 128)
    assert time.monotonic() - start < 0.15
    assert not torch.equal(read_slots(cache, 0, slots), rows[0][:4])
    cache.join(0)
    assert time.monotonic() - start > 0.15
    assert torch.equal(read_slots(cache, 0, slots), rows[0][:4])


def test_a_fetch_that_hangs_is_an_error_after_the_time_out(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(copy_delay_s=30, copy_timeout_s=0.1)
    filled_then_cold(cache)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    select(cache, 1, [[64, 70]], 64, 128)
    with pytest.raises(TierError, match=r"layer 1 has not arrived after 0\.1 s.*--dsv4x-copy-timeout-s"):
        cache.join(1)


def test_an_exception_in_the_worker_is_raised_by_join_with_its_cause(
    make_cache: Callable[..., TieredCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: WorkerCopyStream, fetch: object) -> None:
        raise OSError("link down")

    cache = make_cache()
    filled_then_cold(cache)
    monkeypatch.setattr(WorkerCopyStream, "_copy", broken)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    select(cache, 0, [[64]], 64, 128)
    with pytest.raises(TierError, match="link down") as error:
        cache.join(0)
    assert isinstance(error.value.__cause__, OSError)


def test_a_step_with_an_unjoined_fetch_cannot_be_followed_by_another(
    make_cache: Callable[..., TieredCache],
) -> None:
    cache = make_cache()
    filled_then_cold(cache)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    select(cache, 1, [[64]], 64, 128)
    with pytest.raises(TierError, match=r"unjoined fetches of layers \[1\]"):
        cache.begin_step(torch.zeros(1, dtype=torch.int64))


def test_a_write_waits_for_a_fetch_into_its_slot_and_wins(
    make_cache: Callable[..., TieredCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A location changes hands while a hint for its previous owner is on its way, its bytes already read."""

    def read_then_dawdle(store: HostStore, layer: int, entries: torch.Tensor) -> torch.Tensor:
        rows = store.rows[layer].index_select(0, entries)
        time.sleep(0.2)
        return rows

    cache = make_cache()
    filled_then_cold(cache)
    monkeypatch.setattr(HostStore, "read", read_then_dawdle)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    select(cache, 0, [[64, 65, 80]], 64, 128)
    entry = torch.tensor([65])
    new = torch.full((1, cache.shape.layout.row_bytes), 3, dtype=torch.uint8)
    time.sleep(0.05)
    write_step(cache, entry, [new, new], outstanding_ok=True)
    cache.join(0)
    assert torch.equal(cache.gather(0, entry), new)
    cache.check_integrity()


def test_a_fetch_for_a_previous_owner_does_not_make_an_unwritten_entry_readable(
    make_cache: Callable[..., TieredCache],
) -> None:
    cache = make_cache()
    filled_then_cold(cache)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    select(cache, 0, [[64, 65]], 64, 128)
    cache.begin_step(torch.tensor([65]), outstanding_ok=True)
    cache.join(0)
    with pytest.raises(TierError, match="before this layer wrote them"):
        select(cache, 0, [[65]], 64, 128)


@pytest.mark.parametrize("claim", ["by a write", "by a miss"])
def test_the_group_of_a_fetch_on_its_way_is_not_replaced_in_later_steps(
    claim: str, make_cache: Callable[..., TieredCache]
) -> None:
    """Although it is the one unused longest: the fetch would land in slots that belong to another unit by then."""
    cache = make_cache(unit=1, copy_delay_s=0.2)
    rows = filled_then_cold(cache)
    hinted = [64, 65, 66, 67]
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    slots = select(cache, 0, [hinted], 64, 128)
    others = list(range(200, 200 + cache.shape.slots - len(hinted)))
    for start in range(0, len(others), 16):
        part = torch.tensor(others[start : start + 16])
        new = torch.full((len(part), cache.shape.layout.row_bytes), 5, dtype=torch.uint8)
        cache.begin_step(part, outstanding_ok=True)
        cache.write(1, part, new)
    cache.begin_step(torch.tensor([300] if claim == "by a write" else [0]), outstanding_ok=True)
    if claim == "by a miss":
        select(cache, 0, [[100]], 64, 128)
    cache.join(0)
    assert torch.equal(select(cache, 0, [hinted], 64, 128), slots)
    assert cache.counters().hits == len(hinted)
    assert torch.equal(read_slots(cache, 0, slots), rows[0][:4])


def test_closing_ends_the_worker_even_in_the_middle_of_a_delay(
    make_cache: Callable[..., TieredCache],
) -> None:
    cache = make_cache(copy_delay_s=30)
    filled_then_cold(cache)
    cache.begin_step(torch.zeros(1, dtype=torch.int64))
    select(cache, 0, [[64]], 64, 128)
    thread = cache._copies._thread
    start = time.monotonic()
    cache.close()
    cache.close()
    assert time.monotonic() - start < 5
    assert not thread.is_alive()
    with pytest.raises(TierError, match="closed"):
        cache.join(0)
    with pytest.raises(TierError, match="closed"):
        select(cache, 1, [[64]], 64, 128)


def test_the_worker_is_a_thread_of_its_own(make_cache: Callable[..., TieredCache]) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    make_cache()
    new = [thread for thread in threading.enumerate() if thread.ident not in before]
    assert [thread.name for thread in new] == ["dsv4x-copy-stream"]
    assert new[0].daemon
