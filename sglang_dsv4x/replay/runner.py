"""Sends a plan to a server: agents in order, several conversations at once, pauses at a chosen scale."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sglang_dsv4x.replay.client import Client, Completion, RequestError, Sampling
from sglang_dsv4x.replay.facts import counter_difference, read_tier_counters
from sglang_dsv4x.replay.plan import PlannedAgent, PlannedConversation, PlannedTurn
from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.tokens import PromptMaker, Vocabulary

COUNTERS_TIMEOUT_S = 10.0


class Pace(NamedTuple):
    """`concurrency` conversations run at once; the trace's pauses are multiplied by `think_time_scale`."""

    concurrency: int = 1
    think_time_scale: float = 0.0


class ServerGone(Exception):
    """The server that this run launched has ended; the message says how."""


class Runner:
    """Replays planned conversations and fills a Run.

    A failed turn is recorded and the conversation goes on: no later prompt depends on an answer.
    """

    def __init__(
        self,
        client: Client,
        vocabulary: Vocabulary,
        run: Run,
        *,
        seed: int,
        pace: Pace,
        sampling: Sampling,
        on_turn: Callable[[TurnRecord], None],
        gone: Callable[[], str | None] = lambda: None,
    ):
        """`on_turn` is called after each turn. `gone` returns why the server ended, None while it runs."""
        self._client = client
        self._vocabulary = vocabulary
        self._run = run
        self._seed = seed
        self._pace = pace
        self._sampling = sampling
        self._on_turn = on_turn
        self._gone = gone
        self._began = 0.0
        self._counters: dict[str, int] | None = None
        self._has_tier = False

    async def replay(self, conversations: Sequence[PlannedConversation]) -> None:
        """Runs all conversations, filling the Run given at construction, also when cancelled.

        Raises ServerGone when `gone` says so, RequestError when the server does not answer before the first
        turn.
        """
        self._began = time.perf_counter()
        first = self._counters = await read_tier_counters(self._client)
        self._has_tier = first is not None
        waiting = iter(conversations)
        workers = [
            asyncio.create_task(self._work(waiting))
            for _ in range(min(self._pace.concurrency, len(conversations)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._run.wall_s = time.perf_counter() - self._began
            self._run.tier = counter_difference(first, await self._read_counters() or self._counters)

    async def _work(self, waiting: Iterator[PlannedConversation]) -> None:
        for conversation in waiting:
            prompts = PromptMaker(
                self._vocabulary, conversation.scaling, self._seed, conversation.token_scope
            )
            await self._agent(conversation, conversation.main, prompts)

    async def _agent(
        self, conversation: PlannedConversation, agent: PlannedAgent, prompts: PromptMaker
    ) -> None:
        await asyncio.sleep(agent.pause_s * self._pace.think_time_scale)
        for step in agent.steps:
            if isinstance(step, PlannedTurn):
                await self._turn(conversation, step, prompts)
            else:
                await self._agent(conversation, step, prompts)

    async def _turn(
        self, conversation: PlannedConversation, planned: PlannedTurn, prompts: PromptMaker
    ) -> None:
        pause = planned.turn.pause_s * self._pace.think_time_scale
        await asyncio.sleep(pause)
        reason = self._gone()
        if reason is not None:
            raise ServerGone(reason)
        tokens = prompts.prompt(planned.turn, planned.number)
        started = time.perf_counter() - self._began
        completion: Completion | None = None
        failure: RequestError | None = None
        try:
            completion = await self._client.generate(tokens.tolist(), planned.output_tokens, self._sampling)
        except RequestError as error:
            failure = error
        record = TurnRecord(
            conversation=conversation.name,
            agent=planned.agent,
            number=planned.number,
            kind=planned.turn.kind,
            prompt_tokens=planned.input_tokens,
            prompt_digest=hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=8).hexdigest(),
            theoretical_cached=planned.theoretical_cached,
            requested_output=planned.output_tokens,
            waited_s=pause,
            started_s=started,
            completion=completion,
            error_kind=failure.kind if failure else None,
            error=str(failure) if failure else None,
            tier=await self._counted() if self._pace.concurrency == 1 else None,
        )
        self._run.records.append(record)
        self._on_turn(record)

    async def _counted(self) -> dict[str, int] | None:
        """Growth of the counters since the last call; with one request at a time that is the turn's own."""
        before, self._counters = self._counters, await self._read_counters()
        return counter_difference(before, self._counters)

    async def _read_counters(self) -> dict[str, int] | None:
        if not self._has_tier:
            return None
        try:
            return await asyncio.wait_for(read_tier_counters(self._client), COUNTERS_TIMEOUT_S)
        except (RequestError, asyncio.TimeoutError):
            return None
