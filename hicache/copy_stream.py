"""The copy stream: moves host rows into slots, asynchronously, and nothing else.

On CUDA it is a CUDA stream. On CPU it is a real worker thread with events, so that an ordering fault (a read
before the join, a slot reused under a fetch) shows there too. The tables are changed by the forward stream
alone.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from ..jit_kernels.layouts import PageLayout
from ..jit_kernels.paged_rows import scatter_rows
from .errors import TierError
from .host_store import HostStore


@dataclass
class Fetch:
    """One enqueued fetch: host rows `entries` int64 [F] of a layer go to `slots` int64 [F]."""

    layer: int
    entries: torch.Tensor
    slots: torch.Tensor
    enqueued: float = field(default_factory=time.monotonic)


class CopyStream(ABC):
    """What the cache asks of a copy stream."""

    @abstractmethod
    def fetch(self, layer: int, entries: torch.Tensor, slots: torch.Tensor) -> Fetch:
        """Enqueues a fetch behind everything that the forward stream has been given so far, and returns at
        once."""

    @abstractmethod
    def wait(self, fetch: Fetch) -> None:
        """What the forward stream is given from here on runs after the fetch. Raises TierError if the fetch
        failed or is overdue."""

    @abstractmethod
    def close(self) -> None:
        """Ends the stream; fetches not begun are dropped. May be called twice."""


def new_copy_stream(
    store: HostStore, pages: torch.Tensor, layout: PageLayout, timeout_s: float, delay_s: float
) -> CopyStream:
    """The copy stream for the device of `pages` (u8 [L, P, page_bytes])."""
    kind = CudaCopyStream if pages.device.type == "cuda" else WorkerCopyStream
    return kind(store, pages, layout, timeout_s, delay_s)


def _overdue(fetch: Fetch, timeout_s: float) -> TierError:
    return TierError(
        f"A fetch of {fetch.entries.shape[0]} C4 rows of layer {fetch.layer} has not arrived after "
        f"{timeout_s:g} s: the copy stream hangs, or the machine is so slow that "
        f"--dsv4x-copy-timeout-s must be raised."
    )


@dataclass
class _WorkerFetch(Fetch):
    arrived: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class WorkerCopyStream(CopyStream):
    """A thread that serves fetches in order. `delay_s`: wait up to that long (seeded, at least half) before
    each."""

    def __init__(
        self, store: HostStore, pages: torch.Tensor, layout: PageLayout, timeout_s: float, delay_s: float
    ) -> None:
        self._store, self._pages, self._layout = store, pages, layout
        self._timeout_s, self._delay_s = timeout_s, delay_s
        self._delays = random.Random(0)
        self._closing = threading.Event()
        self._queue: SimpleQueue[_WorkerFetch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="dsv4x-copy-stream", daemon=True)
        self._thread.start()

    def fetch(self, layer: int, entries: torch.Tensor, slots: torch.Tensor) -> Fetch:
        if self._closing.is_set():
            raise TierError("The tiered cache is closed; it cannot fetch.")
        fetch = _WorkerFetch(layer, entries, slots)
        self._queue.put(fetch)
        return fetch

    def wait(self, fetch: Fetch) -> None:
        assert isinstance(fetch, _WorkerFetch)
        if not fetch.arrived.wait(self._timeout_s):
            raise _overdue(fetch, self._timeout_s)
        if fetch.error is not None:
            raise TierError(
                f"A fetch of {fetch.entries.shape[0]} C4 rows of layer {fetch.layer} failed: {fetch.error}"
            ) from fetch.error

    def close(self) -> None:
        self._closing.set()
        self._queue.put(None)
        self._thread.join(self._timeout_s)

    def _serve(self) -> None:
        while (fetch := self._queue.get()) is not None:
            try:
                if self._delay_s:
                    self._closing.wait(self._delay_s * self._delays.uniform(0.5, 1.0))
                if self._closing.is_set():
                    raise TierError("the tiered cache was closed")
                self._copy(fetch)
            except Exception as error:  # the forward stream re-raises it in wait()
                fetch.error = error
            fetch.arrived.set()

    def _copy(self, fetch: _WorkerFetch) -> None:
        rows = self._store.read(fetch.layer, fetch.entries)
        scatter_rows(self._pages[fetch.layer], self._layout, fetch.slots, rows)


@dataclass
class _CudaFetch(Fetch):
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class CudaCopyStream(CopyStream):
    """The same on a CUDA stream, in torch alone: the host gathers the rows into pinned staging memory, so
    that enqueuing waits for the miss list (a host synchronisation that a zero-copy gather kernel does not
    need).

    `wait` makes the forward stream wait, not the host; a fetch that hangs is reported by a later `fetch` or
    `wait`.
    """

    def __init__(
        self, store: HostStore, pages: torch.Tensor, layout: PageLayout, timeout_s: float, delay_s: float
    ) -> None:
        self._store, self._pages, self._layout = store, pages, layout
        self._timeout_s, self._delay_s = timeout_s, delay_s
        self._stream = torch.cuda.Stream(pages.device)
        self._unfinished: list[_CudaFetch] = []

    def fetch(self, layer: int, entries: torch.Tensor, slots: torch.Tensor) -> Fetch:
        self._report_overdue()
        fetch = _CudaFetch(layer, entries, slots)
        rows = self._store.read(layer, entries).pin_memory()
        forward = torch.cuda.current_stream(self._pages.device)
        self._stream.wait_stream(forward)
        with torch.cuda.stream(self._stream):
            if self._delay_s:
                # A second is about 1.5e9 cycles of a data-centre GPU; the exact length does not matter.
                torch.cuda._sleep(int(self._delay_s * 1.5e9))
            scatter_rows(
                self._pages[layer], self._layout, slots, rows.to(self._pages.device, non_blocking=True)
            )
            slots.record_stream(self._stream)
            fetch.arrived.record(self._stream)
        self._unfinished.append(fetch)
        return fetch

    def wait(self, fetch: Fetch) -> None:
        assert isinstance(fetch, _CudaFetch)
        self._report_overdue()
        torch.cuda.current_stream(self._pages.device).wait_event(fetch.arrived)

    def close(self) -> None:
        self._stream.synchronize()
        self._unfinished.clear()

    def _report_overdue(self) -> None:
        self._unfinished = [fetch for fetch in self._unfinished if not fetch.arrived.query()]
        for fetch in self._unfinished:
            if time.monotonic() - fetch.enqueued > self._timeout_s:
                raise _overdue(fetch, self._timeout_s)
