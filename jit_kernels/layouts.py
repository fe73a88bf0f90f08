"""Byte layouts of the paged caches: where the bytes of one entry lie inside a page.

A page holds `entries` entries: first all values, then all scales, then padding up to `alignment`. An entry is
therefore two pieces; its *row* is the two pieces put together, values first. Rows are what the host store holds.

Sources: sglang 0.5.17 `srt/mem_cache/deepseek_v4_memory_pool.py` (DeepSeekV4SingleKVPool.create_buffer,
DeepSeekV4IndexerPool) and FlashMLA's MODEL1_FP8Sparse format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
INDEX_HEAD_DIM = 128
C4_ENTRIES_PER_PAGE = 64

Storage = Literal["released", "float32"]
IndexDtype = Literal["fp4", "fp8"]


@dataclass(frozen=True)
class PageLayout:
    """Bytes of one page: `entries` values, then `entries` scales, padded to a multiple of `alignment`."""

    entries: int
    value_bytes: int
    scale_bytes: int
    alignment: int = 1

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        used = self.entries * self.row_bytes
        return -(-used // self.alignment) * self.alignment


def main_layout(entries: int, storage: Storage = "released") -> PageLayout:
    """SWA, C4 and C128 rows: 448 e4m3 + 64 bf16, then 7 ue8m0 bytes and a pad byte (584 B).

    `float32` is the debug storage: 512 fp32 values and no scales.
    """
    if storage == "float32":
        return PageLayout(entries, HEAD_DIM * 4, 0)
    return PageLayout(entries, NOPE_DIM + 2 * ROPE_DIM, 8, alignment=576)


def index_layout(dtype: IndexDtype, storage: Storage = "released") -> PageLayout:
    """C4 index keys, 64 to a page: MXFP4 64 + 4 B, FP8 128 + 4 B, or 512 B of fp32 in the debug storage."""
    if storage == "float32":
        return PageLayout(C4_ENTRIES_PER_PAGE, INDEX_HEAD_DIM * 4, 0)
    if dtype == "fp4":
        return PageLayout(C4_ENTRIES_PER_PAGE, INDEX_HEAD_DIM // 2, 4)
    return PageLayout(C4_ENTRIES_PER_PAGE, INDEX_HEAD_DIM, 4)
