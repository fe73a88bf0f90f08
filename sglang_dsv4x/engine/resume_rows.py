"""What of a page a resume point holds: views of SGLang's buffers for `ResumePoints`."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

from ..jit_kernels.layouts import PageLayout

OVERLAP_TOKENS = 4
"""A C4 entry is made of its own four tokens and the four before (deepseek_v4 `overlap`): those are lost with a page."""


def point_pieces(pool: DeepSeekV4TokenToKVPool, window: int) -> list[torch.Tensor]:
    """u8 [SWA pages, bytes] views: each layer's last `window` rows of a page, and of each C4 layer's two compressors
    (main, indexer) the state of the page's last four tokens."""
    layout: PageLayout = pool.swa_kv_pool.layout
    pieces = []
    for pages in pool.swa_kv_pool.kv_buffer:
        pieces += _rows(pages, layout, layout.entries - window, layout.entries)
    for layer, ratio in enumerate(pool.compression_ratios):
        if ratio != 4:
            continue
        for states in (pool.compress_state_pools[layer], pool.indexer_compress_state_pools[layer]):
            assert states is not None
            pieces.append(_state_tail(states.kv_score_buffer.kv_score, states.ring_size))
    return pieces


def undefined_pieces(pool: DeepSeekV4TokenToKVPool, window: int) -> list[torch.Tensor]:
    """The same views of the rows that `point_pieces` leaves out: undefined in a restored page, and never read."""
    layout: PageLayout = pool.swa_kv_pool.layout
    return [
        piece
        for pages in pool.swa_kv_pool.kv_buffer
        for piece in _rows(pages, layout, 0, layout.entries - window)
    ]


def _rows(pages: torch.Tensor, layout: PageLayout, first: int, end: int) -> list[torch.Tensor]:
    """Values and scales of rows [first, end) of every page."""
    scales = layout.entries * layout.value_bytes
    found = [pages[:, first * layout.value_bytes : end * layout.value_bytes]]
    if layout.scale_bytes:
        found.append(pages[:, scales + first * layout.scale_bytes : scales + end * layout.scale_bytes])
    return found


def _state_tail(state: torch.Tensor, ring: int) -> torch.Tensor:
    """u8 [pages, bytes] of the last four rows of every page's ring. state [rows, width]: page p's ring is rows
    [p * ring, (p + 1) * ring); rows after the last whole ring are SGLang's dummies."""
    pages = state.shape[0] // ring
    rings = state[: pages * ring].view(pages, ring * state.shape[1]).view(torch.uint8)
    row_bytes = state.shape[1] * state.element_size()
    return rings[:, (ring - OVERLAP_TOKENS) * row_bytes :]
