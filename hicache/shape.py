"""Sizes of the tier, the bound on hot slots, and what everything costs in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, PageLayout
from ..jit_kernels.resolve import GROUP_BITS
from .errors import TierError

UNITS = (1, 2, 4, 8)

COMPRESSION = 4
"""Tokens per C4 entry."""


@dataclass(frozen=True)
class TierShape:
    """Sizes of one tiered cache. `check` before use."""

    layers: int
    """C4 layers."""
    entries: int
    """Host rows per layer, the reserved page 0 (entries 0..63) included."""
    slots: int
    """Hot entries per layer."""
    unit: int
    """Neighbouring entries that share a tag and are fetched together."""
    layout: PageLayout
    """Layout of a device page of 64 slots; a host row is one row of it."""
    top_k: int
    """Entries that a query selects at most."""
    max_requests: int
    """Requests in one decode step at most."""
    chunk_tokens: int
    """New tokens in one prefill step at most."""

    @property
    def bound(self) -> int:
        """Fewest slots with which every step fits: each request's selection, the entry it completes and the
        one before it, or a chunk's new entries, with one unit spent on each."""
        return self.unit * (self.max_requests * (self.top_k + 2) + -(-self.chunk_tokens // COMPRESSION))

    @property
    def groups(self) -> int:
        """Groups of `unit` slots per layer; slots beyond the last whole group stay unused."""
        return self.slots // self.unit

    @property
    def units(self) -> int:
        """Units per layer."""
        return -(-self.entries // self.unit)

    @property
    def pages(self) -> int:
        """Device pages per layer."""
        return -(-self.slots // self.layout.entries)

    @property
    def host_bytes(self) -> int:
        """Host store, all layers."""
        return self.layers * self.entries * self.layout.row_bytes

    @property
    def hot_bytes(self) -> int:
        """Device pages, all layers."""
        return self.layers * self.pages * self.layout.page_bytes

    @property
    def table_bytes(self) -> int:
        """Device tables, all layers (`jit_kernels/resolve.py`): a group per unit; tag, age, hold per group; a
        state per slot; one spare unit and group; the order of groups; the clock. CUDA kernels take
        `scratch_bytes` besides."""
        spare = self.groups + 1
        return self.layers * (4 * (self.units + 1) + (16 + self.unit) * spare + 8 * self.groups) + 4

    @property
    def scratch_bytes(self) -> int:
        """About what the CUDA kernels' scratch takes: two queues of groups per layer, two claims per unit."""
        return 8 * self.layers * self.groups + 16 * (self.units + 1)

    def check(self) -> None:
        """Raises TierError for sizes with which a step could fail; names the flag and the number that would
        do."""
        if self.unit not in UNITS:
            raise TierError(f"--dsv4x-fetch-unit is {self.unit}; choose one of {', '.join(map(str, UNITS))}.")
        if self.layout.entries != C4_ENTRIES_PER_PAGE:
            raise TierError(f"A C4 page holds {C4_ENTRIES_PER_PAGE} entries, not {self.layout.entries}.")
        if min(self.layers, self.top_k, self.max_requests, self.chunk_tokens) < 1:
            raise TierError(
                f"A tier needs at least one C4 layer ({self.layers}), one selected entry ({self.top_k}), one "
                f"running request ({self.max_requests}) and a bounded chunk ({self.chunk_tokens} tokens: "
                f"--chunked-prefill-size)."
            )
        if self.entries <= C4_ENTRIES_PER_PAGE or self.entries % C4_ENTRIES_PER_PAGE:
            raise TierError(
                f"{self.entries} C4 entries are not whole pages of {C4_ENTRIES_PER_PAGE} beyond the reserved "
                f"page 0; raise --max-total-tokens to a multiple of {C4_ENTRIES_PER_PAGE * COMPRESSION}."
            )
        if self.groups >= 1 << GROUP_BITS:
            most = self.unit * ((1 << GROUP_BITS) - 1)
            raise TierError(
                f"--dsv4x-hot-entries is {self.slots}; the tables count at most {most} per layer with "
                f"--dsv4x-fetch-unit {self.unit}."
            )
        if self.slots < self.bound:
            raise TierError(
                f"--dsv4x-hot-entries is {self.slots}, fewer than one step can need: {self.bound} = "
                f"{self.unit} (fetch unit) * ({self.max_requests} requests * ({self.top_k} selected + 2) + "
                f"{self.chunk_tokens} chunk tokens / {COMPRESSION}). Give at least {self.bound}, or lower "
                f"--max-running-requests, --chunked-prefill-size or --dsv4x-fetch-unit."
            )
