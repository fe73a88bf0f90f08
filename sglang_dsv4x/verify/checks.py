"""What is expected of a server, check by check, and why each may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from sglang_dsv4x.replay.client import RequestError
from sglang_dsv4x.replay.facts import counter_difference
from sglang_dsv4x.verify.answers import Answer, distance, spread, to_nearest
from sglang_dsv4x.verify.probe import Probe

# What this project calls equal log-probabilities: a server whose own spread is smaller is held to it.
EQUAL = 1e-5
OUTPUT_TOKENS = 16
Status = Literal["pass", "fail", "note", "skip"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. `note`: not as expected, and no failure on a stock server. `cause` is the likely
    one, for `fail` and `note`."""

    check: str
    status: Status
    expected: str
    found: str
    cause: str = ""


@dataclass
class Findings:
    """All findings so far, and the server's own spread once it is measured."""

    found: list[Finding]
    tell: Callable[[Finding], None]
    spread: float | None = None

    def add(self, check: str, status: Status, expected: str, found: str, cause: str = "") -> None:
        finding = Finding(check, status, expected, found, cause if status in ("fail", "note") else "")
        self.found.append(finding)
        self.tell(finding)

    @property
    def failed(self) -> bool:
        return any(finding.status == "fail" for finding in self.found)


async def verify(probe: Probe, longest_prompt: int, tell: Callable[[Finding], None]) -> Findings:
    """Runs all checks in order. A request that fails fails its check; the others go on.

    `longest_prompt` bounds, in tokens, the prompt with which the tier is made to fetch; `tell` is called with every
    finding. Raises RequestError when the server cannot be reached.
    """
    findings = Findings([], tell)
    before = await probe.counters()
    checks: list[tuple[str, Callable[[Probe, Findings], Awaitable[None]]]] = [
        ("outputs", check_outputs),
        ("repeat", check_repeats),
        ("fork", check_forks),
        ("resume", check_resumes),
    ]
    for name, check in checks:
        try:
            await check(probe, findings)
        except RequestError as error:
            findings.add(
                name, "fail", "an answer", f"{error.kind}: {error}", "the server's log has the reason"
            )
    await check_tier(probe, findings, before, longest_prompt)
    return findings


async def check_outputs(probe: Probe, findings: Findings) -> None:
    """An answer over a prefix hit is within the spread of answers without one, which is measured first: three times
    alone, and twice beside another prompt, where chunks end and batches form elsewhere."""
    prompt = probe.prompt("outputs", 5 * probe.page + 20)
    other = probe.prompt("beside", 3 * probe.page + 99)
    alone = [await probe.ask(prompt, OUTPUT_TOKENS, f"cold{i}") for i in range(3)]
    beside = [
        (
            await asyncio.gather(
                probe.ask(prompt, OUTPUT_TOKENS, f"beside{i}"), probe.ask(other, OUTPUT_TOKENS, f"other{i}")
            )
        )[0]
        for i in range(2)
    ]
    cold = [*alone, *beside]
    findings.spread = spread(cold)
    shared = sum(answer.cached_tokens for answer in cold)
    if shared:
        findings.add(
            "spread",
            "fail",
            "0 tokens hit across caches of different names",
            f"{shared:,} tokens",
            "extra_key is ignored or dropped on the way: prefixes are shared across tenants, and no answer here is "
            "one without a hit",
        )
        return
    findings.add(
        "spread",
        "pass",
        "measured, not judged",
        f"log-probabilities of one prompt differ by {spread(alone):.3g} alone, {findings.spread:.3g} with batches",
    )
    hits = [await probe.ask(prompt, OUTPUT_TOKENS, "cold0") for _ in range(2)]
    if not all(hit.cached_tokens for hit in hits):
        findings.add("outputs", "skip", "equal answers after a prefix hit", "nothing was hit: see 'repeat'")
        return
    _judge_answer(findings, "outputs", "repeated prompt", hits, cold)


async def check_repeats(probe: Probe, findings: Findings) -> None:
    """A repeated prompt hits all its whole pages, but for its last token, which must be computed."""
    page = probe.page
    for length in (3 * page + 17, 4 * page, 4 * page + 1):
        prompt = probe.prompt(f"repeat{length}", length)
        cache = f"repeat{length}"
        await probe.ask(prompt, OUTPUT_TOKENS, cache)
        again = await probe.ask(prompt, OUTPUT_TOKENS, cache)
        expected = (length - 1) // page * page
        _judge_hit(probe, findings, "repeat", f"same {length:,} tokens again", expected, again)


