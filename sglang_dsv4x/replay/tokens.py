"""Token ids from block hashes: a trace holds no text, so a hash id stands for tokens drawn from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sglang_dsv4x.replay.conversation import Turn

# DeepSeek's begin, end and padding tokens are ids 0, 1 and 2; higher special ids are named by the tokenizer.
LOWEST_TOKEN = 3
SMALLEST_VOCABULARY = 16


class VocabularyError(ValueError):
    """The model's vocabulary is unknown or too small to draw prompts from; the message names the flag."""


class Vocabulary:
    """The ids that prompts are drawn from: [LOWEST_TOKEN, size) without the special ones."""

    def __init__(self, size: int, special: Iterable[int] = ()):
        """Raises VocabularyError when fewer than SMALLEST_VOCABULARY ids are left."""
        allowed = np.setdiff1d(np.arange(LOWEST_TOKEN, size, dtype=np.int64), np.fromiter(special, np.int64))
        if len(allowed) < SMALLEST_VOCABULARY:
            raise VocabularyError(
                f"a vocabulary of {size} leaves {len(allowed)} ordinary token ids; at least "
                f"{SMALLEST_VOCABULARY} are needed. Give the model's own size with --vocab-size."
            )
        self._allowed = allowed

    def draw(self, key: str, count: int) -> NDArray[np.int64]:
        """`count` ids, int64 [count], a function of `key` alone; a shorter draw is a prefix of a longer."""
        words = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * count), dtype="<u4").astype(
            np.uint64
        )
        return self._allowed[(words * np.uint64(len(self._allowed)) >> np.uint64(32)).astype(np.int64)]


class Scaling:
    """Lengths in tokens when every context is shortened (or lengthened) by one factor.

    It works block by block: each becomes round(factor * block_size) tokens, at least one, so that prompts
    that shared k blocks share exactly k scaled blocks.
    """

    def __init__(self, block_size: int, factor: float):
        self._full = block_size
        self._factor = factor
        self.block = max(1, round(block_size * factor))

    def input_tokens(self, turn: Turn) -> int:
        """Scaled length of the turn's prompt, at least one token."""
        whole, rest = divmod(turn.input_tokens, self._full)
        return max(1, whole * self.block + min(self.block, round(rest * self._factor)))


class PromptMaker:
    """Makes the prompts of one conversation. Tokens depend on `seed`, `scope` and the hash id alone."""

    def __init__(self, vocabulary: Vocabulary, scaling: Scaling, seed: int, scope: str):
        self._vocabulary = vocabulary
        self._scaling = scaling
        self._key = f"{seed}/{scope}"
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def prompt(self, turn: Turn, number: int) -> NDArray[np.int64]:
        """Token ids of the turn's prompt, int64 [scaled input tokens].

        `number` tells the conversation's turns apart: tokens past the last whole block belong to no hash id,
        so they are made from it and shared with no other turn.
        """
        length = self._scaling.input_tokens(turn)
        parts = [self._block(hash_id) for hash_id in turn.blocks]
        tail = length - len(parts) * self._scaling.block
        if tail > 0:
            parts.append(self._vocabulary.draw(f"{self._key}/tail/{number}", tail))
        return np.concatenate(parts)[:length]

    def _block(self, hash_id: int) -> NDArray[np.int64]:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = self._vocabulary.draw(f"{self._key}/block/{hash_id}", self._scaling.block)
        return self._blocks[hash_id]
