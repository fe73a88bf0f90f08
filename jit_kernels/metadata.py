"""Where a step's compressed entries go and how many each query sees.

Source: sglang 0.5.17 `kernels/ops/attention/dsv4/metadata_kernel.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .registry import register


class CompressionMetadata(NamedTuple):
    """Per query; in the order of SGLang's `_init_compressed_attn_metadata_triton`."""

    c4_out_loc: torch.Tensor  # i64, entry that the token completes, else 0
    c4_positions: torch.Tensor  # i32, first position of the token's C4 block
    c4_seq_lens_raw: torch.Tensor  # i32, C4 entries seen
    c4_seq_lens_clamp1: torch.Tensor  # i32, at least 1
    c128_out_loc: torch.Tensor  # i64
    c128_positions: torch.Tensor  # i32
    c128_seq_lens_raw: torch.Tensor  # i32
    c128_seq_lens_clamp1: torch.Tensor  # i32
    c128_page_indices: (
        torch.Tensor | None
    )  # i32 [bs, pages * page_size / 128], entry locations, -1 beyond the length


@register("compression_metadata", "torch")
def compression_metadata(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    raw_out_loc: torch.Tensor,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
    compute_page_indices: bool = True,
) -> CompressionMetadata:
    """The C4 and C128 metadata of every query.

    Args:
        seq_lens: int [bs], tokens up to and including the query's.
        positions: int [bs].
        raw_out_loc: int [bs], full location of the query's token.
        page_table: int [bs, pages], full pages of the query's request; only read for the page indices.
        page_size: tokens of a full page, a multiple of 128.
        compute_page_indices: False leaves c128_page_indices None.
    Raises: ValueError if page indices are wanted without a page table or with another page size.
    """
    seq_lens, positions = seq_lens.to(torch.int32), positions.to(torch.int32)
    raw_out_loc = raw_out_loc.to(torch.int64)

    def of_ratio(ratio: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        out_loc = torch.where(seq_lens % ratio == 0, raw_out_loc // ratio, 0)
        count = seq_lens // ratio
        return out_loc, positions & -ratio, count, count.clamp_min(1)

    c128 = of_ratio(128)
    indices = None
    if compute_page_indices:
        if page_table is None or page_size < 128 or page_size % 128:
            raise ValueError(
                f"page indices need a page table and pages of a multiple of 128, not {page_size}"
            )
        per_page = page_size // 128
        entry = torch.arange(per_page, device=seq_lens.device, dtype=torch.int32)
        indices = (page_table.to(torch.int32).unsqueeze(-1) * per_page + entry).flatten(1)
        number = torch.arange(indices.shape[1], device=seq_lens.device, dtype=torch.int32)
        indices.masked_fill_(number >= c128[2].unsqueeze(1), -1)
    return CompressionMetadata(*of_ratio(4), *c128, indices)
