"""Seeded random interleavings of everything the cache can be asked, against the dictionary oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch
from sglang_dsv4x.hicache import TieredCache
from sglang_dsv4x.jit_kernels.layouts import PageLayout
from tier_oracle import LayerOracle, on, random_rows, read_slots

OPERATIONS = 2500
"""Per unit: 10,000 over the four units."""

LAYERS, TOP_K, REQUESTS, CHUNK = 2, 12, 3, 96

HISTORY = 100
"""Rows that a prefill reads at most."""


@dataclass
class Request:
    """Owns its pages except the first `shared` ones, which it inherited by a fork."""

    pages: list[int]
    shared: int
    length: int
    """Entries written or inherited."""


@dataclass
class Model:
    """A page allocator and requests on one side, the cache and the oracle on the other."""

    cache: TieredCache
    random: random.Random
    hint_slots: int
    references: dict[int, int] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    owner_bytes: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    hinted: list[int] = field(default_factory=lambda: [0] * LAYERS)

    def __post_init__(self) -> None:
        shape = self.cache.shape
        self.pages = range(1, shape.entries // 64)
        self.free = list(self.pages)
        self.last_hint: dict[int, tuple[Request, list[int]]] = {}
        self.oracles = [LayerOracle(shape.unit, shape.groups) for _ in range(LAYERS)]
        self.generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        self.prefill = [[0, 0] for _ in range(LAYERS)]

    def entry(self, request: Request, position: int) -> int:
        return request.pages[position // 64] * 64 + position % 64

    def grow(self, request: Request, count: int) -> list[int]:
        """Allocates room for `count` more entries (fewer when pages run out) and returns them."""
        entries = []
        for position in range(request.length, request.length + count):
            if position // 64 == len(request.pages):
                if not self.free:
                    break
                page = self.free.pop(self.random.randrange(len(self.free)))
                self.references[page] = 1
                request.pages.append(page)
            entries.append(self.entry(request, position))
        return entries

    def begin(self, written: dict[int, bool], hints_may_fly: bool) -> None:
        if not hints_may_fly:
            self.join_all()
        items = list(written.items()) + [(0, True)] * self.random.randrange(3)
        items += items[: self.random.randrange(2)]
        self.random.shuffle(items)
        entries = on(self.cache, [entry for entry, _ in items])
        again = on(self.cache, [again for _, again in items], torch.bool)
        self.cache.begin_step(entries, again, outstanding_ok=hints_may_fly)
        for oracle in self.oracles:
            oracle.begin(written, self.cache.step)
        self.announced = list(written)

    def write(self, layer: int) -> None:
        entries = [*self.announced, 0]
        self.random.shuffle(entries)
        rows = random_rows(len(entries), self.cache.shape.layout.row_bytes, self.generator)
        self.cache.write(layer, on(self.cache, entries), rows.to(self.cache.device))
        for entry, row in zip(entries, rows, strict=True):
            if entry:
                self.oracles[layer].write(entry)
                self.owner_bytes[layer, entry] = row.clone()

    def resolve(
        self, layer: int, requests: list[Request], count: int
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Random selections of up to `count` entries per request; slots must be the oracle's."""
        queries = []
        for request in requests:
            positions = self.random.sample(range(request.length), min(count, request.length))
            hinted, before = self.last_hint.get(layer, (None, []))
            if hinted is request:
                positions = list(dict.fromkeys(before + positions))[:count]
            query = [(self.entry(request, p), p, request.length) for p in positions]
            query += [(-1, 0, request.length)] * (count - len(query))
            self.random.shuffle(query)
            queries.append(query)
        slots = self.cache.resolve(
            layer,
            on(self.cache, [[item[0] for item in query] for query in queries], torch.int32),
            on(self.cache, [[item[1] for item in query] for query in queries], torch.int32),
            on(self.cache, [request.length for request in requests], torch.int32),
        )
        assert slots.tolist() == self.oracles[layer].resolve(queries, self.cache.step)
        if self.cache._fetch_at_once:
            self.join(layer)
        return slots, [[item[0] for item in query] for query in queries]

    def join(self, layer: int) -> None:
        self.cache.join(layer)
        self.oracles[layer].join()
        self.hinted[layer] = 0

    def join_all(self) -> None:
        for layer in range(LAYERS):
            self.join(layer)

    def expected(self, layer: int, entries: list[int]) -> torch.Tensor:
        return torch.stack([self.owner_bytes[layer, entry] for entry in entries]).to(self.cache.device)

    # Operations

    def start(self) -> None:
        if len(self.requests) < REQUESTS:
            self.requests.append(Request([], 0, 0))

    def fork(self) -> None:
        parents = [request for request in self.requests if request.length >= 64]
        if parents and len(self.requests) < REQUESTS:
            parent = self.random.choice(parents)
            shared = self.random.randint(1, parent.length // 64)
            for page in parent.pages[:shared]:
                self.references[page] += 1
            self.requests.append(Request(parent.pages[:shared], shared, shared * 64))

    def extend(self) -> None:
        """One prefill chunk of one request, which then reads its whole history."""
        if not self.requests:
            return
        request = self.random.choice(self.requests)
        entries = self.grow(request, self.random.randint(1, CHUNK // 4))
        recent = self.random.randrange(len(entries) + 1)
        self.begin({entry: i >= recent for i, entry in enumerate(entries)}, self.random.random() < 0.5)
        request.length += len(entries)
        for layer in range(LAYERS):
            if self.announced:
                self.write(layer)
            if request.length:
                first = max(0, request.length - HISTORY)
                history = [self.entry(request, p) for p in range(first, request.length)]
                if self.random.random() < 0.5:
                    history = [self.entry(request, self.random.randrange(request.length)) for _ in history]
                rows = self.cache.gather(layer, on(self.cache, history))
                self.join(layer)
                assert torch.equal(rows, self.expected(layer, history))
                self.cache.verify_read(layer, on(self.cache, history), rows)
                hot = sum(self.oracles[layer].is_hot(entry) for entry in history)
                self.prefill[layer][0] += hot
                self.prefill[layer][1] += len(history) - hot

    def decode(self) -> None:
        """One step of all requests: some complete an entry, all select."""
        written: dict[int, bool] = {}
        for request in self.requests:
            if self.random.random() < 0.5:
                grown = self.grow(request, 1)
                request.length += len(grown)
                written.update(dict.fromkeys(grown, True))
        requests = [request for request in self.requests if request.length]
        self.begin(written, self.random.random() < 0.5)
        for layer in range(LAYERS):
            if written:
                self.write(layer)
            if not requests:
                continue
            slots, entries = self.resolve(layer, requests, TOP_K)
            self.join(layer)
            chosen = zip(slots.view(-1), chain(*entries), strict=True)
            read = [(slot, entry) for slot, entry in chosen if slot >= 0]
            rows = read_slots(self.cache, layer, torch.stack([slot for slot, _ in read]))
            wanted = [entry for _, entry in read]
            assert torch.equal(rows, self.expected(layer, wanted))
            self.cache.verify_read(layer, on(self.cache, wanted), rows)

    def hint(self) -> None:
        """A fetch that stays on its way over later steps, writes and frees."""
        layer = self.random.randrange(LAYERS)
        requests = [request for request in self.requests if request.length]
        count = self.random.randint(1, 4)
        room = self.hint_slots // self.cache.shape.unit
        if requests and self.hinted[layer] + count <= room:
            self.begin({}, hints_may_fly=True)
            self.hinted[layer] += count
            request = self.random.choice(requests)
            _, entries = self.resolve(layer, [request], count)
            hinted = [entry for entry in entries[0] if entry >= 0]
            self.last_hint[layer] = (
                request,
                [request.pages.index(entry // 64) * 64 + entry % 64 for entry in hinted],
            )

    def finish(self) -> None:
        """Frees a request; pages nobody shares any more are poisoned, or simply left to the next owner."""
        if not self.requests or (self.free and self.random.random() < 0.7):
            return
        request = self.requests.pop(self.random.randrange(len(self.requests)))
        freed = []
        for page in request.pages:
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                freed.append(page)
        self.free += freed
        entries = [page * 64 + i for page in freed for i in range(64)]
        if self.random.random() < 0.5:
            self.cache.forget(on(self.cache, entries))
            for layer, oracle in enumerate(self.oracles):
                self.join(layer)
                oracle.forget(entries)

    def flush(self) -> None:
        if self.random.random() < 0.1:
            self.cache.reset()
            for oracle in self.oracles:
                oracle.reset()
            self.hinted = [0] * LAYERS
            self.requests.clear()
            self.references.clear()
            self.free = list(self.pages)

    def check(self) -> None:
        live = None
        if self.random.random() < 0.1:
            entries = [self.entry(r, p) for r in self.requests for p in range(r.length)]
            live = on(self.cache, entries)
        self.cache.check_integrity(live)
        counters = self.cache.counters()
        for layer, oracle in enumerate(self.oracles):
            assert {name: counters.per_layer[name][layer] for name in oracle.counts} == oracle.counts
            hot, host = self.prefill[layer]
            assert counters.per_layer["prefill_hot"][layer] == hot
            assert counters.per_layer["prefill_host"][layer] == host
        assert len(self.free) + len(self.references) == len(self.pages)


PLACES = [
    ("cpu", "torch", False),
    ("cpu", "torch", True),
    pytest.param("cuda", "torch", False, marks=pytest.mark.gpu),
    pytest.param("cuda", "auto", False, marks=pytest.mark.gpu),
    pytest.param("cuda", "auto", True, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize(("device", "kernels", "fetch_at_once"), PLACES)
def test_every_read_shows_what_the_owner_wrote_in_any_interleaving(
    device: str,
    kernels: str,
    fetch_at_once: bool,
    unit: int,
    make_cache: Callable[..., TieredCache],
    small_layout: PageLayout,
) -> None:
    hint_slots = 6 * unit
    cache = make_cache(
        device=device,
        unit=unit,
        layers=LAYERS,
        pages=6 + 8 * unit,
        top_k=TOP_K,
        max_requests=REQUESTS,
        chunk_tokens=CHUNK,
        extra_slots=hint_slots,
        layout=small_layout,
        copy_delay_s=0.0001,
        kernels=kernels,
        fetch_at_once=fetch_at_once,
    )
    model = Model(cache, random.Random(unit), hint_slots)
    operations = [model.start, model.fork, model.extend, model.decode, model.hint, model.finish, model.flush]
    weights = [2, 1, 4, 8, 2, 1, 0.2]
    for _ in range(OPERATIONS):
        model.random.choices(operations, weights)[0]()
        model.check()
    counters = cache.counters()
    assert counters.misses and counters.hits and counters.replaced
    assert bool(counters.pending) != fetch_at_once
