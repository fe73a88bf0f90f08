"""Host memory for rows that leave the device: one anonymous mapping of exactly its size, pinned for a CUDA device."""

from __future__ import annotations

import mmap

import torch

from .errors import HostMemoryError
from .host_memory import HostMemory, host_memory, require_host_memory


class HostMapping:
    """`data`: u8 [size]. Physical pages appear when a byte is first touched, unless the mapping is pinned.

    For a CUDA device the mapping is registered as pinned memory instead of coming from torch's pinned allocator,
    which rounds up to a power of two; pinning touches every page.
    """

    def __init__(
        self, size: int, device: torch.device, *, what: str, remedy: str, memory: HostMemory | None = None
    ) -> None:
        """`what` and `remedy` go into errors: "The host store", "Lower --dsv4x-host-memory-gb".

        Raises HostMemoryError, before anything is allocated, when `size` bytes do not fit in `memory` (default: what
        the machine and the cgroup leave now), and when the mapping or the pinning fails.
        """
        require_host_memory(size, host_memory() if memory is None else memory, what=what, remedy=remedy)
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(f"{what}'s {size} bytes cannot be mapped: {error}. {remedy}.") from error
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        self._pinned = device.type == "cuda"
        if self._pinned:
            status = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), size, 0))
            if status != 0:
                self._pinned = False
                raise HostMemoryError(
                    f"CUDA cannot pin {what.lower()}'s {size} bytes (cudaHostRegister: error {status}). Raise the "
                    f"locked-memory limit (ulimit -l). {remedy}."
                )

    def close(self) -> None:
        """Undoes the pinning. The bytes must not be used afterwards. May be called twice."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
            self._pinned = False
