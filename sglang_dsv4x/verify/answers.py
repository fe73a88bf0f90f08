"""How far two greedy answers to one prompt are apart, as one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from sglang_dsv4x.replay.client import RequestError, finite


class Answer(NamedTuple):
    """One answer. `logprobs` are natural logarithms of the chosen tokens' probabilities, `likely` those of the
    likeliest tokens at each position, by token id; `cached_tokens` is what the prefix cache served."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    likely: tuple[dict[int, float], ...]
    cached_tokens: int


def read_answer(value: dict[str, Any]) -> Answer:
    """An answer of SGLang's /generate with return_logprob and top_logprobs_num. Raises RequestError for any other."""
    ids, meta = value.get("output_ids"), value.get("meta_info")
    if not isinstance(ids, list) or not isinstance(meta, dict):
        raise RequestError("protocol", "answer without output_ids and meta_info")
    chosen, tops, cached = (
        meta.get(key) for key in ("output_token_logprobs", "output_top_logprobs", "cached_tokens")
    )
    if type(cached) is not int:
        raise RequestError("protocol", "answer without usage: meta_info.cached_tokens is missing")
    if not isinstance(chosen, list) or not isinstance(tops, list) or not len(ids) == len(chosen) == len(tops):
        raise RequestError("protocol", f"answer of {len(ids)} tokens without as many log-probabilities")
    try:
        likely = tuple({int(token): finite(x, i) for x, token, *_ in top or ()} for i, top in enumerate(tops))
        logprobs = tuple(finite(entry[0], i) for i, entry in enumerate(chosen))
    except (TypeError, ValueError, IndexError) as error:
        raise RequestError("protocol", f"log-probabilities are not as SGLang's: {error}") from error
    return Answer(tuple(ids), logprobs, likely, cached)


def distance(a: Answer, b: Answer) -> float:
    """Largest difference of a log-probability between two answers to one prompt, as far as it can be seen.

    Up to the first token in which they differ: of the chosen token. There, a chose x over y and b chose y over
    x, so one of the two must have changed by half the sum of both preferences at least. What follows has other
    contexts and is not compared. Infinite for answers of different lengths and equal tokens.
    """
    largest = 0.0
    for i, (x, y) in enumerate(zip(a.output_ids, b.output_ids, strict=False)):
        if x != y:
            return max(largest, (_preference(a, i, x, y) + _preference(b, i, y, x)) / 2)
        largest = max(largest, abs(a.logprobs[i] - b.logprobs[i]))
    return largest if len(a.output_ids) == len(b.output_ids) else math.inf


def spread(answers: Sequence[Answer]) -> float:
    """Largest distance of any two answers."""
    return max((distance(a, b) for a, b in combinations(answers, 2)), default=0.0)


def to_nearest(answer: Answer, others: Sequence[Answer]) -> float:
    """Distance to the nearest of the others."""
    return min(distance(answer, other) for other in others)


def _preference(answer: Answer, position: int, chosen: int, other: int) -> float:
    """By how much the chosen token was likelier than another, at least: the other may be below all listed."""
    likely = answer.likely[position]
    bound = min(likely.values(), default=-math.inf)
    return max(0.0, answer.logprobs[position] - likely.get(other, bound))
