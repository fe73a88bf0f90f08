"""What the tables must say, in dictionaries and loops: an independent reading of the design, used as an
oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang_dsv4x.hicache import TieredCache
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows


def random_rows(count: int, row_bytes: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, generator=generator)


def on(cache: TieredCache, values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """`values` as a tensor on the cache's device."""
    return torch.as_tensor(values, dtype=dtype).to(cache.device)


def write_step(
    cache: TieredCache,
    entries: torch.Tensor,
    rows: list[torch.Tensor],
    used_again: torch.Tensor | None = None,
    **options: bool,
) -> None:
    """A whole step that only writes: `rows[layer]` u8 [W, row_bytes]."""
    cache.begin_step(entries, used_again, **options)
    for layer, layer_rows in enumerate(rows):
        cache.write(layer, entries, layer_rows)


def fill(cache: TieredCache, entries: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Writes entries in chunks that the tier allows; returns each layer's rows, u8 [N, row_bytes]."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        random_rows(len(entries), cache.shape.layout.row_bytes, generator) for _ in range(cache.shape.layers)
    ]
    chunk = cache.shape.chunk_tokens // 4
    for start in range(0, len(entries), chunk):
        part = slice(start, start + chunk)
        write_step(cache, entries[part], [layer_rows[part] for layer_rows in rows])
    return rows


def select(cache: TieredCache, layer: int, entries: list[list[int]], first: int, length: int) -> torch.Tensor:
    """resolve() for requests whose entries are `first`, `first + 1`, ... and that have written `length`."""
    chosen = torch.tensor(entries, dtype=torch.int32)
    lens = torch.full((len(entries),), length, dtype=torch.int32)
    return cache.resolve(layer, chosen, (chosen - first).clamp(min=0).int(), lens)


def read_slots(cache: TieredCache, layer: int, slots: torch.Tensor) -> torch.Tensor:
    return gather_rows(cache.device_pages(layer), cache.shape.layout, slots.reshape(-1).long())


@dataclass
class Group:
    tag: int | None = None
    last_used: int = -1
    held: int = -1
    valid: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)

    def absent(self, entry: int) -> bool:
        return entry not in self.valid | self.pending | self.writing


class LayerOracle:
    """One layer's hot cache. Numbers of slots and counters are predicted exactly."""

    def __init__(self, unit: int, groups: int) -> None:
        self.unit = unit
        self.groups = [Group() for _ in range(groups)]
        self.where: dict[int, int] = {}
        self.counts = dict.fromkeys(
            ("selected", "hits", "misses", "pending", "fetched_entries", "replaced"), 0
        )

    def _claim(self, units: list[int], step: int) -> None:
        """Cold units, in this order, take the groups unused longest."""
        free = [number for number, group in enumerate(self.groups) if group.held < step and not group.pending]
        free.sort(key=lambda number: (self.groups[number].last_used, number))
        assert len(free) >= len(units), "the oracle ran out of groups"
        for unit, number in zip(units, free, strict=False):
            old = self.groups[number].tag
            if old is not None:
                del self.where[old]
                self.counts["replaced"] += 1
            self.groups[number] = Group(tag=unit, last_used=0, held=step)
            self.where[unit] = number

    def group_of(self, entry: int) -> Group | None:
        number = self.where.get(entry // self.unit)
        return None if number is None else self.groups[number]

    def slot(self, entry: int) -> int:
        return self.where[entry // self.unit] * self.unit + entry % self.unit

    def begin(self, written: dict[int, bool], step: int) -> None:
        """written: entry -> used again."""
        units = sorted({entry // self.unit for entry in written})
        cold = [unit for unit in units if unit not in self.where]
        for unit in units:
            if unit in self.where:
                self.groups[self.where[unit]].held = step
        self._claim(cold, step)
        for entry, again in written.items():
            group = self.groups[self.where[entry // self.unit]]
            if again:
                group.last_used = step
            group.valid.discard(entry)
            group.writing.add(entry)

    def write(self, entry: int) -> None:
        group = self.group_of(entry)
        assert group is not None
        group.writing.remove(entry)
        group.valid.add(entry)

    def resolve(self, queries: list[list[tuple[int, int, int]]], step: int) -> list[list[int]]:
        """queries: per query (entry, position, written), entry -1 for none. Returns slots."""
        selected = [item for query in queries for item in query if item[0] >= 0]
        missing = []
        for entry, position, written in selected:
            group = self.group_of(entry)
            self.counts["selected"] += 1
            if group is not None and entry in group.valid:
                self.counts["hits"] += 1
            elif group is not None and entry in group.pending:
                self.counts["pending"] += 1
            else:
                self.counts["misses"] += 1
                missing.append((entry, position, written))
            if group is not None:
                group.held = step
        named = dict.fromkeys(entry // self.unit for entry, _, _ in missing)
        cold = [unit for unit in named if unit not in self.where]
        self._claim(cold, step)
        for entry, position, written in missing:
            first = entry - entry % self.unit
            group = self.groups[self.where[entry // self.unit]]
            for member in range(first, first + self.unit):
                if position + member - entry < written and group.absent(member):
                    group.pending.add(member)
                    self.counts["fetched_entries"] += 1
        for entry, _, _ in selected:
            group = self.groups[self.where[entry // self.unit]]
            group.held = group.last_used = step
        return [[self.slot(item[0]) if item[0] >= 0 else -1 for item in query] for query in queries]

    def join(self) -> None:
        for group in self.groups:
            group.valid |= group.pending - group.writing
            group.pending.clear()

    def forget(self, entries: list[int]) -> None:
        touched = set()
        for entry in entries:
            group = self.group_of(entry)
            if group is not None:
                touched.add(entry // self.unit)
                group.valid.discard(entry)
                group.writing.discard(entry)
        for unit in touched:
            number = self.where[unit]
            if not (self.groups[number].valid or self.groups[number].writing):
                self.groups[number] = Group()
                del self.where[unit]

    def reset(self) -> None:
        self.groups = [Group() for _ in self.groups]
        self.where.clear()

    def is_hot(self, entry: int) -> bool:
        group = self.group_of(entry)
        return group is not None and entry in group.valid
