"""The tier under SGLang's real allocator, radix tree, requests and DeepSeek-V4 pool, without a model."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang_memory import Server, sglang  # noqa: F401

OPERATIONS = 2500
"""Per unit: 10,000 over the four units."""


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_every_row_read_is_what_its_owner_wrote_and_nothing_leaks(
    unit: int,
    sglang: None,  # noqa: F811
) -> None:
    server = Server(unit, seed=unit)
    operations = [
        (server.start, 5),
        (server.extend, 10),
        (server.decode, 8),
        (server.decode_many, 2),
        (server.finish, 2),
        (server.abort, 0.7),
        (server.retract, 0.5),
        (server.evict, 1),
        (server.flush, 0.1),
    ]
    try:
        for _ in range(OPERATIONS):
            server.random.choices([op for op, _ in operations], [weight for _, weight in operations])[0]()
            server.check()
    finally:
        server.tier.close()
    counters = server.tier.counters()
    assert server.hits and server.forks and server.retractions and server.flushes
    assert counters.hits and counters.misses and counters.replaced
    assert counters.prefill_hot and counters.prefill_host
