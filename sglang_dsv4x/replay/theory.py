"""What a prefix cache that never forgets would serve: the yardstick for the hit rate that is achieved."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dsv4x.replay.pages import KEY_BYTES, common_pages, page_keys


class InfinitePrefixCache:
    """Every prompt so far as a radix tree of pages, matched as SGLang's radix cache matches.

    A hit is a whole number of pages and leaves at least one token of the prompt to compute. Generated tokens
    are not in the tree: in a replay no later prompt contains them. Eight bytes for each page that no earlier
    prompt had.
    """

    def __init__(self, page_size: int):
        self._page = page_size
        self._roots: dict[str, _Node] = {}

    def add(self, scope: str, blocks: Sequence[int], block_tokens: int, input_tokens: int) -> int:
        """Adds a prompt and returns how many of its tokens, in whole pages, earlier prompts had cached.

        `blocks` are its hash ids, `block_tokens` the tokens of a block and `input_tokens` of the prompt,
        which may end inside the last block or after it; tokens after it are shared with nothing.
        """
        return self.add_keys(scope, page_keys(blocks, block_tokens, input_tokens, self._page), input_tokens)

    def add_keys(self, scope: str, keys: bytes, input_tokens: int) -> int:
        """As `add`, for a prompt whose `page_keys` are known."""
        node = self._roots.setdefault(scope, _Node(b""))
        at = 0
        while at < len(keys):
            child = node.children.get(keys[at : at + KEY_BYTES])
            if child is None:
                node.add(_Node(keys[at:]))
                break
            if not keys.startswith(child.keys, at):
                common = common_pages(child.keys, keys[at:]) * KEY_BYTES
                node = node.split(child, common)
                at += common
                if at < len(keys):
                    node.add(_Node(keys[at:]))
                break
            node = child
            at += len(child.keys)
        return min(at // KEY_BYTES * self._page, (input_tokens - 1) // self._page * self._page)


class _Node:
    __slots__ = ("children", "keys")

    def __init__(self, keys: bytes):
        self.keys = keys
        self.children: dict[bytes, _Node] = {}

    def add(self, child: _Node) -> None:
        self.children[child.keys[:KEY_BYTES]] = child

    def split(self, child: _Node, at: int) -> _Node:
        """Puts a node of the child's first `at` bytes of keys between the two and returns it."""
        upper = _Node(child.keys[:at])
        child.keys = child.keys[at:]
        upper.add(child)
        self.add(upper)
        return upper
