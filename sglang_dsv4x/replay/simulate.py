"""A replay without a server: the plan's turns in time, through a simulated cache."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_dsv4x.replay.pages import KEY_BYTES, page_keys
from sglang_dsv4x.replay.plan import (
    PlannedAgent,
    PlannedBranches,
    PlannedConversation,
    PlannedTurn,
    planned_turns,
)
from sglang_dsv4x.replay.simulated_cache import Lock, SimulatedCache
from sglang_dsv4x.replay.theory import InfinitePrefixCache

# Decode steps after which SGLang gives back SWA rows that have left the window (SGLANG_SWA_EVICTION_INTERVAL).
SWA_EVICTION_INTERVAL = 128


class Service(NamedTuple):
    """How a server works: tokens per second of one request (infinity: at once), `chunk`: tokens of one prefill step
    (None: the whole prompt)."""

    prefill_tokens_per_s: float = float("inf")
    decode_tokens_per_s: float = float("inf")
    chunk: int | None = None


@dataclass
class Totals:
    """Sums over the turns in tokens, but for counts of turns.

    `theoretical_cached`: served by an infinite cache; `cached`: served by the simulated one; `unresumable`: still
    there, but behind no boundary at which a request can go on. `refused`: turns that never fit.
    """

    turns: int = 0
    refused: int = 0
    prompt: int = 0
    output: int = 0
    theoretical_cached: int = 0
    cached: int = 0
    unresumable: int = 0
    ends_at_s: float = 0.0
    per_turn: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass
class _Request:
    conversation: PlannedConversation
    planned: PlannedTurn
    done: Callable[[], None]


@dataclass
class _Running:
    """A request on the server: its prompt's keys, what it holds in the tree, and in pages of its own.

    SWA rows before page `swa_from` that are not the tree's have been given back.
    """

    keys: bytes
    lock: Lock
    held: int
    swa_from: int = 0
    private: int = 0
    swa_private: int = 0


class Simulation:
    """Runs planned conversations as `runner.Runner` would, in a time of its own."""

    def __init__(
        self,
        cache: SimulatedCache,
        page_size: int,
        *,
        concurrency: int = 1,
        think_time_scale: float = 0.0,
        service: Service | None = None,
        on_turn: Callable[[], None] = lambda: None,
        keep_turns: bool = False,
    ):
        """`on_turn` is called after each turn. `keep_turns`: `totals.per_turn` has the cached tokens of each turn,
        by conversation and number."""
        self.totals = Totals()
        self._cache = cache
        self._page = page_size
        self._concurrency = concurrency
        self._scale = think_time_scale
        self._service = service or Service()
        self._window = page_size * (cache.swa.window_pages if cache.swa is not None else 0)
        self._on_turn = on_turn
        self._keep = keep_turns
        self._infinite = InfinitePrefixCache(page_size)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._unique = itertools.count()
        self._waiting: deque[_Request] = deque()
        self._running = 0

    def run(self, conversations: Sequence[PlannedConversation]) -> Totals:
        """Runs all of them and returns the totals."""
        waiting = iter(conversations)
        for _ in range(min(self._concurrency, len(conversations))):
            self._next_conversation(waiting)
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        self.totals.ends_at_s = self._now
        return self.totals

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time_s, self._now), next(self._count), act))

    def _next_conversation(self, waiting: Iterator[PlannedConversation]) -> None:
        conversation = next(waiting, None)
        if conversation is None:
            return
        task = _Task(self, conversation)

        def begin() -> None:
            task.start(conversation.main, lambda: None)

        task.when_empty = lambda: self._next_conversation(waiting)
        self._at(conversation.arrival_s * self._scale, begin)

    def pause(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls `act` after a pause of the trace."""
        self._at(self._now + seconds * self._scale, act)

    def send(self, request: _Request) -> None:
        """Queues a turn; it runs when no more than `concurrency` others do and it fits."""
        self._waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._running < self._concurrency:
            request = self._waiting[0]
            planned = request.planned
            tokens = planned.input_tokens + planned.output_tokens
            most = self._cache.capacity
            if most is not None and -(-tokens // self._page) + 1 > most:
                self._refuse()
                continue
            running, cached = self._prefill(request)
            if running is None and self._running:
                return
            if running is None:
                self._refuse()
                continue
            self._waiting.popleft()
            self._running += 1
            service = self._service
            busy_s = (planned.input_tokens - cached) / service.prefill_tokens_per_s
            busy_s += planned.output_tokens / service.decode_tokens_per_s
            self._at(self._now + busy_s, lambda r=running, q=request: self._end(r, q))  # type: ignore[misc]

    def _refuse(self) -> None:
        request = self._waiting.popleft()
        self.totals.refused += 1
        self._on_turn()
        self._at(self._now, request.done)

    def _prefill(self, request: _Request) -> tuple[_Running | None, int]:
        """Takes the prompt in and returns what then runs and how many tokens were cached; None when it does not fit
        beside those that run."""
        cache, page, planned = self._cache, self._page, request.planned
        length = planned.input_tokens
        keys, shared = self._keys(request)
        match = cache.match(keys[: (length - 1) // page * KEY_BYTES])
        running = _Running(keys, cache.lock(match.node), match.pages)
        whole = -(-(length + planned.output_tokens) // page) + 1
        if self._running and whole - match.pages > cache.available:
            cache.unlock(running.lock)
            return None, 0
        done = match.pages * page
        while done < length:
            chunk = self._service.chunk
            end = (
                length
                if chunk is None or length - done <= chunk
                else max(done + page, (done + chunk) // page * page)
            )
            pages = -(-end // page) - running.held - running.private
            if not cache.make_room(pages + 1, pages + 1) and cache.free < pages:
                self._give_back(running)
                return None, 0
            self._take(running, pages, pages)
            if end < length or planned.output_tokens > 1:
                self._insert(running, end // page, counted=end == length)
            done = end
        self._decode(running, planned)
        # Pages that no block determines are in no other prompt, so the tree need not hold them.
        theory = self._infinite.add_keys("", keys[:shared], length)
        self._record(request, match.pages * page, (match.present - match.pages) * page, theory)
        prompt_pages = length // page
        if planned.output_tokens > 1:
            cache.add_points(running.lock.node, prompt_pages, match.pages)
            if match.present < prompt_pages:
                cache.add_fork_point(running.lock.node, prompt_pages, match.present)
        return running, match.pages * page

    def _decode(self, running: _Running, planned: PlannedTurn) -> None:
        """Takes the pages that the answer needs; the last token's row is never written."""
        cache, page, length = self._cache, self._page, planned.input_tokens
        steps = planned.output_tokens - 1
        if not steps:
            return
        running.swa_from = running.held
        # Every step asks for a page, whether it needs one or not: that matters at the first step and after a page
        # was taken or SWA rows were given back.
        taken = range(-length % page, steps, page)
        asked = {0, *taken, *(step + 1 for step in taken), *range(0, steps, SWA_EVICTION_INTERVAL)}
        for step in sorted(step for step in asked if step < steps):
            if step and step % SWA_EVICTION_INTERVAL == 0:
                left = (length + step - 1 - max(page, self._window)) // page
                if left > running.swa_from:
                    self._take(running, 0, running.swa_from - left)
                    running.swa_from = left
            cache.make_room(1, 1)
            if (length + step) % page == 0:
                self._take(running, 1, 1)

    def _end(self, running: _Running, request: _Request) -> None:
        cache, page, planned = self._cache, self._page, request.planned
        length = planned.input_tokens + planned.output_tokens - 1
        pages = length // page
        grown = running.keys + self._unique_keys(max(0, pages - len(running.keys) // KEY_BYTES))
        node = cache.insert(
            running.lock.node, running.held, grown[: pages * KEY_BYTES], swa_from=running.swa_from
        )
        cache.add_points(node, pages, planned.input_tokens // page, output=True)
        self._give_back(running)
        self._running -= 1
        self._on_turn()
        request.done()
        self._admit()

    def _insert(self, running: _Running, pages: int, *, counted: bool) -> None:
        cache = self._cache
        node = cache.insert(
            running.lock.node, running.held, running.keys[: pages * KEY_BYTES], counted=counted
        )
        self._take(running, running.held - pages, running.held - pages)
        cache.unlock(running.lock)
        running.lock, running.held = cache.lock(node), pages

    def _take(self, running: _Running, pages: int, swa_pages: int) -> None:
        running.private += pages
        running.swa_private += swa_pages
        self._cache.private += pages
        self._cache.swa_private += swa_pages

    def _give_back(self, running: _Running) -> None:
        self._take(running, -running.private, -running.swa_private)
        self._cache.unlock(running.lock)

    def _keys(self, request: _Request) -> tuple[bytes, int]:
        """Keys of all whole pages of the prompt, and the length of those that its blocks determine."""
        planned, page = request.planned, self._page
        block = request.conversation.scaling.block
        keys = page_keys(planned.turn.blocks, block, planned.input_tokens, page)
        shared = len(keys)
        keys += self._unique_keys(planned.input_tokens // page - shared // KEY_BYTES)
        # Equal hash ids of two scopes are other tokens; within one tree that shows in the first page.
        scope = hashlib.blake2b(request.conversation.token_scope.encode(), digest_size=KEY_BYTES).digest()
        first = int.from_bytes(keys[:KEY_BYTES], "little") ^ int.from_bytes(scope, "little")
        return first.to_bytes(KEY_BYTES, "little") + keys[KEY_BYTES:] if keys else keys, shared

    def _unique_keys(self, count: int) -> bytes:
        return b"".join(
            hashlib.blake2b(next(self._unique).to_bytes(8, "little"), digest_size=KEY_BYTES).digest()
            for _ in range(count)
        )

    def _record(self, request: _Request, cached: int, unresumable: int, theory: int) -> None:
        planned, totals = request.planned, self.totals
        totals.turns += 1
        totals.prompt += planned.input_tokens
        totals.output += planned.output_tokens
        totals.theoretical_cached += theory
        totals.cached += cached
        totals.unresumable += unresumable
        if self._keep:
            totals.per_turn[(request.conversation.name, planned.number)] = cached


class _Task:
    """The agents of one conversation, each of them a generator that stands still while it waits."""

    def __init__(self, simulation: Simulation, conversation: PlannedConversation):
        self._simulation = simulation
        self._conversation = conversation
        self._alive = 0
        self.when_empty: Callable[[], None] = lambda: None

    def start(self, agent: PlannedAgent, ended: Callable[[], None]) -> None:
        """Runs the agent; calls `ended` when it has ended with all that it waits for."""
        self._alive += 1
        steps = self._steps(agent)

        def go_on() -> None:
            wait = next(steps, None)
            if wait is not None:
                wait(go_on)
                return
            self._alive -= 1
            ended()
            if not self._alive:
                self.when_empty()

        go_on()

    def _steps(self, agent: PlannedAgent) -> Generator[Callable[[Callable[[], None]], None], None, None]:
        """Yields functions that take what is to be called when the wait is over."""
        yield self._pausing(agent.pause_s)
        beside: list[tuple[int, _Gate]] = []
        for step in agent.steps:
            for _, gate in [each for each in beside if each[0] == 0]:
                yield gate.wait
            beside = [each for each in beside if each[0]]
            if isinstance(step, PlannedBranches):
                for branch in step.agents:
                    gate = _Gate(self._simulation)
                    self.start(branch, gate.open)
                    if step.turns_beside is not None:
                        beside.append((step.turns_beside, gate))
            elif isinstance(step, PlannedTurn):
                yield self._pausing(step.turn.pause_s)
                yield self._sending(step)
                beside = [(left - 1, gate) for left, gate in beside]
            else:
                gate = _Gate(self._simulation)
                self.start(step, gate.open)
                yield gate.wait
        for _, gate in beside:
            yield gate.wait

    def _pausing(self, seconds: float) -> Callable[[Callable[[], None]], None]:
        return lambda go_on: self._simulation.pause(seconds, go_on)

    def _sending(self, planned: PlannedTurn) -> Callable[[Callable[[], None]], None]:
        return lambda go_on: self._simulation.send(_Request(self._conversation, planned, go_on))


class _Gate:
    """Something that ends once, and the one that waits for it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._open = False
        self._waiting: Callable[[], None] | None = None

    def open(self) -> None:
        self._open = True
        if self._waiting is not None:
            self._simulation.pause(0.0, self._waiting)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Calls `go_on` once the gate is open."""
        if self._open:
            self._simulation.pause(0.0, go_on)
        else:
            self._waiting = go_on


def count_turns(conversations: Sequence[PlannedConversation]) -> int:
    """How many turns a plan has."""
    return sum(1 for c in conversations for _ in planned_turns(c.main))