async def check_forks(probe: Probe, findings: Findings) -> None:
    """Children that continue one history hit all of it, asked at once and one by one; so they do when an edit in the
    middle leaves only part of it."""
    page = probe.page
    parent = probe.prompt("parent", 4 * page + 100)
    await probe.ask(parent, OUTPUT_TOKENS, "fork")
    children = [parent + probe.prompt(f"child{i}", 60) for i in range(4)]
    answers = [await probe.ask(children[0], OUTPUT_TOKENS, "fork")]
    answers += await asyncio.gather(*(probe.ask(child, OUTPUT_TOKENS, "fork") for child in children[1:]))
    expected = len(parent) // page * page
    for i, answer in enumerate(answers):
        _judge_hit(probe, findings, "fork", f"child {i + 1} of {len(parent):,} tokens", expected, answer)
    edited = parent[: 2 * page + 30] + probe.prompt("edit", 2 * page)
    answer = await probe.ask(edited, OUTPUT_TOKENS, "fork")
    _judge_hit(probe, findings, "fork", f"{2 * page + 30:,} tokens, then an edit", 2 * page, answer)
    if answers[0].cached_tokens:
        cold = [await probe.ask(children[0], OUTPUT_TOKENS, f"fork-cold{i}") for i in range(2)]
        _judge_answer(findings, "fork", "first child", answers[:1], cold)


async def check_resumes(probe: Probe, findings: Findings) -> None:
    """A session that goes on after an answer hits its prompt and that answer, also when others ran meanwhile."""
    page = probe.page
    # The answer crosses a page boundary: a server that keeps prompts only hits a page less.
    prompt = probe.prompt("session", 5 * page - 6)
    answer = await probe.ask(prompt, OUTPUT_TOKENS, "session")
    history = [*prompt, *answer.output_ids]
    resumed = await probe.ask(history + probe.prompt("tool result", 40), OUTPUT_TOKENS, "session")
    # The last output token was sampled, and stored nowhere.
    expected = (len(history) - 1) // page * page
    words = f"{len(prompt):,} tokens and {len(answer.output_ids)} generated"
    _judge_hit(probe, findings, "resume", words, expected, resumed)
    for i in range(2):
        await probe.ask(probe.prompt(f"stranger{i}", 4 * page + 33), OUTPUT_TOKENS, f"stranger{i}")
    longer = history + probe.prompt("tool result", 40) + list(resumed.output_ids)
    parked = await probe.ask(longer + probe.prompt("later", 50), OUTPUT_TOKENS, "session")
    expected = (len(longer) - 1) // page * page
    _judge_hit(
        probe, findings, "resume", f"{len(longer):,} tokens after two other sessions", expected, parked
    )
    if parked.cached_tokens:
        whole = longer + probe.prompt("later", 50)
        cold = [await probe.ask(whole, OUTPUT_TOKENS, f"resume-cold{i}") for i in range(2)]
        _judge_answer(findings, "resume", "after two other sessions", [parked], cold)


async def check_tier(
    probe: Probe, findings: Findings, before: dict[str, int] | None, longest_prompt: int
) -> None:
    """The tier moved bytes for what was asked, and its counters add up."""
    shown = probe.extension
    if shown is None:
        findings.add("tier", "skip", "-", "a stock server: sglang_dsv4x is not enabled here (--enable-dsv4x)")
        return
    if shown.get("tier") != "on":
        findings.add("tier", "skip", "-", "the extension keeps everything resident here (--dsv4x-tier off)")
        return
    try:
        await _overflow_hot_cache(probe, findings, shown, longest_prompt)
        after = await probe.counters()
    except RequestError as error:
        findings.add("tier", "fail", "an answer", f"{error.kind}: {error}", "the server's log has the reason")
        return
    grown = counter_difference(before, after)
    if after is None or grown is None:
        findings.add(
            "tier",
            "fail",
            "counters in /server_info that only grow",
            "they are missing, or fell",
            "the server was started again meanwhile, or the extension's metrics seam is not in place",
        )
        return
    for finding in tier_findings(after, grown, probe.computed_entries):
        findings.add(finding.check, finding.status, finding.expected, finding.found, finding.cause)


