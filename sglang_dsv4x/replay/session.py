"""One replay from a URL to a Run: asks the server, plans, checks that the plan fits, sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_dsv4x.replay.client import Client, Sampling
from sglang_dsv4x.replay.conversation import Conversation
from sglang_dsv4x.replay.facts import ServerFacts, find_vocabulary, read_facts
from sglang_dsv4x.replay.plan import PlannedConversation, make_plan, planned_turns
from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.runner import Pace, Runner, ServerGone


class PlanError(ValueError):
    """The plan cannot run on this server; the message names the flag that helps."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is sent and when; goes into the report as it is."""

    scale: float = 1.0
    max_turns: int | None = None
    output_tokens: int | None = None
    copies: int = 1
    seed: int = 0
    vocab_size: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    pace: Pace = field(default_factory=Pace)
    timeout_s: float = 600.0
    flush_cache: bool = False

    def reported(self) -> dict[str, object]:
        """The settings as flat JSON values."""
        plain = {k: v for k, v in vars(self).items() if k not in ("sampling", "pace")}
        return {**plain, **self.sampling._asdict(), **self.pace._asdict()}


@dataclass
class State:
    """Holds the run from its first turn on, so that whoever cancels the replay still has what was done."""

    run: Run | None = None


class ProgressSink(Protocol):
    """What a replay tells while it goes."""

    def begin(self, conversations: Sequence[PlannedConversation]) -> None: ...

    def turn(self, record: TurnRecord) -> None: ...


async def replay(
    base_url: str,
    conversations: Sequence[Conversation],
    settings: Settings,
    state: State,
    progress: ProgressSink,
    gone: Callable[[], str | None] = lambda: None,
) -> None:
    """Replays the conversations against the server and fills `state.run`.

    `gone` tells why a launched server has ended, or None: the run then stops and is marked partial. Raises
    PlanError or VocabularyError when the plan does not fit the server, RequestError when it does not answer
    at the start. Failed turns raise nothing: they are records.
    """
    async with Client(base_url, timeout_s=settings.timeout_s) as client:
        facts = await read_facts(client)
        vocabulary = find_vocabulary(facts, settings.vocab_size)
        plan = make_plan(
            conversations,
            page_size=facts.page_size,
            scale=settings.scale,
            max_turns=settings.max_turns,
            output_tokens=settings.output_tokens,
            copies=settings.copies,
        )
        check_fits(plan, facts)
        if settings.flush_cache:
            await client.flush_cache()
        progress.begin(plan)
        state.run = Run(
            planned_turns=sum(1 for c in plan for _ in planned_turns(c.main)),
            concurrency=settings.pace.concurrency,
            page_size=facts.page_size,
            settings=settings.reported(),
            server=facts.reported,
        )
        runner = Runner(
            client,
            vocabulary,
            state.run,
            seed=settings.seed,
            pace=settings.pace,
            sampling=settings.sampling,
            on_turn=progress.turn,
            gone=gone,
        )
        try:
            await runner.replay(plan)
        except ServerGone as error:
            state.run.partial = str(error)


def check_fits(plan: Sequence[PlannedConversation], facts: ServerFacts) -> None:
    """Raises PlanError when a turn is longer than the server takes, before anything is sent."""
    limit = facts.longest_request
    longest = max(
        ((t.input_tokens + t.output_tokens, c.name, t.number) for c in plan for t in planned_turns(c.main)),
    )
    if limit is not None and longest[0] > limit:
        tokens, name, number = longest
        raise PlanError(
            f"{name} turn {number} takes {tokens:,} tokens with its output, the server at most {limit:,} "
            f"(max_req_input_len). Shorten contexts with --scale {0.98 * limit / tokens:.2g} or less, cut "
            "conversations with --max-turns, or give the server more with --context-length and "
            "--max-total-tokens."
        )
