"""Prompts as the pages that a radix cache compares: one key for a page's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_dsv4x.replay.blocks import block_array

KEY_BYTES = 8

# Multipliers of the 64-bit finaliser of MurmurHash3 (public domain).
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


def page_keys(blocks: Sequence[int], block_tokens: int, input_tokens: int, page_size: int) -> bytes:
    """KEY_BYTES for each page of the prompt that its blocks determine, in order.

    `blocks` are its hash ids, `block_tokens` the tokens of a block, `input_tokens` of the prompt, which may
    end inside the last block or after it. Pages at the same place of two prompts have the same key if and
    only if (but for hash collisions, about 2**-64 each) the same blocks lie under them, and so the same tokens.
    """
    ids = block_array(blocks)
    pages = min(input_tokens, len(ids) * block_tokens) // page_size
    if pages == 0:
        return b""
    starts = np.arange(pages) * page_size
    first, last = starts // block_tokens, (starts + page_size - 1) // block_tokens
    keys = np.zeros(pages, np.uint64)
    for step in range(int((last - first).max()) + 1):
        under = ids[np.minimum(first + step, last)].astype(np.uint64)
        mixed = _mixed(keys * np.uint64(31) + under + np.uint64(1))
        keys = np.where(first + step <= last, mixed, keys)
    return keys.tobytes()


def common_pages(first: bytes, second: bytes) -> int:
    """How many pages both key strings begin with."""
    count = min(len(first), len(second)) // KEY_BYTES
    a, b = (np.frombuffer(keys, np.uint64, count) for keys in (first, second))
    different = a != b
    at = int(different.argmax()) if count else 0
    return at if count and different[at] else count


def _mixed(words: np.ndarray) -> np.ndarray:
    for factor in _MIX:
        words = (words ^ (words >> _SHIFT)) * factor
    return words ^ (words >> _SHIFT)