def tier_findings(total: dict[str, int], grown: dict[str, int], computed_entries: int) -> list[Finding]:
    """What the counters say: `total` since the server's start, `grown` during the checks, in which at least
    `computed_entries` C4 entries were made per layer."""
    parts = sum(total.get(name, 0) for name in ("hits", "misses", "pending"))
    rows_read = total.get("fetched_entries", 0) + total.get("prefill_host", 0)
    read, written = total.get("bytes_to_device", 0), grown.get("bytes_to_host", 0)
    row_bytes, rest = divmod(read, rows_read) if rows_read else (0, read)
    lost = "an update of a counter is lost or counted twice: report it with this server's log"
    made = [
        _finding(
            "tier: selections",
            total.get("selected", 0) == parts and total.get("selected", 0) > 0,
            "selected = hits + misses + pending, above 0",
            f"{total.get('selected', 0):,} = {total.get('hits', 0):,} + {total.get('misses', 0):,} + "
            f"{total.get('pending', 0):,}",
            lost,
        ),
        _finding(
            "tier: bytes to device",
            rest == 0,
            "bytes_to_device = rows of one size * (fetched_entries + prefill_host)",
            f"{read:,} bytes for {rows_read:,} rows"
            + (f" of {row_bytes} B" if rows_read and not rest else ""),
            lost,
        ),
    ]
    # Without any read the size of a row is unknown, and one byte is asked for.
    least = computed_entries * max(1, row_bytes)
    made.append(
        _finding(
            "tier: bytes to host",
            written >= least > 0,
            f"write-through of {computed_entries:,} computed C4 entries in each layer: at least {least:,} bytes",
            f"{written:,} bytes",
            "entries are not written through: what leaves the hot cache would be lost",
        )
    )
    return made


async def _overflow_hot_cache(
    probe: Probe, findings: Findings, shown: dict[str, object], longest_prompt: int
) -> None:
    """One prompt with more entries than the hot cache holds, so that rows must come back from the host."""
    hot = shown.get("hot_entries")
    limit = min(longest_prompt, probe.facts.longest_request or longest_prompt) - OUTPUT_TOKENS
    needed = (4 * hot if type(hot) is int else 0) + 2 * probe.page
    if needed > limit:
        findings.add(
            "tier: fetches",
            "skip",
            "-",
            f"the hot cache holds {needed:,} tokens, more than a prompt may have here ({limit:,}): "
            "raise --longest-prompt, or start the server with fewer --dsv4x-hot-entries",
        )
        return
    before = await probe.counters() or {}
    prompt = probe.prompt("long", needed)
    for _ in range(2):
        await probe.ask(prompt, OUTPUT_TOKENS, "long")
    after = await probe.counters() or {}
    moved = after.get("bytes_to_device", 0) - before.get("bytes_to_device", 0)
    findings.add(
        "tier: fetches",
        "pass" if moved > 0 else "fail",
        f"bytes from the host for a prompt of {needed:,} tokens, more than the hot cache's {hot} entries",
        f"{moved:,} bytes",
        "selected entries are served from elsewhere: the tier is not in the path of attention",
    )


def _judge_hit(
    probe: Probe, findings: Findings, check: str, what: str, expected: int, answer: Answer
) -> None:
    got = answer.cached_tokens
    status: Status = "pass"
    cause = ""
    if got > expected:
        status = "fail"
        cause = (
            f"more than the prompts share in whole pages of {probe.page}: tokens of another prompt were used"
        )
    elif got < expected:
        status, cause = _lost(probe, got)
    findings.add(check, status, f"{what}: {expected:,} tokens hit", f"{got:,}", cause)


def _lost(probe: Probe, got: int) -> tuple[Status, str]:
    if probe.radix_cache_off:
        return "fail", "the radix cache is off (--disable-radix-cache)"
    window = (
        "the prefix's window (SWA) pages were evicted, so the whole prefix after the last kept tail is computed "
        "again: raise --swa-full-tokens-ratio or --max-total-tokens, or run this without other traffic"
    )
    if probe.extension is None:
        return "note", f"{window}; stock SGLang does that"
    if got == 0:
        return (
            "fail",
            f"{window}. Nothing at all was hit: also look whether requests share a data-parallel rank",
        )
    return "fail", window


def _judge_answer(
    findings: Findings, check: str, what: str, hits: Sequence[Answer], cold: Sequence[Answer]
) -> None:
    """Answers over hits against cold ones of the same prompt, within the spread of both prompts' cold answers."""
    limit = max(EQUAL, findings.spread or 0.0, spread(cold))
    furthest = max(to_nearest(hit, cold) for hit in hits)
    furthest = max(furthest, *(distance(a, b) for a, b in pairwise(hits)), 0.0)
    findings.add(
        check,
        "pass" if furthest <= limit else "fail",
        f"{what}: the answer without a hit, log-probabilities within {limit:.3g}",
        f"{furthest:.3g} apart",
        "the hit used wrong bytes (a window, a compressor state or C4 rows of something else): start the server with "
        "--dsv4x-checks step, which names the row",
    )


def _finding(check: str, good: bool, expected: str, found: str, cause: str) -> Finding:
    return Finding(check, "pass" if good else "fail", expected, found, "" if good else cause)
