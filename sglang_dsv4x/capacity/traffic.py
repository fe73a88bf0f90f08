"""What decode fetches from the host in one step, and how long the link is busy with it."""

from __future__ import annotations

from typing import NamedTuple

from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, main_layout
from .byte_model import Settings
from .machine import Link
from .shape import CacheShape

MISS_RATE = 0.134
"""Share of selected entries that a hot cache of twice top-k misses; measured by others on GLM-5.1, not on V4."""

STEP_S = 8.4e-3
"""A decode step without fetches: stock on one H200, Flash's attention with a shrunken MoE, 16 requests of 128K."""


class Traffic(NamedTuple):
    """One decode step of all requests of a rank."""

    selected: int
    """Entries, all layers and requests."""
    missed: float
    bytes_to_device: float
    """With every neighbour in a missed unit fetched as well: at most this."""
    bytes_to_host: float
    """Write-through: an entry per request and C4 layer every fourth step."""
    link_s: float
    """Time of the fetches of all C4 layers, one after the other, nothing overlapped."""
    share: float
    """`link_s` as a share of a step without fetches."""


def decode_traffic(
    shape: CacheShape,
    settings: Settings,
    link: Link,
    requests: int,
    context: int,
    miss_rate: float,
    step_s: float,
) -> Traffic:
    """Of `requests` of `context` tokens each. A missed entry brings its unit; two misses in one unit count twice."""
    row = main_layout(C4_ENTRIES_PER_PAGE, settings.storage).row_bytes
    selected = requests * min(shape.top_k, context // 4)
    units = selected * miss_rate
    seconds = shape.c4_layers * link.seconds(units, settings.fetch_unit * row)
    return Traffic(
        selected=selected * shape.c4_layers,
        missed=units * shape.c4_layers,
        bytes_to_device=units * shape.c4_layers * settings.fetch_unit * row,
        bytes_to_host=requests * shape.c4_layers * row / 4,
        link_s=seconds,
        share=seconds / step_s,
    )
