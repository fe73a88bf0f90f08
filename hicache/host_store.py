"""The host store: row e of layer l is logical C4 entry e of layer l. No allocator, no table, no owner."""

from __future__ import annotations

import torch

from ..jit_kernels.paged_rows import copy_rows
from .host_mapping import HostMapping
from .host_memory import HostMemory
from .shape import TierShape


class HostStore:
    """Host rows of all layers, in one mapping of exactly their size (`HostMapping`)."""

    def __init__(self, shape: TierShape, device: torch.device, memory: HostMemory | None = None) -> None:
        """Raises HostMemoryError, before anything is allocated, when the rows do not fit in `memory`
        (default: what the machine and the cgroup leave now)."""
        self._mapping = HostMapping(
            shape.host_bytes,
            device,
            what="The host store",
            remedy="Lower --dsv4x-host-memory-gb or --max-total-tokens",
            memory=memory,
        )
        self.rows = self._mapping.data.view(shape.layers, shape.entries, shape.layout.row_bytes)

    def read(self, layer: int, entries: torch.Tensor) -> torch.Tensor:
        """u8 [N, row_bytes], a copy on the host. entries int64 [N] on any device."""
        return self.rows[layer].index_select(0, entries.cpu())

    def write(self, layer: int, entries: torch.Tensor, rows: torch.Tensor) -> None:
        """Write-through. entries int64 [N] and rows u8 [N, row_bytes] on any device; modifies the store."""
        copy_rows(self.rows[layer], entries.cpu(), rows.cpu())

    def poison(self, entries: torch.Tensor) -> None:
        """Fills the entries' rows of all layers with 0xFF bytes, NaN in every storage format; modifies the
        store."""
        self.rows.index_fill_(1, entries.cpu(), 0xFF)

    def close(self) -> None:
        """Undoes the pinning. The rows must not be used afterwards. May be called twice."""
        self._mapping.close()
