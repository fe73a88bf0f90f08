"""The byte model: what every object of a server holds, page padding included.

Sizes follow what SGLang 0.5.17 allocates (`srt/mem_cache/deepseek_v4_memory_pool.py`, `deepseek_v4_compress_state.py`,
`allocator/swa.py`, `allocator/paged.py`, `memory_pool.py: ReqToTokenPool`) with this package's page layouts and tier.
Every page pool holds one page more than its tokens: page 0 is the dummy that padding points to.

Tokens, window tokens and contexts are counted in tokens of the prompt, entries in compressed rows. All results are
bytes of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..hicache.errors import TierError
from ..hicache.shape import TierShape
from ..jit_kernels.layouts import (
    C4_ENTRIES_PER_PAGE,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    IndexDtype,
    Storage,
    index_layout,
    main_layout,
)
from .errors import PlanError
from .shape import WINDOW, CacheShape

PAGE = 256
"""Tokens of a logical page: 64 C4 entries, 64 index keys, 2 C128 entries, one SWA page."""

C4_STATE_RING = 8
C128_STATE_RING = 128
OVERLAP_TOKENS = 4
"""Tokens of the previous block that a C4 entry is also made of."""
CONTEXT_HEADROOM = 4
"""Columns of a request's row in the request table beyond the longest context (allocation_sizing.py)."""

Where = Literal["device", "host"]


@dataclass(frozen=True)
class Settings:
    """What is decided at start and does not change with the number of tokens or requests."""

    tier: bool = True
    index_dtype: IndexDtype = "fp4"
    storage: Storage = "released"
    fetch_unit: int = 2
    hot_entries: int | None = None
    """Per C4 layer; None: twice the bound below which a step could fail."""
    chunk_tokens: int = 8192
    """New tokens in one prefill step at most (--chunked-prefill-size)."""
    context_tokens: int = 1 << 20
    """Longest request (--context-length)."""
    state_bytes: int = 4
    """Bytes of one compressor state value: fp32, or 2 with SGLANG_DSV4_COMPRESS_STATE_DTYPE=bfloat16."""
    checks: bool = False
    """--dsv4x-checks step: a resident copy of all C4 rows."""
    resume_memory: int = 4 << 30
    """Host bytes for resume points (--dsv4x-resume-memory-gb); 0 without the radix cache, which owns them."""
    cuda: bool = True
    """Kernels need scratch memory on a CUDA device."""


class Sizes(NamedTuple):
    """What the allocators hand out."""

    tokens: int
    """max_total_num_tokens; whole pages."""
    window_tokens: int
    """Tokens of the SWA pool; whole pages."""
    requests: int
    """max_running_requests."""


class ObjectBytes(NamedTuple):
    """One object. `staging` is not held from the start, but some steps need it."""

    name: str
    where: Where
    bytes: int
    staging: bool = False


def window_bytes(shape: CacheShape, window_tokens: int, storage: Storage = "released") -> int:
    """SWA rows of all layers."""
    return shape.layers * _pages(window_tokens) * main_layout(PAGE, storage).page_bytes


def index_bytes(
    shape: CacheShape, tokens: int, dtype: IndexDtype = "fp4", storage: Storage = "released"
) -> int:
    """C4 index keys of all C4 layers: 68 or 132 B an entry, without padding."""
    return shape.c4_layers * _pages(tokens) * index_layout(dtype, storage).page_bytes


def c4_bytes(shape: CacheShape, tokens: int, storage: Storage = "released") -> int:
    """C4 main rows when all of them are resident: 64 to a page, 37,440 B for 37,376 B of rows."""
    return shape.c4_layers * _pages(tokens) * main_layout(C4_ENTRIES_PER_PAGE, storage).page_bytes


def c128_bytes(shape: CacheShape, tokens: int, storage: Storage = "released") -> int:
    """C128 rows: two to a page, 1,728 B for 1,168 B of rows, since FlashMLA wants multiples of 576."""
    return shape.c128_layers * _pages(tokens) * main_layout(2, storage).page_bytes


