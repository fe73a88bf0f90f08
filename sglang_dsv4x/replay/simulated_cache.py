"""SGLang's radix cache in numbers: which pages of a prompt it would still have, without the bytes.

It follows the unified radix cache of SGLang 0.5.17 (mem_cache/unified_radix_cache.py, unified_cache/) with its full and
SWA components: the same nodes, splits, locks, LRU lists and eviction order. Resume points, which stock SGLang does not
have, are those of this package's host tier: page boundaries whose SWA rows and compressor state are kept elsewhere.
Everything is counted in pages.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dsv4x.replay.pages import KEY_BYTES, common_pages

Priority = tuple[float, float]

# What --radix-eviction-policy of SGLang 0.5.17 takes.
SERVER_POLICIES = ("lru", "lfu", "slru", "priority")


class SwaPool(NamedTuple):
    """`pages` that the SWA pool holds (None: always enough); a hit needs `window_pages` live ones before its end."""

    pages: int | None
    window_pages: int = 1


class ResumePolicy(NamedTuple):
    """Which page boundaries get a resume point, and how many points are kept; the one unused longest goes first.

    `interval` is in pages (0: no regular ones), `most` None: any number.
    """

    prompt_end: bool = False
    output_end: bool = False
    fork: bool = False
    interval: int = 0
    most: int | None = None


class Node:
    """A radix node: `pages` of a prompt behind its parent's."""

    __slots__ = (
        "accessed", "children", "created", "hits", "keys", "locks", "pages", "parent", "points", "swa", "swa_locks",
        "version",
    )  # fmt: skip

    def __init__(self, keys: bytes, parent: Node | None, now: float):
        self.keys = keys
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.accessed = self.created = now
        self.hits = 0
        self.locks = self.swa_locks = 0
        self.swa = False
        self.points: dict[int, Point] = {}
        self.version = 0
        self.pages = len(keys) // KEY_BYTES


class Point:
    """A resume point `offset` pages into its node, from 1."""

    __slots__ = ("node", "offset")

    def __init__(self, node: Node, offset: int):
        self.node = node
        self.offset = offset


# The smallest is evicted first (mem_cache/evict_policy.py). A replay sends no priorities, so 'priority' is 'lru'.
EVICTION_POLICIES: dict[str, Callable[[Node], Priority]] = {
    "lru": lambda node: (node.accessed, 0.0),
    "lfu": lambda node: (node.hits, node.accessed),
    "slru": lambda node: (float(node.hits >= 2), node.accessed),
    "priority": lambda node: (node.accessed, 0.0),
    "fifo": lambda node: (node.created, 0.0),
    "mru": lambda node: (-node.accessed, 0.0),
    "filo": lambda node: (-node.created, 0.0),
}


@dataclass
class Counts:
    """What a cache has done so far, in pages but for the points."""

    evicted: int = 0
    swa_evicted: int = 0
    points_written: int = 0
    points_evicted: int = 0
    points_used: int = 0
    most_used: int = 0


class Match(NamedTuple):
    """A prompt's node to go on from, the pages up to it, and the pages that were there but not to be resumed at."""

    node: Node
    pages: int
    present: int
    by_point: bool


class Lock(NamedTuple):
    """What a running request holds: its last node with all above, and `swa_pages` of SWA rows before its end."""

    node: Node
    swa_pages: int


