"""The tiered C4 cache: identity-mapped host store, hot slots without ownership. Knows torch, not SGLang."""

from .cache import TieredCache
from .counters import TierCounters
from .errors import HostMemoryError, IntegrityError, TierError
from .host_memory import HostMemory, host_memory
from .shape import TierShape

__all__ = [
    "HostMemory",
    "HostMemoryError",
    "IntegrityError",
    "TierCounters",
    "TierError",
    "TierShape",
    "TieredCache",
    "host_memory",
]
