"""The tiered C4 cache: every operation in the order in which a forward pass may call it.

begin_step                            once, all layers
write -> resolve -> join -> read      decode, layer by layer
write -> gather                       prefill, layer by layer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..jit_kernels import resolve as ops
from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE
from ..jit_kernels.paged_rows import copy_rows, gather_rows, scatter_rows
from ..jit_kernels.registry import AUTO, Kernels, select
from ..jit_kernels.resolve_cuda import prepare, raise_fault
from .copy_stream import Fetch, new_copy_stream
from .counters import DeviceCounters, TierCounters
from .errors import TierError
from .host_store import HostStore
from .integrity import check_bytes, check_counters, check_tables
from .shadow import ShadowStore
from .shape import TierShape
from .tables import clear_tables, new_tables


@contextmanager
def _as_tier_error() -> Iterator[None]:
    try:
        yield
    except ops.TableError as error:
        raise TierError(
            f"{error}. Within the bound of --dsv4x-hot-entries this cannot happen: the engine calls "
            f"the cache in the wrong order."
        ) from error


class TieredCache:
    """C4 rows of all layers: every row in the host store, some in hot slots that nobody owns.

    Locations belong to SGLang's allocator and radix tree; this class only knows where the bytes are. All
    methods run on one forward stream. `checks` keeps a resident copy of every row and makes `verify_read` and
    `forget` usable.
    """

    def __init__(
        self,
        shape: TierShape,
        device: torch.device | str,
        *,
        checks: bool,
        copy_timeout_s: float,
        copy_delay_s: float = 0,
        kernels: Kernels | None = None,
        fetch_at_once: bool = False,
    ) -> None:
        """Raises TierError for an impossible shape and HostMemoryError when the rows do not fit, before
        allocating.

        Args:
            copy_timeout_s: seconds after which a fetch that has not arrived is an error.
            copy_delay_s: tests: delay every fetch by up to this many seconds.
            kernels: chosen backends; None: the fastest that run on `device`.
            fetch_at_once: `resolve` brings the missing rows itself, on the forward stream, and leaves nothing
                to join: less to do on a GPU where nothing is computed while the rows are on their way.
        """
        shape.check()
        self.shape = shape
        self.device = torch.device(device)
        self._kernels = select(AUTO, self.device) if kernels is None else kernels
        self._fetch_at_once = fetch_at_once
        if self._kernels.chosen["resolve"] == "cuda":
            prepare()
        self._store = HostStore(shape, self.device)
        self._pages = torch.zeros(
            (shape.layers, shape.pages, shape.layout.page_bytes), dtype=torch.uint8, device=self.device
        )
        self._tables = new_tables(shape, self.device)
        self._layer_tables = [self._tables.layer(i) for i in range(shape.layers)]
        self._counters = DeviceCounters(shape.layers, shape.layout.row_bytes, self.device)
        self._shadow = ShadowStore(shape, self.device) if checks else None
        self._copies = new_copy_stream(
            self._store, self._pages, shape.layout, copy_timeout_s, copy_delay_s, self._kernels
        )
        self._outstanding: list[list[Fetch]] = [[] for _ in range(shape.layers)]

    @property
    def step(self) -> int:
        """Number of the current step. Waits for the device."""
        return int(self._tables.clock)

    def device_pages(self, layer: int) -> torch.Tensor:
        """u8 [pages, page_bytes] of a layer: slot s is entry s % 64 of page s // 64. The address never
        changes. A slot from `resolve` may be read after `join`, until the next `begin_step`. Does not modify
        the cache."""
        return self._pages[layer]

    def begin_step(
        self,
        written: torch.Tensor,
        last_used_again: torch.Tensor | None = None,
        *,
        outstanding_ok: bool = False,
    ) -> None:
        """Starts a step: claims slots in all layers for the entries that the step completes. Modifies the
        cache.

        Args:
            written: int64 (or int32) [W], one per token of the step: the entry that the token completes, or 0.
                Duplicates are allowed; entries of page 0 are dropped.
            last_used_again: bool [W]; False: the entry enters at the least-recently-used end, for a prefill's
                older entries. None: all True.
            outstanding_ok: fetches may still be on their way (hints); otherwise that is an error.
        Raises: TierError when the last step's fetches were not joined, or beyond the bound.
        """
        open_layers = [layer for layer, fetches in enumerate(self._outstanding) if fetches]
        if open_layers and not outstanding_ok:
            raise TierError(f"Step {self.step} ended with unjoined fetches of layers {open_layers}.")
        with _as_tier_error():
            raise_fault(self._tables)
            self._kernels.claim_writes(
                self._tables, written, last_used_again, bool(open_layers), self._counters.all
            )
        if self._shadow is not None:
            self._shadow.announce(written[written >= C4_ENTRIES_PER_PAGE].long())

    def write(self, layer: int, entries: torch.Tensor, rows: torch.Tensor) -> None:
        """A layer's completed rows go to their slots and through to their host rows. Modifies the cache.

        When it returns the entries are hot+clean: this step's `resolve` and `gather` of the layer see the new
        bytes. A fetch of the layer that is still on its way is waited for first, so that it cannot overwrite
        them.

        Args:
            entries: int64 (or int32) [W], as announced to `begin_step`; those of page 0 are dropped with their rows.
            rows: u8 [W, row_bytes].
        Raises: TierError for an entry that was not announced.
        """
        entries = entries.long()
        for fetch in self._outstanding[layer]:
            self._copies.wait(fetch)
        with _as_tier_error():
            self._kernels.write_rows(
                self._layer_tables[layer],
                entries,
                rows,
                self._pages[layer],
                self.shape.layout,
                self._store.rows[layer],
                self._counters.layer(layer),
            )
        if self._shadow is not None:
            real = (entries >= C4_ENTRIES_PER_PAGE).nonzero().squeeze(1)
            self._shadow.write(layer, entries.index_select(0, real), rows.index_select(0, real))

    def resolve(
        self, layer: int, entries: torch.Tensor, positions: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        """Slots of the selected entries; starts the fetch of those that are missing. Modifies the cache.

        Args:
            entries: int32 [T, K], -1: none (entries of page 0 count as none).
            positions: int32 [T, K], position of the entry among the entries of its request.
            lens: int32 [T], entries of that request written so far, this step's included.
        Returns: int32 [T, K], -1 where none. Valid to read after `join(layer)`, until the next `begin_step`.
        Raises: TierError for a selection that no fetch can bring (beyond `lens`, or announced by this step
            and not written yet), and beyond the bound.
        """
        tables, counts = self._layer_tables[layer], self._counters.layer(layer)
        in_flight = bool(self._outstanding[layer])
        with _as_tier_error():
            if self._fetch_at_once:
                slots: torch.Tensor = self._kernels.resolve_rows(
                    tables,
                    entries,
                    positions,
                    lens,
                    in_flight,
                    counts,
                    self._pages[layer],
                    self.shape.layout,
                    self._store.rows[layer],
                )
                return slots
            found: ops.Resolution = self._kernels.resolve(tables, entries, positions, lens, in_flight, counts)
        if found.fetch_slots.shape[0]:
            fetch = self._copies.fetch(layer, found.fetch_entries, found.fetch_slots, found.fetch_count)
            self._outstanding[layer].append(fetch)
        return found.slots

    def join(self, layer: int) -> None:
        """Waits for the layer's fetches; their slots turn hot+clean. Modifies the cache.

        Raises: TierError when a fetch failed (with its cause) or has not arrived after copy_timeout_s.
        """
        for fetch in self._outstanding[layer]:
            self._copies.wait(fetch)
        for fetch in self._outstanding[layer]:
            self._kernels.finish_fetch(self._layer_tables[layer], fetch.slots, fetch.count)
        self._outstanding[layer].clear()

    def gather(self, layer: int, entries: torch.Tensor) -> torch.Tensor:
        """Rows of entries wherever they are, hot slots and host rows alike: what prefill reads. Joins the
        layer's outstanding fetches; otherwise modifies counters only.

        Args:
            entries: int64 [N], written ones (page 0 reads as its host rows: zeros).
        Returns: u8 [N, row_bytes], a copy, on the device.
        """
        self.join(layer)
        found = ops.lookup(self._layer_tables[layer], entries)
        valid = found.state == ops.VALID
        hot = valid.nonzero().squeeze(1)
        self._counters.add_prefill(layer, hot.shape[0], entries.shape[0] - hot.shape[0])
        if hot.shape[0] == entries.shape[0]:
            return gather_rows(self._pages[layer], self.shape.layout, found.slots)
        if hot.shape[0] == 0:
            return self._store.read(layer, entries).to(self.device)
        cold = (~valid).nonzero().squeeze(1)
        rows = torch.empty(
            (entries.shape[0], self.shape.layout.row_bytes), dtype=torch.uint8, device=self.device
        )
        hot_rows = gather_rows(self._pages[layer], self.shape.layout, found.slots.index_select(0, hot))
        cold_rows = self._store.read(layer, entries.index_select(0, cold)).to(self.device)
        copy_rows(rows, hot, hot_rows)
        copy_rows(rows, cold, cold_rows)
        return rows

    def forget(self, entries: torch.Tensor) -> None:
        """Checks only: locations were freed. Clears their tags, fills their host rows and hot copies with NaN
        bytes (0xFF), and makes a read of them an error until they are written again. Modifies the cache.

        Args:
            entries: int64 [N]; those of page 0 are dropped.
        Raises: TierError without checks.
        """
        shadow = self._checking()
        entries = torch.unique(entries[entries >= C4_ENTRIES_PER_PAGE])
        for layer, tables in enumerate(self._layer_tables):
            self.join(layer)
            slots = ops.drop(tables, entries)
            poison = torch.full(
                (slots.shape[0], self.shape.layout.row_bytes), 0xFF, dtype=torch.uint8, device=self.device
            )
            scatter_rows(self._pages[layer], self.shape.layout, slots, poison)
        self._store.poison(entries)
        shadow.forget(entries)

    def reset(self) -> None:
        """Flush: everything cold, nothing written; counters go on. Modifies the cache."""
        for layer in range(self.shape.layers):
            self.join(layer)
        clear_tables(self._tables)
        if self._shadow is not None:
            self._shadow.forget(None)

    def counters(self) -> TierCounters:
        """Totals since the start. Waits for the device; does not modify the cache.

        Raises: TierError when a kernel found a fault.
        """
        totals = self._counters.read()
        self._raise_fault()
        return totals

    def check_integrity(self, live: torch.Tensor | None = None) -> None:
        """Checks every invariant of tables, bytes and counters. Waits for outstanding fetches; modifies
        nothing.

        Args:
            live: int64 [N], entries of live locations, to which the comparison of bytes is limited; None:
                all.
        Raises: IntegrityError naming layer and entry.
        """
        for fetches in self._outstanding:
            for fetch in fetches:
                self._copies.wait(fetch)
        self._raise_fault()
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        outstanding = [
            torch.cat([none, *(f.slots[: None if f.count is None else int(f.count)].long() for f in fetches)])
            for fetches in self._outstanding
        ]
        check_tables(self._tables, outstanding)
        check_bytes(self._tables, self._pages, self.shape.layout, self._store, self._shadow, live)
        check_counters(self.counters())

    def verify_read(self, layer: int, entries: torch.Tensor, rows: torch.Tensor) -> None:
        """Checks only: the rows that attention is about to read are what the entries' owners wrote. Modifies
        nothing.

        Args:
            entries: int64 [N]; negative ones (no selection) are skipped.
            rows: u8 [N, row_bytes].
        Raises: IntegrityError naming layer, entry and the first differing byte, or a row that was never
            written; TierError without checks.
        """
        shadow = self._checking()
        chosen = entries >= 0
        if not bool(chosen.all()):
            entries, rows = entries[chosen], rows[chosen]
        shadow.verify(layer, entries, rows, f"attention in step {self.step}")

    def close(self) -> None:
        """Ends the copy stream and unpins the host store. The cache must not be used afterwards."""
        self._copies.close()
        self._store.close()

    def _raise_fault(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with _as_tier_error():
            raise_fault(self._tables)

    def _checking(self) -> ShadowStore:
        if self._shadow is None:
            raise TierError("This needs the resident copy that --dsv4x-checks step keeps.")
        return self._shadow
