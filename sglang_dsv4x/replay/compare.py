"""Holds two replays of the same prompts against each other, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_dsv4x.replay.records import Run

TurnKey = tuple[str, int]


class Output(NamedTuple):
    """What one turn gave: digest of its prompt, output and, where recorded, log-probabilities.

    `output` holds token ids, or the digest of the text from a server that sends no ids.
    """

    prompt_digest: str
    output: tuple[int, ...] | str
    logprobs: tuple[float, ...] | None


class Comparison(NamedTuple):
    """Two runs, turn by turn.

    `turns` counts those of either run; `compared` those that both answered, for the same prompt.
    `equal_turns` of them have the same tokens and the same log-probability bits. `tokens` and `logprobs` are
    positions compared, with how many are equal; `largest_difference` is over log-probabilities, None where
    none were compared. `first_difference` describes the first turn that is not equal.
    """

    turns: int
    compared: int
    equal_turns: int
    tokens: int
    equal_tokens: int
    logprobs: int
    equal_logprobs: int
    largest_difference: float | None
    first_difference: str | None

    @property
    def identical(self) -> bool:
        """Every turn of both runs was answered and compared, and all bits are equal."""
        return 0 < self.turns == self.equal_turns


def outputs_of(run: Run) -> dict[TurnKey, Output | None]:
    """Outputs of a run by conversation and turn number; None for a failed turn."""
    outputs: dict[TurnKey, Output | None] = {}
    for record in run.records:
        done = record.completion
        outputs[(record.conversation, record.number)] = done and Output(
            record.prompt_digest,
            done.text_digest or "" if done.output_ids is None else done.output_ids,
            done.logprobs,
        )
    return outputs


def compare(ours: Mapping[TurnKey, Output | None], other: Mapping[TurnKey, Output | None]) -> Comparison:
    """Compares two runs' outputs. Log-probabilities count only where both runs recorded them."""
    compared = equal_turns = tokens = equal_tokens = logprobs = equal_logprobs = 0
    largest: float | None = None
    first: str | None = None
    keys = list(dict.fromkeys([*ours, *other]))
    for key in keys:
        a, b = ours.get(key), other.get(key)
        difference = _difference(a, b)
        if difference is None:
            equal_turns += 1
        elif first is None:
            first = f"{key[0]} turn {key[1]}: {difference}"
        if a is None or b is None or a.prompt_digest != b.prompt_digest:
            continue
        compared += 1
        if not isinstance(a.output, str) and not isinstance(b.output, str):
            tokens += max(len(a.output), len(b.output))
            equal_tokens += _equal(a.output, b.output)
        if a.logprobs is None or b.logprobs is None:
            continue
        logprobs += max(len(a.logprobs), len(b.logprobs))
        equal_logprobs += _equal([x.hex() for x in a.logprobs], [x.hex() for x in b.logprobs])
        for x, y in zip(a.logprobs, b.logprobs, strict=False):
            largest = max(largest or 0.0, abs(x - y))
    return Comparison(
        len(keys), compared, equal_turns, tokens, equal_tokens, logprobs, equal_logprobs, largest, first
    )


def _difference(a: Output | None, b: Output | None) -> str | None:
    if a is None or b is None:
        return "not answered in both runs"
    if a.prompt_digest != b.prompt_digest:
        return "the prompts differ (seed, scale, vocabulary or trace)"
    if isinstance(a.output, str) or isinstance(b.output, str):
        if type(a.output) is not type(b.output):
            return "one server sent token ids, the other text only"
        if a.output != b.output or not a.output:
            return "the texts differ"
    elif a.output != b.output:
        return f"tokens differ from output token {_first_unequal(a.output, b.output)} on"
    if (a.logprobs is None) != (b.logprobs is None):
        return "only one run recorded log-probabilities"
    if a.logprobs is not None and b.logprobs is not None:
        left, right = [x.hex() for x in a.logprobs], [x.hex() for x in b.logprobs]
        if left != right:
            return f"log-probabilities differ from output token {_first_unequal(left, right)} on"
    return None


def _equal(a: Sequence[object], b: Sequence[object]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


def _first_unequal(a: Sequence[object], b: Sequence[object]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
