"""The copy stream: moves host rows into slots, asynchronously, and nothing else.

On CUDA it is a CUDA stream, and a kernel that reads the pinned rows from the device. On CPU it is a real worker
thread with events, so that an ordering fault (a read before the join, a slot reused under a fetch) shows there
too. The tables are changed by the forward stream alone.
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
from ..jit_kernels.registry import Kernels
from .errors import TierError
from .host_store import HostStore


@dataclass
class Fetch:
    """One enqueued fetch: host rows `entries` int [F] of a layer go to `slots` int [F]; of these `count` int32
    [1], or all for None."""

    layer: int
    entries: torch.Tensor
    slots: torch.Tensor
    count: torch.Tensor | None = None
    enqueued: float = field(default_factory=time.monotonic)


class CopyStream(ABC):
    """What the cache asks of a copy stream."""

    @abstractmethod
    def fetch(
        self, layer: int, entries: torch.Tensor, slots: torch.Tensor, count: torch.Tensor | None = None
    ) -> Fetch:
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
    store: HostStore,
    pages: torch.Tensor,
    layout: PageLayout,
    timeout_s: float,
    delay_s: float,
    kernels: Kernels,
) -> CopyStream:
    """The copy stream for the device of `pages` (u8 [L, P, page_bytes])."""
    if pages.device.type == "cuda":
        return CudaCopyStream(store, pages, layout, timeout_s, delay_s, kernels)
    return WorkerCopyStream(store, pages, layout, timeout_s, delay_s)


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

    def fetch(
        self, layer: int, entries: torch.Tensor, slots: torch.Tensor, count: torch.Tensor | None = None
    ) -> Fetch:
        if self._closing.is_set():
            raise TierError("The tiered cache is closed; it cannot fetch.")
        fetch = _WorkerFetch(layer, entries, slots, count)
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
    """The same on a CUDA stream, with the op `fetch_rows`. Its torch backend gathers on the host and so waits
    for the list of rows; the CUDA kernel does neither.

    `wait` makes the forward stream wait, not the host; a fetch that hangs is reported by a later `fetch` or
    `wait`. In a graph's capture the fork and the join become the graph's, and nothing can be overdue.
    """

    def __init__(
        self,
        store: HostStore,
        pages: torch.Tensor,
        layout: PageLayout,
        timeout_s: float,
        delay_s: float,
        kernels: Kernels,
    ) -> None:
        self._store, self._pages, self._layout, self._kernels = store, pages, layout, kernels
        self._timeout_s, self._delay_s = timeout_s, delay_s
        self._stream = torch.cuda.Stream(pages.device)
        self._unfinished: list[_CudaFetch] = []

    def fetch(
        self, layer: int, entries: torch.Tensor, slots: torch.Tensor, count: torch.Tensor | None = None
    ) -> Fetch:
        self._report_overdue()
        fetch = _CudaFetch(layer, entries, slots, count)
        self._stream.wait_stream(torch.cuda.current_stream(self._pages.device))
        with torch.cuda.stream(self._stream):
            if self._delay_s:
                # A second is about 1.5e9 cycles of a data-centre GPU; the exact length does not matter.
                torch.cuda._sleep(int(self._delay_s * 1.5e9))
            self._kernels.fetch_rows(
                self._store.rows[layer], self._pages[layer], self._layout, entries, slots, count
            )
            for used in (entries, slots, count):
                if used is not None and used.is_cuda:
                    used.record_stream(self._stream)
            fetch.arrived.record(self._stream)
        if not torch.cuda.is_current_stream_capturing():
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
        if torch.cuda.is_current_stream_capturing():
            return
        self._unfinished = [fetch for fetch in self._unfinished if not fetch.arrived.query()]
        for fetch in self._unfinished:
            if time.monotonic() - fetch.enqueued > self._timeout_s:
                raise _overdue(fetch, self._timeout_s)
