"""Sends planned turns: each agent's in order, several conversations at once, pauses at a chosen scale."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from sglang_dsv4x.replay.branching import Beside
from sglang_dsv4x.replay.client import Completion, RequestError, Sampling, TurnClient
from sglang_dsv4x.replay.clock import Clock, DurationReached
from sglang_dsv4x.replay.facts import counter_difference, read_tier_counters
from sglang_dsv4x.replay.journal import Past
from sglang_dsv4x.replay.plan import (
    PlannedAgent,
    PlannedBranches,
    PlannedConversation,
    PlannedTurn,
    planned_turns,
)
from sglang_dsv4x.replay.records import Run, TierSample, TurnRecord
from sglang_dsv4x.replay.theory import InfinitePrefixCache
from sglang_dsv4x.replay.tokens import PromptMaker, Vocabulary

COUNTERS_TIMEOUT_S = 10.0
SAMPLE_EVERY_S = 5.0
_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0

Interleave = Literal["alternate", "together"]


class Pace(NamedTuple):
    """`concurrency` conversations run at once, and no more requests than that: agents that run beside each
    other in one conversation take turns. The trace's pauses, and the times at which conversations began in it,
    are multiplied by `think_time_scale`.

    No turn is sent more than `duration_s` after the start (None: no limit). A turn that failed for a reason
    that may pass is sent up to `retries` times again. With several servers each turn goes to all of them
    before the next: one after the other, and another one first each time (`alternate`), or at once
    (`together`).
    """

    concurrency: int = 1
    think_time_scale: float = 0.0
    duration_s: float | None = None
    retries: int = 0
    interleave: Interleave = "alternate"


class ServerGone(Exception):
    """The server that this run launched has ended; the message says how."""


@dataclass
class Target:
    """A server and the run that its turns are recorded in.

    `first_counters` and `counters` are the tier's at the start and now, `before` their growth in the part of
    the run before an interruption.
    """

    client: TurnClient
    run: Run
    first_counters: dict[str, int] | None = None
    counters: dict[str, int] | None = None
    before: dict[str, int] = field(default_factory=dict)


class _Sent(NamedTuple):
    """A turn on its way: the same for every server. Token ids are int64 [input tokens]."""

    conversation: str
    planned: PlannedTurn
    tokens: NDArray[Any]
    waited_s: float
    theoretical_cached: int


class Runner:
    """Replays planned conversations against one or more servers and fills their Runs.

    A failed turn is recorded and the conversation goes on: no later prompt depends on an answer.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        vocabulary: Vocabulary,
        *,
        seed: int,
        pace: Pace,
        sampling: Sampling,
        on_turn: Callable[[Run, TurnRecord, float], None],
        gone: Callable[[], str | None] = lambda: None,
        past: Past | None = None,
    ):
        """`on_turn` is called after each turn with the seconds since the start. `gone` returns why the server
        ended, None while it runs.

        `past` is what an interrupted run had done: its answered turns are not sent again.
        """
        self._targets = targets
        self._vocabulary = vocabulary
        self._seed = seed
        self._pace = pace
        self._sampling = sampling
        self._on_turn = on_turn
        self._gone = gone
        self._past = past or Past()
        self._clock = Clock(pace.think_time_scale, pace.duration_s)
        self._turns_sent = 0
        self._infinite = InfinitePrefixCache(targets[0].run.page_size)
        self._free = asyncio.Semaphore(pace.concurrency)
        self._branches: set[asyncio.Task[None]] = set()

    async def replay(self, conversations: Sequence[PlannedConversation]) -> None:
        """Runs all conversations, filling the targets' Runs, also when cancelled.

        Raises ServerGone when `gone` says so, RequestError when a server does not answer before the first
        turn.
        """
        self._clock.start(self._past.reached_s)
        for target in self._targets:
            target.first_counters = target.counters = await read_tier_counters(target.client.http)
            target.before = target.run.tier or {}
        waiting = iter(conversations)
        workers = [
            asyncio.create_task(self._work(waiting))
            for _ in range(min(self._pace.concurrency, len(conversations)))
        ]
        sampler = asyncio.create_task(self._sample())
        try:
            await asyncio.gather(*workers)
        except DurationReached:
            await self._finish_those_running(workers)
            for target in self._targets:
                target.run.duration_reached = True
        finally:
            tasks = (*workers, *self._branches, sampler)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for target in self._targets:
                target.run.wall_s = self._clock.now()
                await self._take_sample(target)

    async def _finish_those_running(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Waits for the turns in flight: each worker and branch ends before its next one."""
        results = await asyncio.gather(*workers, *self._branches, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, DurationReached):
                raise result

    async def _work(self, waiting: Iterator[PlannedConversation]) -> None:
        for conversation in waiting:
            prompts = PromptMaker(
                self._vocabulary, conversation.scaling, self._seed, conversation.token_scope
            )
            if any(self._open_targets(conversation, turn) for turn in planned_turns(conversation.main)):
                await self._clock.arrival(conversation.arrival_s)
            started: list[asyncio.Task[None]] = []
            await self._agent(conversation, conversation.main, prompts, started)
            while started:
                await started.pop()

    async def _agent(
        self,
        conversation: PlannedConversation,
        agent: PlannedAgent,
        prompts: PromptMaker,
        unjoined: list[asyncio.Task[None]],
    ) -> None:
        """Runs the agent. Branches that it does not wait for are in `unjoined` when it returns."""
        if any(self._open_targets(conversation, turn) for turn in planned_turns(agent)):
            await self._clock.pause(agent.pause_s)
        beside = Beside()
        for step in agent.steps:
            await beside.due()
            if isinstance(step, PlannedBranches):
                for branch in step.agents:
                    task = self._branch(self._agent(conversation, branch, prompts, unjoined))
                    if step.turns_beside is None:
                        unjoined.append(task)
                    else:
                        beside.add(task, step.turns_beside)
            elif isinstance(step, PlannedTurn):
                await self._turn(conversation, step, prompts)
                beside.turn_ended()
            else:
                await self._agent(conversation, step, prompts, unjoined)
        await beside.all()

    def _branch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._branches.discard(task)
            if not task.cancelled():
                task.exception()  # whoever waits for the task raises it; if nobody does, the run has ended

        task = asyncio.create_task(work)
        self._branches.add(task)
        task.add_done_callback(ended)
        return task

    async def _turn(
        self, conversation: PlannedConversation, planned: PlannedTurn, prompts: PromptMaker
    ) -> None:
        targets = self._open_targets(conversation, planned)
        if not targets:
            self._could_hit(conversation, planned)
            return
        waited = await self._clock.pause(planned.turn.pause_s)
        async with self._free:
            self._clock.check()
            reason = self._gone()
            if reason is not None:
                raise ServerGone(reason)
            sent = _Sent(
                conversation.name,
                planned,
                prompts.prompt(planned.turn, planned.number),
                waited,
                self._could_hit(conversation, planned),
            )
            if self._pace.interleave == "together":
                await asyncio.gather(*(self._send(target, sent) for target in targets))
                return
            first = self._turns_sent % len(targets)
            self._turns_sent += 1
            for target in targets[first:] + targets[:first]:
                await self._send(target, sent)

    def _could_hit(self, conversation: PlannedConversation, planned: PlannedTurn) -> int:
        """Tokens of the prompt that an infinite cache has, given the turns sent so far. To be called once a turn."""
        return self._infinite.add(
            conversation.token_scope, planned.turn.blocks, conversation.scaling.block, planned.input_tokens
        )

    async def _send(self, target: Target, sent: _Sent) -> None:
        completion: Completion | None = None
        failure: RequestError | None = None
        planned = sent.planned
        key = (target.run.name, (sent.conversation, planned.number))
        earlier = self._past.failed.get(key, ())
        retried: list[str] = []
        prompt = sent.tokens.tolist()
        while True:
            started = self._clock.now()
            try:
                completion = await target.client.generate(prompt, planned.output_tokens, self._sampling)
                failure = None
            except RequestError as error:
                failure = error
            if failure is None or not failure.transient or len(retried) == self._pace.retries:
                break
            retried.append(failure.kind)
            await asyncio.sleep(min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** (len(retried) - 1)))
        record = TurnRecord(
            conversation=sent.conversation,
            agent=planned.agent,
            number=planned.number,
            kind=planned.turn.kind,
            prompt_tokens=planned.input_tokens,
            prompt_digest=hashlib.blake2b(sent.tokens.astype("<i8").tobytes(), digest_size=8).hexdigest(),
            theoretical_cached=sent.theoretical_cached,
            requested_output=planned.output_tokens,
            waited_s=sent.waited_s,
            started_s=started,
            completion=completion,
            error_kind=failure.kind if failure else None,
            error=str(failure) if failure else None,
            tier=await self._counted(target) if self._pace.concurrency == 1 else None,
            retried=(*earlier, *retried),
        )
        target.run.records.append(record)
        self._on_turn(target.run, record, self._clock.now())

    def _open_targets(self, conversation: PlannedConversation, planned: PlannedTurn) -> list[Target]:
        """Servers that this turn has not been sent to."""
        key = (conversation.name, planned.number)
        return [t for t in self._targets if (t.run.name, key) not in self._past.answered]

    async def _counted(self, target: Target) -> dict[str, int] | None:
        """Growth of the counters since the last call; with one request at a time that is the turn's own."""
        before = target.counters
        await self._take_sample(target)
        return counter_difference(before, target.counters)

    async def _sample(self) -> None:
        """Follows the counters of servers whose turns overlap."""
        while self._pace.concurrency > 1:
            await asyncio.sleep(SAMPLE_EVERY_S)
            for target in self._targets:
                await self._take_sample(target)

    async def _take_sample(self, target: Target) -> None:
        if target.first_counters is None:
            return
        try:
            counters = await asyncio.wait_for(read_tier_counters(target.client.http), COUNTERS_TIMEOUT_S)
        except (RequestError, asyncio.TimeoutError):
            return
        grown = counter_difference(target.first_counters, counters)
        if grown is None:
            return
        target.counters = counters
        target.run.tier = {name: value + target.before.get(name, 0) for name, value in grown.items()}
        target.run.tier_samples.append(TierSample(self._clock.now(), target.run.tier))
