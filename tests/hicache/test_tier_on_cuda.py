"""What differs on CUDA: pinned rows, a stream for the copies, no host wait in join. Skipped without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from sglang_dsv4x.hicache import IntegrityError, TieredCache, TierError
from sglang_dsv4x.hicache.copy_stream import CudaCopyStream
from tier_oracle import on, random_rows, read_slots

pytestmark = pytest.mark.gpu


def cold_cache(make_cache: Callable[..., TieredCache], **options: float) -> tuple[TieredCache, torch.Tensor]:
    """A cache on the GPU whose entries 64..127 are in the host store only, and layer 0's rows of them."""
    cache = make_cache(device="cuda", chunk_tokens=256, **options)
    rows = random_rows(64, 584, torch.Generator().manual_seed(0)).cuda()
    entries = on(cache, range(64, 128))
    cache.begin_step(entries)
    for layer in range(cache.shape.layers):
        cache.write(layer, entries, rows)
    written = cache._shadow.written.clone()
    cache.reset()
    cache._pages.zero_()  # the same slots will be claimed again
    cache._shadow.written.copy_(written)
    cache.begin_step(on(cache, [0]))
    return cache, rows


def resolve(cache: TieredCache) -> torch.Tensor:
    chosen = on(cache, [range(64, 72)], torch.int32)
    return cache.resolve(0, chosen, chosen - 64, on(cache, [64], torch.int32))


def test_the_host_store_is_pinned_at_its_exact_size(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(device="cuda")
    assert cache._store.rows.is_pinned()
    assert cache._store.rows.untyped_storage().nbytes() == cache.shape.host_bytes
    rows = cache._store.rows
    cache.close()
    assert not rows.is_pinned()


def test_join_orders_the_forward_stream_after_a_delayed_fetch(make_cache: Callable[..., TieredCache]) -> None:
    cache, rows = cold_cache(make_cache, copy_delay_s=0.3)
    start = time.monotonic()
    slots = resolve(cache)
    cache.join(0)
    assert time.monotonic() - start < 0.15
    read = read_slots(cache, 0, slots)
    torch.cuda.synchronize()
    assert time.monotonic() - start > 0.15
    assert torch.equal(read, rows[:8])
    cache.check_integrity()


def test_without_the_wait_the_read_is_stale_and_caught(
    make_cache: Callable[..., TieredCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = cold_cache(make_cache, copy_delay_s=0.3)
    monkeypatch.setattr(CudaCopyStream, "wait", lambda self, fetch: None)
    slots = resolve(cache)
    cache.join(0)
    with pytest.raises(IntegrityError, match="attention in step"):
        cache.verify_read(0, on(cache, range(64, 72)), read_slots(cache, 0, slots))
    torch.cuda.synchronize()


def test_a_fetch_that_hangs_is_reported_by_the_next_call(make_cache: Callable[..., TieredCache]) -> None:
    cache, _ = cold_cache(make_cache, copy_delay_s=1, copy_timeout_s=0.1)
    resolve(cache)
    time.sleep(0.2)
    with pytest.raises(TierError, match="--dsv4x-copy-timeout-s"):
        cache.join(0)
    torch.cuda.synchronize()
