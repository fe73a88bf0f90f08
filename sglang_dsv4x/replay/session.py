"""One replay from URLs to Runs: asks the servers, plans, checks that the plan fits, sends."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sglang_dsv4x.replay.client import Api, Connection, Sampling, TurnClient
from sglang_dsv4x.replay.conversation import Conversation
from sglang_dsv4x.replay.facts import (
    DEFAULT_PAGE_SIZE,
    ServerFacts,
    find_vocabulary,
    read_facts,
)
from sglang_dsv4x.replay.http import Http
from sglang_dsv4x.replay.journal import Journal, Past
from sglang_dsv4x.replay.openai_client import OpenAiClient
from sglang_dsv4x.replay.plan import PlannedConversation, make_plan, planned_turns
from sglang_dsv4x.replay.records import Run, TurnRecord
from sglang_dsv4x.replay.runner import Pace, Runner, ServerGone, Target
from sglang_dsv4x.replay.sglang_client import SglangClient


class PlanError(ValueError):
    """The plan cannot run on this server; the message names the flag that helps."""


class Endpoint(NamedTuple):
    """A server to replay against, and the name of its run."""

    name: str
    base_url: str


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is sent and when; goes into the report, without the connection."""

    scale: float = 1.0
    max_turns: int | None = None
    output_tokens: int | None = None
    copies: int = 1
    seed: int = 0
    vocab_size: int | None = None
    page_size: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    pace: Pace = field(default_factory=Pace)
    timeout_s: float = 600.0
    flush_cache: bool = False
    api: Api | None = None
    model: str | None = None
    openai_strict: bool = False
    connection: Connection = field(default_factory=Connection)

    def reported(self) -> dict[str, object]:
        """The settings as flat JSON values."""
        nested = ("sampling", "pace", "connection")
        plain = {k: v for k, v in vars(self).items() if k not in nested}
        return {**plain, **self.sampling._asdict(), **self.pace._asdict()}


@dataclass
class State:
    """Holds the runs from their first turn on, so that whoever cancels the replay still has what was done."""

    runs: list[Run] = field(default_factory=list)

    @property
    def run(self) -> Run | None:
        """The first server's run."""
        return self.runs[0] if self.runs else None


class ProgressSink(Protocol):
    """What a replay tells while it goes."""

    def begin(
        self, conversations: Sequence[PlannedConversation], runs: Sequence[Run], settings: Settings
    ) -> None: ...

    def turn(self, record: TurnRecord) -> None: ...


async def replay(
    servers: str | Sequence[Endpoint],
    conversations: Sequence[Conversation],
    settings: Settings,
    state: State,
    progress: ProgressSink,
    gone: Callable[[], str | None] = lambda: None,
    journal_path: Path | None = None,
) -> None:
    """Replays the conversations against the servers (a URL, or several with names) and fills `state.runs`.

    `gone` tells why a launched server has ended, or None: the runs then stop and are marked partial.
    `journal_path` is a file that finished turns are kept in, and taken from when it exists. Raises PlanError
    or VocabularyError when the plan does not fit a server, JournalError, RequestError when one does not
    answer at the start. Failed turns raise nothing: they are records.
    """
    endpoints = [Endpoint("server", servers)] if isinstance(servers, str) else list(servers)
    async with contextlib.AsyncExitStack() as stack:
        clients, facts = [], []
        for endpoint in endpoints:
            found = await _ask(endpoint, settings)
            clients.append(await stack.enter_async_context(_client(endpoint, found, settings)))
            facts.append(found)
        vocabulary = find_vocabulary(facts, settings.vocab_size)
        page_size = _page_size(facts, settings)
        plan = make_plan(
            conversations,
            page_size=page_size,
            scale=settings.scale,
            max_turns=settings.max_turns,
            output_tokens=settings.output_tokens,
            copies=settings.copies,
        )
        for endpoint, found in zip(endpoints, facts, strict=True):
            check_fits(plan, found, endpoint.name)
        runs = [
            Run(
                planned_turns=sum(1 for c in plan for _ in planned_turns(c.main)),
                concurrency=settings.pace.concurrency,
                page_size=page_size,
                settings=settings.reported(),
                server=found.reported,
                name=endpoint.name,
                base_url=client.base_url,
            )
            for endpoint, client, found in zip(endpoints, clients, facts, strict=True)
        ]
        journal, past = None, Past()
        if journal_path is not None:
            journal = stack.enter_context(Journal(journal_path))
            past = journal.open(_identity(plan, settings, endpoints), runs)
        if settings.flush_cache and not past.reached_s:
            for client in clients:
                await client.http.flush_cache()
        progress.begin(plan, runs, settings)

        def on_turn(run: Run, record: TurnRecord, at_s: float) -> None:
            progress.turn(record)
            if journal is not None:
                journal.add(run, record, at_s)

        state.runs = runs
        runner = Runner(
            [Target(client, run) for client, run in zip(clients, runs, strict=True)],
            vocabulary,
            seed=settings.seed,
            pace=settings.pace,
            sampling=settings.sampling,
            on_turn=on_turn,
            gone=gone,
            past=past,
        )
        try:
            await runner.replay(plan)
        except ServerGone as error:
            for run in runs:
                run.partial = str(error)
        finally:
            for run in runs:
                run.fill_in_unreported_hits()


