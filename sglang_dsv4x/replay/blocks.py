"""Prompts as block hash ids, held once: a turn keeps only what its prompt adds to the one before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

_Ids: TypeAlias = "array[int]"

# A prompt this many steps from its last whole copy becomes a whole copy itself, so that reading one stays cheap.
_LONGEST_CHAIN = 64


class Blocks(Sequence[int]):
    """Hash ids of a prompt's blocks, in order. Immutable; 8 bytes for each id that `base` does not have.

    An id is between 0 and 2**63 - 1.
    """

    __slots__ = ("_base", "_depth", "_kept", "_own")

    def __init__(self, ids: Iterable[int] = (), base: Blocks | None = None):
        """`ids` in full; what they share with the beginning of `base` is not stored again.

        Raises OverflowError for an id of more than 63 bits, TypeError for one that is no integer.
        """
        own = array("q", ids)
        self._base: Blocks | None = None
        self._kept = self._depth = 0
        self._own = own
        if base is not None and base._depth < _LONGEST_CHAIN:
            kept = common_blocks(np.frombuffer(own, np.int64) if own else _NONE, base.array())
            if kept:
                self._link(base, kept, own[kept:])

    def extended(self, ids: Iterable[int], keep: int | None = None) -> Blocks:
        """The first `keep` blocks (default all) with `ids` behind them."""
        keep = len(self) if keep is None else min(keep, len(self))
        if self._depth >= _LONGEST_CHAIN:
            return Blocks([*self.array()[:keep].tolist(), *ids])
        made = Blocks()
        made._link(self, keep, array("q", ids))
        return made

    def array(self) -> NDArray[np.int64]:
        """All ids, int64 [len(self)]."""
        parts: list[NDArray[np.int64]] = []
        node: Blocks | None = self
        length = len(self)
        while node is not None and length:
            own = length - node._kept
            if own > 0:
                parts.append(np.frombuffer(node._own, np.int64, own))
            length = min(length, node._kept)
            node = node._base
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts[::-1]) if parts else _NONE

    def __len__(self) -> int:
        return self._kept + len(self._own)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        ids = self.array()
        return tuple(ids[index].tolist()) if isinstance(index, slice) else int(ids[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Blocks({list(self)})"

    def _link(self, base: Blocks, kept: int, own: _Ids) -> None:
        # What lies wholly in an ancestor needs no link to those between.
        while base._base is not None and kept <= base._kept:
            base = base._base
        self._base, self._kept, self._own = (base, kept, own) if kept else (None, 0, own)
        self._depth = base._depth + 1 if kept else 0


_NONE = np.empty(0, np.int64)


def block_array(blocks: Sequence[int]) -> NDArray[np.int64]:
    """The ids as int64 [len(blocks)], without a copy where they are held that way."""
    return blocks.array() if isinstance(blocks, Blocks) else np.array(blocks, np.int64)


def common_blocks(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many ids both begin with."""
    count = min(len(first), len(second))
    different = first[:count] != second[:count]
    at = int(different.argmax()) if count else 0
    return at if count and different[at] else count
