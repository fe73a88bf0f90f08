"""Counters of the tier, kept on the device and read when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..jit_kernels.resolve import PENDING, STATES, VALID, Resolution

# Columns of the device tensor: first how often selections found their slot in each state (`Resolution`).
_VALID = [state for state in range(STATES) if state & VALID]
_PENDING = [state for state in range(STATES) if state & PENDING and not state & VALID]
SELECTED, MISSES, REPLACED, FETCHED, WRITTEN, PREFILL_HOT, PREFILL_HOST, COLUMNS = range(STATES, STATES + 8)


class TierCounters(NamedTuple):
    """Totals since the cache was made (a reset does not clear them), and the same per layer.

    One selection of one query is counted once: selected == hits + misses + pending.
    """

    selected: int
    """Entries that decode queries selected."""
    hits: int
    """... whose bytes were in a slot."""
    misses: int
    """... whose bytes had to be asked for; two queries that miss one entry count two."""
    pending: int
    """... whose bytes were already on their way."""
    fetched_entries: int
    """Entries fetched to slots, neighbours in the unit included; one that two queries miss counts one."""
    bytes_to_device: int
    """Host rows that went to the device: fetches and prefill's reads of host rows."""
    bytes_to_host: int
    """Write-through."""
    replaced: int
    """Units that lost their slots to others."""
    prefill_hot: int
    """Rows that prefill read from slots."""
    prefill_host: int
    """Rows that prefill read from the host store."""
    per_layer: dict[str, list[int]]
    """The fields above, one number per C4 layer."""


class DeviceCounters:
    """int64 [L, 15] on the device, added to without reading it."""

    def __init__(self, layers: int, row_bytes: int, device: torch.device) -> None:
        self._row_bytes = row_bytes
        self._counts = torch.zeros((layers, COLUMNS), dtype=torch.int64, device=device)
        self._states = [row[:STATES] for row in self._counts]
        self._cells = [list(row) for row in self._counts]

    def add_resolution(self, layer: int, found: Resolution) -> None:
        self._states[layer].add_(found.states)
        cells = self._cells[layer]
        cells[SELECTED].add_(found.selected)
        if found.replaced is not None:
            cells[MISSES].add_(found.missing)
            cells[FETCHED].add_(found.fetch_slots.shape[0])
            cells[REPLACED].add_(found.replaced)

    def add_replaced(self, replaced: torch.Tensor) -> None:
        """`replaced` int64 [L]."""
        self._counts[:, REPLACED] += replaced

    def add_written(self, layer: int, entries: int) -> None:
        self._cells[layer][WRITTEN].add_(entries)

    def add_prefill(self, layer: int, hot: int, host: int) -> None:
        self._cells[layer][PREFILL_HOT].add_(hot)
        self._cells[layer][PREFILL_HOST].add_(host)

    def read(self) -> TierCounters:
        """Waits for the device."""
        columns = self._counts.t().tolist()

        def summed(*names: int) -> list[int]:
            return [sum(values) for values in zip(*(columns[name] for name in names), strict=True)]

        per_layer = {
            "selected": columns[SELECTED],
            "hits": summed(*_VALID),
            "misses": columns[MISSES],
            "pending": summed(*_PENDING),
            "fetched_entries": columns[FETCHED],
            "bytes_to_device": [self._row_bytes * rows for rows in summed(FETCHED, PREFILL_HOST)],
            "bytes_to_host": [self._row_bytes * rows for rows in columns[WRITTEN]],
            "replaced": columns[REPLACED],
            "prefill_hot": columns[PREFILL_HOT],
            "prefill_host": columns[PREFILL_HOST],
        }
        return TierCounters(**{name: sum(layers) for name, layers in per_layer.items()}, per_layer=per_layer)