class SimulatedCache:
    """A radix cache of `capacity` pages (None: it never evicts); `swa` None: of a model without SWA."""

    def __init__(
        self,
        capacity: int | None,
        eviction: str = "lru",
        swa: SwaPool | None = None,
        resume: ResumePolicy | None = None,
    ):
        self.counts = Counts()
        self.capacity = capacity
        self.swa = swa
        self.resume = resume or ResumePolicy()
        self.root = Node(b"", None, 0.0)
        self.private = self.swa_private = 0  # pages of running requests that are not in the tree
        self._priority = EVICTION_POLICIES[eviction]
        self._counts_hits = eviction in ("lfu", "slru")
        self._now = 0.0
        self._pages = self._locked = self._swa_pages = 0
        self._heap: list[tuple[Priority, int, int, Node]] = []
        self._pushed = 0
        self._swa_lru: OrderedDict[Node, None] = OrderedDict()
        self._points: OrderedDict[Point, None] = OrderedDict()

    @property
    def free(self) -> float:
        """Pages that nobody holds."""
        return float("inf") if self.capacity is None else self.capacity - self._pages - self.private

    @property
    def swa_free(self) -> float:
        """SWA pages that nobody holds."""
        pages = None if self.swa is None else self.swa.pages
        return float("inf") if pages is None else pages - self._swa_pages - self.swa_private

    @property
    def available(self) -> float:
        """Pages that are free or can be made free now."""
        return self.free + self._pages - self._locked

    def match(self, keys: bytes) -> Match:
        """The deepest boundary of `keys` to go on from; what lies on the way counts as used."""
        node, at = self.root, 0
        best, best_at, point = self.root, 0, None
        live = float("inf")
        need = 1 if self.swa is None else self.swa.window_pages
        while at < len(keys):
            child = node.children.get(keys[at : at + KEY_BYTES])
            if child is None:
                break
            whole = keys.startswith(child.keys, at)
            if not whole:
                child = self._split(child, common_pages(child.keys, keys[at:]) * KEY_BYTES)
            live = live + child.pages if self.swa is None or child.swa else 0.0
            if live >= need:
                best, best_at, point = child, at + len(child.keys), None
            elif child.points:
                point = child.points[max(child.points)]
                best, best_at = child, at + point.offset * KEY_BYTES
            node = child
            at += len(child.keys)
            if not whole:
                break
        if point is not None:
            self._points.move_to_end(point)
            self.counts.points_used += 1
            if point.offset < best.pages:
                best = self._split(best, point.offset * KEY_BYTES)
        self._refresh_swa(best)
        self._touch(best)
        return Match(best, best_at // KEY_BYTES, at // KEY_BYTES, point is not None)

    def lock(self, node: Node) -> Lock:
        """Keeps the node, what is above it and the SWA rows of its window."""
        current = node
        while current.parent is not None:
            if not current.locks:
                self._locked += current.pages
            current.locks += 1
            current = current.parent
        pages, current = 0, node
        while self.swa is not None and current.parent is not None and pages < self.swa.window_pages:
            current.swa_locks += 1
            pages += current.pages
            current = current.parent
        return Lock(node, pages)

    def unlock(self, lock: Lock) -> None:
        """Takes a lock back; nodes that it holds may have been split meanwhile."""
        current = lock.node
        while current.parent is not None:
            current.locks -= 1
            if not current.locks:
                self._locked -= current.pages
            current = current.parent
        pages, current = lock.swa_pages, lock.node
        while pages > 0:
            assert current.parent is not None
            current.swa_locks -= 1
            pages -= current.pages
            current = current.parent
        self._offer(lock.node)

    def insert(self, node: Node, held: int, keys: bytes, *, swa_from: int = 0, counted: bool = True) -> Node:
        """Puts the pages `keys` into the tree and returns their last node.

        The request holds the first `held` of them, up to `node`. From page `swa_from` on it has SWA rows of its
        own. `counted`: the nodes' hit counts grow.
        """
        counted = counted and self._counts_hits
        above: Node | None = node
        while counted and above is not None:
            above.hits += 1
            above = above.parent
        at = held * KEY_BYTES
        while at < len(keys):
            child = node.children.get(keys[at : at + KEY_BYTES])
            if child is None:
                break
            if not keys.startswith(child.keys, at):
                child = self._split(child, common_pages(child.keys, keys[at:]) * KEY_BYTES)
            end = at + len(child.keys)
            if self.swa is not None and not child.swa:
                self._recover_swa(child, at, end, swa_from * KEY_BYTES)
            child.hits += counted
            node, at = child, end
        if at < len(keys):
            node = self._add(node, keys[at:], swa_from - at // KEY_BYTES)
            node.hits += counted
        self._refresh_swa(node)
        self._touch(node)
        self._offer(node)
        return node

    def make_room(self, pages: int, swa_pages: int) -> bool:
        """Evicts until this many pages are free; False when what may be evicted does not suffice."""
        freed = self._evict(pages - self.free) if self.free < pages else 0
        if self.swa is not None and self.swa_free < swa_pages:
            self._evict_swa(swa_pages - self.swa_free)
        self.counts.evicted += freed
        return self.free >= pages and self.swa_free >= swa_pages

    def add_points(self, node: Node, end: int, fresh_from: int, *, output: bool = False) -> None:
        """Writes the points that the policy asks for on the path that ends at `node`, page `end`.

        Pages from `fresh_from` on were computed just now, so that their boundaries' rows exist.
        """
        wanted: set[int] = set()
        if self.resume.output_end if output else self.resume.prompt_end:
            wanted.add(end)
        if self.resume.interval:
            step = self.resume.interval
            wanted.update(range(-(-(fresh_from + 1) // step) * step, end + 1, step))
        self._write_points(node, end, wanted)

    def add_fork_point(self, node: Node, end: int, at: int) -> None:
        """Writes a point at page `at`, where a prompt left what was cached, on the path that ends at `node`."""
        if self.resume.fork and at > 0:
            self._write_points(node, end, {at})

    def _write_points(self, node: Node, end: int, wanted: set[int]) -> None:
        current: Node | None = node
        while wanted and current is not None and current.parent is not None:
            start = end - current.pages
            for boundary in [b for b in wanted if start < b <= end]:
                wanted.discard(boundary)
                point = current.points.get(boundary - start)
                if point is None:
                    point = current.points[boundary - start] = Point(current, boundary - start)
                    self.counts.points_written += 1
                    self._points[point] = None
                self._points.move_to_end(point)
            current, end = current.parent, start
        while self.resume.most is not None and len(self._points) > self.resume.most:
            self._drop_point(next(iter(self._points)))
            self.counts.points_evicted += 1

    def _drop_point(self, point: Point) -> None:
        del self._points[point]
        del point.node.points[point.offset]

    def _tick(self) -> float:
        self._now += 1.0
        return self._now

    def _touch(self, node: Node) -> None:
        # Ancestors count as used just before; that is settled when they become leaves (see _remove).
        node.accessed = self._tick()

    def _split(self, child: Node, at: int) -> Node:
        """Puts a node with the child's first `at` bytes of keys above it; returns that one."""
        parent = child.parent
        assert parent is not None
        upper = Node(child.keys[:at], parent, self._tick())
        upper.hits, upper.created = child.hits, child.created
        upper.locks, upper.swa_locks = child.locks, child.swa_locks
        child.keys = child.keys[at:]
        child.pages -= upper.pages
        child.parent = upper
        upper.children[child.keys[:KEY_BYTES]] = child
        parent.children[upper.keys[:KEY_BYTES]] = upper
        upper.swa = child.swa
        for offset, point in sorted(child.points.items()):
            del child.points[offset]
            point.node, point.offset = (
                (upper, offset) if offset <= upper.pages else (child, offset - upper.pages)
            )
            point.node.points[point.offset] = point
        if child.swa:
            self._swa_lru[upper] = None
            self._swa_lru.move_to_end(child)
        child.accessed = self._tick()
        self._offer(child)
        return upper

    def _add(self, parent: Node, keys: bytes, swa_from: int) -> Node:
        """A new leaf; its last window is a node of its own, so that a lock on it pins no more SWA rows than that."""
        node = Node(keys, parent, self._tick())
        parent.children[keys[:KEY_BYTES]] = node
        self._pages += node.pages
        self.counts.most_used = max(self.counts.most_used, self._pages + self.private)
        if self.swa is not None and swa_from < node.pages:
            if swa_from > 0:
                self._split(node, swa_from * KEY_BYTES)
            if node.pages > self.swa.window_pages:
                self._give_swa(self._split(node, (node.pages - self.swa.window_pages) * KEY_BYTES))
            self._give_swa(node)
        return node

    def _give_swa(self, node: Node) -> None:
        node.swa = True
        self._swa_pages += node.pages
        self._swa_lru[node] = None
        self._swa_lru.move_to_end(node)

    def _recover_swa(self, node: Node, at: int, end: int, swa_from: int) -> None:
        """Rows that were computed again become the node's, from byte `swa_from` of the keys on."""
        if swa_from >= end:
            return
        if swa_from > at:
            self._split(node, swa_from - at)
        self._give_swa(node)

    def _refresh_swa(self, node: Node) -> None:
        if self.swa is None:
            return
        window = []
        pages = 0
        current: Node | None = node
        while current is not None and current.parent is not None and pages <= self.swa.window_pages:
            if current.swa:
                window.append(current)
            pages += current.pages
            current = current.parent
        for each in reversed(window):
            self._swa_lru.move_to_end(each)

    def _offer(self, node: Node) -> None:
        """Makes a leaf that nobody holds a candidate for eviction, at its present priority."""
        if self.capacity is None and self.swa is None:
            return
        if not node.children and not node.locks and node.parent is not None:
            node.version += 1
            self._pushed += 1
            heapq.heappush(self._heap, (self._priority(node), self._pushed, node.version, node))

    def _evict(self, pages: float) -> int:
        freed = 0
        while freed < pages and self._heap:
            _, _, version, node = heapq.heappop(self._heap)
            if version == node.version and not node.children and not node.locks and node.parent is not None:
                freed += node.pages
                self._remove(node)
        return freed

    def _evict_swa(self, pages: float) -> None:
        target = self._swa_pages - pages
        while self._swa_pages > target:
            node = next((each for each in self._swa_lru if not each.swa_locks), None)
            if node is None:
                return
            self.counts.swa_evicted += node.pages
            # SGLang drops a leaf that has lost its SWA rows: nothing can go on from it, unless it has a resume point.
            if node.children or node.locks or node.points:
                self._swa_pages -= node.pages
                node.swa = False
                del self._swa_lru[node]
            else:
                self.counts.evicted += node.pages
                self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.keys[:KEY_BYTES]]
        node.parent = None
        self._pages -= node.pages
        if node.swa:
            node.swa = False
            self._swa_pages -= node.pages
            del self._swa_lru[node]
        for point in list(node.points.values()):
            self._drop_point(point)
        parent.accessed = max(parent.accessed, node.accessed - 1e-5)
        self._offer(parent)
