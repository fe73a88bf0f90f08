"""Resume points: host copies of what a prefix hit needs beside C4, C128 and index rows.

A hit at a page boundary continues from the last 128 window rows of every layer and the overlap halves of the C4 and
indexer compressors; they lie in device pages that are given to the next request soon after. A resume point keeps them.
Its owner is the radix node that ends at the boundary, or a request that is not there yet; this module knows owners only
as keys, and pages only as pieces of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from .errors import IntegrityError
from .host_mapping import HostMapping
from .host_memory import HostMemory

POISON = 0xFF
"""NaN in every storage format."""


class PointKind(IntEnum):
    """Why a point was written; when there is no room, a lower kind goes first."""

    INTERVAL = 0
    FORK = 1
    END = 2
    """Of a prompt or an output: where the next turn continues."""


class ResumeCounters(NamedTuple):
    """Totals since the start; a reset does not clear them."""

    written: int
    restored: int
    replaced: int
    """Points dropped because there was no room for another."""
    released: int
    """Points dropped with their node."""


class _Point(NamedTuple):
    slot: int
    kind: PointKind


class ResumePoints:
    """Points of at most `capacity` owners. Every method belongs to one thread, the scheduler's.

    On a CPU copies are done when the call returns. On a CUDA device a call first waits for all streams, since forward
    passes run on streams of their own: correct, and the coarsest barrier there is.
    """

    def __init__(
        self,
        pieces: Sequence[torch.Tensor],
        capacity: int,
        *,
        poisoned: Sequence[torch.Tensor] = (),
        memory: HostMemory | None = None,
    ) -> None:
        """
        Args:
            pieces: u8 [pages, bytes] views of device memory; row p is what page p adds to a point.
            capacity: points that there is room for, 0 or more.
            poisoned: u8 [pages, bytes] views of what `restore` leaves undefined in a page; filled with NaN bytes
                then, so that a read of it shows. For checks.
            memory: host memory to fit in (default: what there is now).
        Raises: HostMemoryError. ValueError for pieces of other shapes.
        """
        for piece in (*pieces, *poisoned):
            if piece.dtype != torch.uint8 or piece.dim() != 2:
                raise ValueError(f"pieces are uint8 [pages, bytes], not {piece.dtype} {list(piece.shape)}")
        self.capacity = capacity
        self.point_bytes = sum(piece.shape[1] for piece in pieces)
        self._pieces, self._poisoned = list(pieces), list(poisoned)
        self._mapping: HostMapping | None = None
        if capacity > 0:
            self._mapping = HostMapping(
                self.host_bytes,
                pieces[0].device,
                what="The resume points' memory",
                remedy="Lower --dsv4x-resume-memory-gb",
                memory=memory,
            )
            self._rows = self._mapping.data.view(capacity, self.point_bytes)
        self._free = list(range(capacity))
        # One queue per kind, least recently used first.
        self._points: dict[PointKind, OrderedDict[Hashable, _Point]] = {
            kind: OrderedDict() for kind in PointKind
        }
        self._written = self._restored = self._replaced = self._released = 0

    @property
    def host_bytes(self) -> int:
        return self.capacity * self.point_bytes

    def __len__(self) -> int:
        return sum(map(len, self._points.values()))

    def __contains__(self, owner: Hashable) -> bool:
        return self._find(owner) is not None

    def save(self, owner: Hashable, page: torch.Tensor, kind: PointKind) -> bool:
        """Copies a device page, int64 [1], to the point of `owner`. Modifies the points; the copy is valid for every
        later `restore`.

        An owner that has a point keeps its bytes: what lies at a boundary does not change. When there is no room, the
        least recently used point of the lowest kind makes room, but never for a point of a lower kind than its own:
        then this returns False and nothing is saved.
        """
        point = self._find(owner)
        if point is not None:
            self._place(owner, point._replace(kind=max(point.kind, kind)))
            return True
        if not self._free and not self._replace_one(kind):
            return False
        self._barrier()
        slot = self._free.pop()
        start = 0
        for piece in self._pieces:
            end = start + piece.shape[1]
            self._rows[slot, start:end].copy_(piece.index_select(0, page)[0])
            start = end
        self._points[kind][owner] = _Point(slot, kind)
        self._written += 1
        return True

    def restore(self, owner: Hashable, page: torch.Tensor) -> None:
        """Copies the point of `owner` into a device page, int64 [1]. Modifies that page, which is valid when the call
        returns, and makes the point the most recently used.

        Raises: KeyError when `owner` has no point.
        """
        point = self._find(owner)
        if point is None:
            raise KeyError(owner)
        self._barrier()
        for rest in self._poisoned:
            rest.index_fill_(0, page, POISON)
        start = 0
        for piece in self._pieces:
            end = start + piece.shape[1]
            piece.index_copy_(0, page, self._rows[point.slot, start:end].to(piece.device).unsqueeze(0))
            start = end
        self._barrier()
        self._place(owner, point)
        self._restored += 1

    def move(self, owner: Hashable, to: Hashable) -> None:
        """Gives the point of `owner`, if it has one, to `to`; one that `to` has already is kept instead."""
        point = self._find(owner)
        if point is None:
            return
        if to in self:
            self.release(owner)
            return
        del self._points[point.kind][owner]
        self._points[point.kind][to] = point

    def touch(self, owner: Hashable) -> None:
        """Makes the point of `owner`, if it has one, the most recently used. Changes nothing else."""
        point = self._find(owner)
        if point is not None:
            self._place(owner, point)

    def release(self, owner: Hashable) -> None:
        """Drops the point of `owner`, if it has one: its node is gone. Modifies the points."""
        point = self._find(owner)
        if point is not None:
            del self._points[point.kind][owner]
            self._free.append(point.slot)
            self._released += 1

    def reset(self) -> None:
        """Drops every point. Modifies the points, not the counters."""
        self._free = list(range(self.capacity))
        for queue in self._points.values():
            queue.clear()

    def counters(self) -> ResumeCounters:
        return ResumeCounters(self._written, self._restored, self._replaced, self._released)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a slot is lost, owned twice or unknown. Changes nothing."""
        taken = [point.slot for queue in self._points.values() for point in queue.values()]
        if sorted(taken + self._free) != list(range(self.capacity)):
            raise IntegrityError(
                f"resume points: {len(taken)} owned and {len(self._free)} free slots, {self.capacity} in all"
            )
        owners = [owner for queue in self._points.values() for owner in queue]
        if len(set(owners)) != len(owners):
            raise IntegrityError("resume points: an owner has two points")
        wrong = [
            o for kind, queue in self._points.items() for o, point in queue.items() if point.kind != kind
        ]
        if wrong:
            raise IntegrityError(f"resume points: those of {wrong} are in another kind's queue")

    def close(self) -> None:
        """Undoes the pinning of the host memory. Nothing may be saved or restored afterwards."""
        if self._mapping is not None:
            self._mapping.close()

    def _barrier(self) -> None:
        if self._pieces[0].device.type == "cuda":
            torch.cuda.synchronize(self._pieces[0].device)

    def _find(self, owner: Hashable) -> _Point | None:
        for queue in self._points.values():
            point = queue.get(owner)
            if point is not None:
                return point
        return None

    def _place(self, owner: Hashable, point: _Point) -> None:
        for queue in self._points.values():
            queue.pop(owner, None)
        self._points[point.kind][owner] = point

    def _replace_one(self, kind: PointKind) -> bool:
        for lower in PointKind:
            if lower > kind:
                return False
            if self._points[lower]:
                _, point = self._points[lower].popitem(last=False)
                self._free.append(point.slot)
                self._replaced += 1
                return True
        return False