def check_fits(plan: Sequence[PlannedConversation], facts: ServerFacts, server: str = "server") -> None:
    """Raises PlanError when a turn is longer than the server takes, before anything is sent."""
    limit = facts.longest_request
    longest = max(
        ((t.input_tokens + t.output_tokens, c.name, t.number) for c in plan for t in planned_turns(c.main)),
    )
    if limit is not None and longest[0] > limit:
        tokens, name, number = longest
        raise PlanError(
            f"{name} turn {number} takes {tokens:,} tokens with its output, the {server} at most {limit:,} "
            f"(max_req_input_len). Shorten contexts with --scale {0.98 * limit / tokens:.2g} or less, cut "
            "conversations with --max-turns, or give the server more with --context-length and "
            "--max-total-tokens."
        )


async def _ask(endpoint: Endpoint, settings: Settings) -> ServerFacts:
    async with Http(endpoint.base_url, settings.connection) as http:
        return await read_facts(http, settings.api)


def _client(endpoint: Endpoint, facts: ServerFacts, settings: Settings) -> TurnClient:
    if facts.api == "sglang":
        return SglangClient(endpoint.base_url, settings.connection)
    model = settings.model or facts.model
    if model is None:
        raise PlanError(f"{endpoint.name} lists no model at /v1/models. Name it with --model.")
    return OpenAiClient(
        endpoint.base_url,
        settings.connection,
        model=model,
        strict=settings.openai_strict,
        chat=facts.api == "openai-chat",
    )


def _page_size(facts: Sequence[ServerFacts], settings: Settings) -> int:
    """The granularity of the theoretical hits: the user's, or the finest that a server names."""
    named = [f.page_size for f in facts if f.page_size is not None]
    return settings.page_size or min(named, default=DEFAULT_PAGE_SIZE)


def _identity(
    plan: Sequence[PlannedConversation], settings: Settings, endpoints: Sequence[Endpoint]
) -> dict[str, Any]:
    """What a journal belongs to: everything that decides what is sent, and to whom."""
    digest = hashlib.blake2b(digest_size=16)
    for conversation in plan:
        for turn in planned_turns(conversation.main):
            words = (
                conversation.name,
                conversation.token_scope,
                turn.number,
                turn.agent,
                turn.input_tokens,
                turn.output_tokens,
                tuple(turn.turn.blocks),
            )
            digest.update(repr(words).encode())
    kept = {k: v for k, v in settings.reported().items() if k not in ("timeout_s", "retries", "duration_s")}
    return {
        **kept,
        "conversations": len(plan),
        "turns": digest.hexdigest(),
        "servers": [endpoint.name for endpoint in endpoints],
    }
