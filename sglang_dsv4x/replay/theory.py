"""What a prefix cache that never forgets would serve: the yardstick for the hit rate that is achieved."""

from __future__ import annotations

from collections.abc import Sequence


class InfinitePrefixCache:
    """Every prompt so far as a trie of blocks, matched as SGLang's radix cache matches.

    A hit is a whole number of pages and leaves at least one token of the prompt to compute. Generated tokens
    are not in the trie: in a replay no later prompt contains them.
    """

    def __init__(self, page_size: int):
        self._page = page_size
        self._nodes: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # (parent, hash id) -> (node, tokens seen of the block)
        self._roots: dict[str, int] = {}
        self._count = 0

    def add(self, scope: str, blocks: Sequence[int], block_tokens: int, input_tokens: int) -> int:
        """Adds a prompt and returns how many of its tokens, in whole pages, earlier prompts had cached.

        `blocks` are its hash ids, `block_tokens` the tokens of a block and `input_tokens` of the prompt,
        which may end inside the last block or after it; tokens after it are shared with nothing.
        """
        if scope not in self._roots:
            self._roots[scope] = self._new_node()
        node, shared, matching = self._roots[scope], 0, True
        for i, block in enumerate(blocks):
            length = min(block_tokens, input_tokens - i * block_tokens)
            if length <= 0:
                break
            child, seen = self._nodes.get((node, block), (None, 0))
            if matching:
                shared += min(length, seen)
            matching = matching and seen == length == block_tokens
            if child is None:
                child = self._new_node()
            self._nodes[(node, block)] = (child, max(length, seen))
            node = child
        return min(shared, input_tokens - 1) // self._page * self._page

    def _new_node(self) -> int:
        self._count += 1
        return self._count
