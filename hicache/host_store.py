"""The host store: row e of layer l is logical C4 entry e of layer l. No allocator, no table, no owner."""

from __future__ import annotations

import mmap

import torch

from ..jit_kernels.paged_rows import copy_rows
from .errors import HostMemoryError
from .host_memory import HostMemory, host_memory, require_host_memory
from .shape import TierShape


class HostStore:
    """Host rows of all layers, in one anonymous mapping of exactly their size.

    Physical pages appear when a row is first touched. For a CUDA device the mapping is registered as pinned
    memory instead of coming from torch's pinned allocator, which rounds up to a power of two; pinning touches
    every page.
    """

    def __init__(self, shape: TierShape, device: torch.device, memory: HostMemory | None = None) -> None:
        """Raises HostMemoryError, before anything is allocated, when the rows do not fit in `memory`
        (default: what the machine and the cgroup leave now)."""
        require_host_memory(shape.host_bytes, host_memory() if memory is None else memory)
        try:
            mapping = mmap.mmap(-1, shape.host_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(
                f"The host store's {shape.host_bytes} bytes cannot be mapped: {error}. Lower "
                f"--dsv4x-host-memory-gb or --max-total-tokens."
            ) from error
        self.rows = torch.frombuffer(mapping, dtype=torch.uint8).view(
            shape.layers, shape.entries, shape.layout.row_bytes
        )
        self._pinned = device.type == "cuda"
        if self._pinned:
            status = int(torch.cuda.cudart().cudaHostRegister(self.rows.data_ptr(), shape.host_bytes, 0))
            if status != 0:
                self._pinned = False
                raise HostMemoryError(
                    f"CUDA cannot pin the host store's {shape.host_bytes} bytes (cudaHostRegister: error "
                    f"{status}). Raise the locked-memory limit (ulimit -l), or lower --dsv4x-host-memory-gb."
                )

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
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.rows.data_ptr())
            self._pinned = False
