"""Several servers in one run, runs taken up again, keys and certificates: each against real HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import trustme
from wire_server import WireServer, serving

from sglang_dsv4x.replay.client import Connection, RequestError
from sglang_dsv4x.replay.conversation import Agent, Conversation, Turn
from sglang_dsv4x.replay.journal import JournalError
from sglang_dsv4x.replay.records import Run
from sglang_dsv4x.replay.report import without_secrets
from sglang_dsv4x.replay.runner import Pace
from sglang_dsv4x.replay.session import Endpoint, Settings, State, replay
from sglang_dsv4x.replay.summary import summarise


class Silent:
    def begin(self, *_: object) -> None: ...

    def turn(self, record: object) -> None: ...


def conversation(name: str, turns: int) -> Conversation:
    steps = tuple(Turn(64 * (i + 1) + 1, 3, tuple(range(i + 1))) for i in range(turns))
    return Conversation(name, 64, name, Agent("main", steps))


def replayed(
    servers: Sequence[WireServer],
    conversations: Sequence[Conversation],
    settings: Settings | None = None,
    journal: Path | None = None,
    certificates: trustme.CA | None = None,
) -> list[Run]:
    state = State()

    async def go() -> None:
        async with contextlib.AsyncExitStack() as stack:
            tls = None
            if certificates is not None:
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                certificates.issue_cert("127.0.0.1").configure_cert(tls)
            urls = [await stack.enter_async_context(serving(server, tls)) for server in servers]
            endpoints = [Endpoint("abc"[i], url) for i, url in enumerate(urls)]
            await replay(
                endpoints, conversations, settings or Settings(), state, Silent(), journal_path=journal
            )

    asyncio.run(go())
    return state.runs


def test_every_turn_goes_to_all_servers_before_the_next_and_each_is_first_as_often():
    """A server that is always second would find the machine, or a shared router, in another state."""
    servers = [WireServer(), WireServer()]
    runs = replayed(servers, [conversation("c", 8)])
    assert [run.name for run in runs] == ["a", "b"] and [len(run.records) for run in runs] == [8, 8]
    assert servers[0].prompts == servers[1].prompts
    pairs = list(zip(*(run.records for run in runs), strict=True))
    first = ["a" if a.started_s < b.started_s else "b" for a, b in pairs]
    assert first == ["a", "b"] * 4
    for (a, b), (later_a, later_b) in pairwise(pairs):
        assert max(a.ended_s, b.ended_s) <= min(later_a.started_s, later_b.started_s) + 1e-3


def test_alternate_servers_never_work_at_once_and_together_they_do():
    servers = [WireServer(token_delay_s=0.03), WireServer(token_delay_s=0.03)]

    def overlap(runs: list[Run]) -> int:
        return sum(
            a.started_s < b.ended_s - 0.01 and b.started_s < a.ended_s - 0.01
            for a in runs[0].records
            for b in runs[1].records
        )

    assert overlap(replayed(servers, [conversation("c", 3)])) == 0
    together = replayed(servers, [conversation("c", 3)], Settings(pace=Pace(interleave="together")))
    assert overlap(together) == 3


def test_one_servers_failures_are_its_own():
    servers = [WireServer(), WireServer(faults={2: "500", 3: "close"})]
    a, b = replayed(servers, [conversation("c", 4)])
    assert summarise(a).failures == {} and summarise(b).failures == {"http": 1, "connection": 1}
    assert [r.number for r in b.records] == [1, 2, 3, 4]


def test_an_sglang_and_an_openai_server_compare():
    servers = [WireServer(), WireServer(native=False)]
    runs = replayed(servers, [conversation("c", 2)], Settings(vocab_size=900))
    assert [run.server["api"] for run in runs] == ["sglang", "openai"]
    outputs = [[r.completion.output_ids for r in run.records if r.completion] for run in runs]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 2


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path):
    journal = tmp_path / "run.journal"
    settings = Settings(pace=Pace(duration_s=0.25))
    slow = WireServer(token_delay_s=0.03, tier=True)
    [first] = replayed([slow], [conversation("c", 6)], settings, journal)
    sent = len(first.records)
    assert 0 < sent < 6 and first.duration_reached
    rest = WireServer(tier=True)
    [whole] = replayed([rest], [conversation("c", 6)], Settings(), journal)
    assert [r.number for r in whole.records] == [1, 2, 3, 4, 5, 6]
    assert whole.records[:sent] == first.records and len(rest.prompts) == 6 - sent
    assert not whole.duration_reached and whole.not_sent == 0
    assert whole.resumed_s[0] >= first.records[-1].ended_s
    assert whole.records[sent].started_s >= whole.resumed_s[0]
    assert whole.tier and whole.tier["selected"] == 6 * 300, "both parts' traffic"
    [again] = replayed([WireServer()], [conversation("c", 6)], Settings(), journal)
    assert again.records == whole.records


def test_a_failed_turn_is_sent_again_by_the_resumed_run_and_counted_as_a_retry(tmp_path: Path):
    journal = tmp_path / "run.journal"
    replayed([WireServer(faults={2: "500"})], [conversation("c", 3)], journal=journal)
    server = WireServer(faults={1: "close"})
    [second] = replayed([server], [conversation("c", 3)], journal=journal)
    assert len(server.prompts) == 1 and second.records[-1].error_kind == "connection"
    [third] = replayed([WireServer()], [conversation("c", 3)], journal=journal)
    assert sorted(r.number for r in third.records) == [1, 2, 3]
    assert summarise(third).failures == {} and summarise(third).retries == {"http": 1, "connection": 1}


def test_a_crash_in_the_middle_of_a_line_loses_that_turn_only(tmp_path: Path):
    journal = tmp_path / "run.journal"
    replayed([WireServer()], [conversation("c", 3)], journal=journal)
    journal.write_bytes(journal.read_bytes()[:-40])
    server = WireServer()
    [run] = replayed([server], [conversation("c", 3)], journal=journal)
    assert len(server.prompts) == 1 and len(run.records) == 3
    for line in journal.read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: None, r"made for another replay \(seed: 0 then, 1 now\)"),
        (lambda path: path.write_text("{}\n"), "no journal of this version"),
        (lambda path: path.write_text("nonsense\n"), "line 1: not JSON"),
        (lambda path: path.write_text(path.read_text() + '{"run": "a"}\n'), "line 4: "),
        (lambda path: path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n"), "twice"),
    ],
)
def test_a_journal_that_does_not_fit_is_refused(tmp_path: Path, change, words: str):
    journal = tmp_path / "run.journal"
    replayed([WireServer()], [conversation("c", 2)], journal=journal)
    settings = Settings(seed=1) if "seed" in words else Settings()
    change(journal)
    with pytest.raises(JournalError, match=words):
        replayed([WireServer()], [conversation("c", 2)], settings, journal)


@pytest.mark.parametrize("native", [True, False])
def test_a_key_is_sent_and_a_wrong_one_is_named_at_once(native: bool):
    server = WireServer(api_key="secret", native=native)
    right = Settings(connection=Connection(api_key="secret"), vocab_size=900)
    [run] = replayed([server], [conversation("c", 2)], right)
    assert summarise(run).turns == 2
    with pytest.raises(RequestError, match="HTTP 401"):
        replayed([server], [conversation("c", 1)], Settings(vocab_size=900))


@pytest.mark.parametrize("native", [True, False])
def test_certificates_are_checked_unless_the_user_says_otherwise(tmp_path: Path, native: bool):
    authority, server = trustme.CA(), WireServer(native=native)
    pem = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(pem))

    def turns(connection: Connection) -> int:
        settings = Settings(connection=connection, vocab_size=900)
        [run] = replayed([server], [conversation("c", 1)], settings, certificates=authority)
        return summarise(run).turns

    with pytest.raises(RequestError, match=r"(?i)certificate"):
        turns(Connection())
    assert turns(Connection(ca_file=pem)) == turns(Connection(insecure=True)) == 1


def test_secrets_stay_out_of_the_report():
    words = ["sglang-dsv4x", "--api-key", "s3", "--api-key=s3", "a=https://u:s3@host/v1", "https://u:s3@host"]
    shown = without_secrets(words)
    assert "s3" not in " ".join(shown)
    assert shown == [
        "sglang-dsv4x",
        "--api-key",
        "***",
        "--api-key=***",
        "a=https://***@host/v1",
        "https://***@host",
    ]