def c4_state_bytes(shape: CacheShape, window_tokens: int, state_bytes: int = 4, page: int = PAGE) -> int:
    """State rings of the C4 and the indexer compressor: 8 rows per SWA page, kv and score, two halves each.

    Rings are addressed by 256-token pages. `page=128` is what SGLang 0.5.17 sizes them by, twice too large.
    """
    rows = _up(window_tokens // page * C4_STATE_RING + C4_STATE_RING + 1, 4)
    return shape.c4_layers * rows * 2 * 2 * (HEAD_DIM + INDEX_HEAD_DIM) * state_bytes


def c128_state_bytes(shape: CacheShape, requests: int, state_bytes: int = 4) -> int:
    """State rings of the C128 compressor: 128 rows per request slot, kv and score. One slot is padding's."""
    rows = _up((requests + 1) * C128_STATE_RING + C128_STATE_RING + 1, 128)
    return shape.c128_layers * rows * 2 * HEAD_DIM * state_bytes


def request_table_bytes(requests: int, context_tokens: int) -> int:
    """req_to_token: an int32 location for each token of each request slot. One slot is padding's."""
    return 4 * (requests + 1) * (context_tokens + CONTEXT_HEADROOM)


def location_table_bytes(tokens: int, window_tokens: int) -> int:
    """The int64 SWA location of every location, and the int64 free lists of both allocators."""
    return 8 * (tokens + PAGE + 1) + 8 * (tokens // PAGE + window_tokens // PAGE)


def staging_bytes(shape: CacheShape, settings: Settings) -> int:
    """What prefill gathers of one C4 layer for one request: packed rows and their BF16 values.

    At most the longest request's history, or what the chunk's queries select. New entries need none: they are made
    in hot slots, which the bound on hot entries counts.
    """
    rows = min(settings.context_tokens // 4, settings.chunk_tokens * shape.top_k)
    value = 4 if settings.storage == "float32" else 2
    layout = main_layout(C4_ENTRIES_PER_PAGE, settings.storage)
    return rows * (layout.row_bytes + HEAD_DIM * value) if shape.c4_layers else 0


def tier_shape(shape: CacheShape, settings: Settings, tokens: int, requests: int) -> TierShape:
    """Sizes of the tiered cache, as the engine makes it.

    Raises: PlanError for a model without C4 layers, and as `TierShape.check`, for hot entries that are too few.
    """
    if shape.c4_layers == 0:
        raise PlanError("This model has no C4 layer, so there is nothing to page: plan with the tier off.")
    entries = tokens // 4 + C4_ENTRIES_PER_PAGE

    def of(slots: int) -> TierShape:
        return TierShape(
            layers=shape.c4_layers,
            entries=entries,
            slots=slots,
            unit=settings.fetch_unit,
            layout=main_layout(C4_ENTRIES_PER_PAGE, settings.storage),
            top_k=shape.top_k,
            max_requests=requests,
            chunk_tokens=settings.chunk_tokens,
        )

    bound = of(0).bound
    # More slots than there are entries would never be filled.
    default = min(2 * bound, max(entries, bound))
    found = of(default if settings.hot_entries is None else settings.hot_entries)
    try:
        found.check()
    except TierError as error:
        raise PlanError(str(error)) from error
    return found


def resume_point_bytes(shape: CacheShape, settings: Settings) -> int:
    """One resume point: the last 128 SWA rows of each layer, and the states of four tokens in each C4 layer."""
    rows = shape.layers * WINDOW * main_layout(PAGE, settings.storage).row_bytes
    state = OVERLAP_TOKENS * 2 * 2 * (HEAD_DIM + INDEX_HEAD_DIM) * settings.state_bytes
    return rows + shape.c4_layers * state


def resume_bytes(shape: CacheShape, settings: Settings) -> int:
    """All resume points: as many as fit in what is given for them."""
    point = resume_point_bytes(shape, settings)
    return settings.resume_memory // point * point


def objects(shape: CacheShape, settings: Settings, sizes: Sizes) -> list[ObjectBytes]:
    """Every object with its bytes. Raises: PlanError as `tier_shape`."""
    tokens, window, requests = sizes
    storage, state = settings.storage, settings.state_bytes
    found = [
        ObjectBytes("window KV", "device", window_bytes(shape, window, storage)),
        ObjectBytes("C128 KV", "device", c128_bytes(shape, tokens, storage)),
        ObjectBytes("C4 index keys", "device", index_bytes(shape, tokens, settings.index_dtype, storage)),
    ]
    if settings.tier:
        tier = tier_shape(shape, settings, tokens, requests)
        found += [
            ObjectBytes("C4 KV, hot", "device", tier.hot_bytes),
            ObjectBytes("C4 KV, tables", "device", tier.table_bytes),
            ObjectBytes("C4 KV, all", "host", tier.host_bytes),
        ]
        if settings.cuda:
            found.append(ObjectBytes("C4 KV, scratch", "device", tier.scratch_bytes))
        if settings.checks:
            shadow = tier.layers * tier.entries * (tier.layout.row_bytes + 1)
            found.append(ObjectBytes("C4 KV, shadow", "device", shadow))
    else:
        found.append(ObjectBytes("C4 KV", "device", c4_bytes(shape, tokens, storage)))
    return [
        *found,
        ObjectBytes("resume points", "host", resume_bytes(shape, settings)),
        ObjectBytes("C4 compressor state", "device", c4_state_bytes(shape, window, state)),
        ObjectBytes("C128 compressor state", "device", c128_state_bytes(shape, requests, state)),
        ObjectBytes("request table", "device", request_table_bytes(requests, settings.context_tokens)),
        ObjectBytes("location tables", "device", location_table_bytes(tokens, window)),
        ObjectBytes("prefill staging", "device", staging_bytes(shape, settings), staging=True),
    ]


def total(found: list[ObjectBytes], where: Where) -> int:
    """Bytes on the device, staging included, or on the host."""
    return sum(item.bytes for item in found if item.where == where)


def payload_bytes(shape: CacheShape, tokens: int, dtype: IndexDtype = "fp4") -> float:
    """What one request of `tokens` tokens has in its caches: rows alone, no page padding, states or tables.

    The published figure of a model: at 2**20 tokens and MXFP4 keys, Flash 3.435 GiB and Pro 4.918 GiB.
    """
    row, key = main_layout(1).row_bytes, index_layout(dtype).row_bytes
    entry = shape.c4_layers * (row + key) / 4 + shape.c128_layers * row / 128
    return tokens * entry + shape.layers * min(tokens, WINDOW) * row


def _pages(tokens: int) -> int:
    return tokens // PAGE + 1


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
