"""Requests to a live SGLang server that leave its other users' cache alone."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sglang_dsv4x.replay.facts import (
    DEFAULT_PAGE_SIZE,
    TIER_KEY,
    ServerFacts,
    find_vocabulary,
    read_facts,
    read_tier_counters,
)
from sglang_dsv4x.replay.http import Http
from sglang_dsv4x.verify.answers import Answer, read_answer

LISTED_TOKENS = 8


class Probe:
    """One server. Every request names a cache of its own by SGLang's `extra_key`: prompts of an earlier run, or of
    other users, hit nothing here, and the same prompt can be asked cold more than once."""

    def __init__(self, http: Http, facts: ServerFacts, vocab_size: int | None, seed: int):
        """Raises VocabularyError when nobody knows the vocabulary's size."""
        self.facts = facts
        self.page = facts.page_size or DEFAULT_PAGE_SIZE
        self._http = http
        self._vocabulary = find_vocabulary([facts], vocab_size)
        self._seed = seed
        self._run = secrets.token_hex(8)
        self.computed_entries = 0

    @property
    def extension(self) -> dict[str, object] | None:
        """What the extension says about itself; None on a stock server."""
        shown = self.facts.reported.get(TIER_KEY)
        return shown if isinstance(shown, dict) else None

    @property
    def radix_cache_off(self) -> bool:
        return self.facts.reported.get("disable_radix_cache") is True

    def prompt(self, name: str, tokens: int) -> list[int]:
        """Token ids, a function of the seed and the name; a shorter prompt is a prefix of a longer one."""
        return [int(i) for i in self._vocabulary.draw(f"verify/{self._seed}/{name}", tokens)]

    async def ask(self, prompt: Sequence[int], output_tokens: int, cache: str) -> Answer:
        """One greedy answer, with the cache of that name. Raises RequestError."""
        answer = read_answer(
            await self._http.post_json(
                "/generate",
                {
                    "input_ids": list(prompt),
                    "sampling_params": {
                        "temperature": 0.0,
                        "max_new_tokens": output_tokens,
                        "ignore_eos": True,
                    },
                    "return_logprob": True,
                    "top_logprobs_num": LISTED_TOKENS,
                    "extra_key": f"verify-{self._run}-{cache}",
                },
            )
        )
        # The last output token is sampled and never stored.
        end = len(prompt) + len(answer.output_ids) - 1
        self.computed_entries += end // 4 - answer.cached_tokens // 4
        return answer

    async def counters(self) -> dict[str, int] | None:
        """The tier's counters; None without a tier. Raises RequestError."""
        return await read_tier_counters(self._http)


async def make_probe(http: Http, vocab_size: int | None, seed: int) -> Probe:
    """Asks the server what it is. Raises RequestError (also for one that is not SGLang), VocabularyError."""
    return Probe(http, await read_facts(http, "sglang"), vocab_size, seed)
