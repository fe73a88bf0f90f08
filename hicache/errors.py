"""Errors of the tiered cache. Every message names what was needed, what there is, and the flag that changes
it."""

from __future__ import annotations


class TierError(RuntimeError):
    """The tier cannot go on: a fetch that never arrives, operations out of order, or too few hot slots."""


class HostMemoryError(TierError):
    """The host store does not fit in the memory that this process may use."""


class IntegrityError(TierError):
    """Tables and bytes contradict each other: a bug. The message names layer and entry."""
