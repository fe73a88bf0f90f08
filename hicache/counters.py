"""Counters of the tier, kept on the device and read when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..jit_kernels.resolve import FETCHED, MISSES, PENDING, REPLACED, SELECTED, STATES, VALID, WRITTEN

# Columns of the device tensor: those of `jit_kernels/resolve.py`, which its ops add to, then the cache's own.
_VALID = [state for state in range(STATES) if state & VALID]
_PENDING = [state for state in range(STATES) if state & PENDING and not state & VALID]
PREFILL_HOT, PREFILL_HOST, COLUMNS = range(WRITTEN + 1, WRITTEN + 4)


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
        self.all = torch.zeros((layers, COLUMNS), dtype=torch.int64, device=device)
        self._layers = list(self.all)
        self._cells = [list(row) for row in self.all]

    def layer(self, index: int) -> torch.Tensor:
        """int64 [15], what the ops on this layer add to."""
        return self._layers[index]

    def add_prefill(self, layer: int, hot: int, host: int) -> None:
        self._cells[layer][PREFILL_HOT].add_(hot)
        self._cells[layer][PREFILL_HOST].add_(host)

    def read(self) -> TierCounters:
        """Waits for the device."""
        columns = self.all.t().tolist()

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
