"""What a forward step's layers share: which rows each query reads, as rows of one workspace.

Window and C128 rows are the same in every layer, so their indices are worked out once a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DSV4AttnMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class RowList(NamedTuple):
    """Rows of a paged cache and, per query, which of them it reads."""

    locations: torch.Tensor  # i64 [N], all different
    indices: torch.Tensor  # i32 [T, K], into `locations`; -1 is none


class Step(NamedTuple):
    """The queries of one forward step, ragged by request."""

    is_decode: bool
    page_table: torch.Tensor  # i32 [B, pages], full pages of every request
    query_request: torch.Tensor  # i64 [T], row of `page_table`
    entry_lens: torch.Tensor  # i32 [T], C4 entries that the query sees
    window: RowList  # SWA locations


def list_rows(locations: torch.Tensor) -> RowList:
    """The distinct locations of int [T, K] (-1 is none) and every query's indices into them."""
    wanted = locations >= 0
    distinct, inverse = torch.unique(locations[wanted].long(), return_inverse=True)
    indices = torch.full(locations.shape, -1, dtype=torch.int32, device=locations.device)
    indices[wanted] = inverse.to(torch.int32)
    return RowList(distinct, indices)


def describe_step(core: DSV4AttnMetadata, forward_batch: ForwardBatch) -> Step:
    """The step's shared indices, from SGLang's metadata of the batch."""
    is_decode = forward_batch.forward_mode.is_decode_or_idle()
    queries = core.seq_lens_casual.shape[0]
    device = core.seq_lens_casual.device
    if is_decode:
        first = query_request = torch.arange(queries, device=device)
    else:
        extend = forward_batch.extend_seq_lens.to(device=device, dtype=torch.int64)
        first = extend.cumsum(0) - extend
        query_request = torch.repeat_interleave(extend)
        if queries > query_request.shape[0]:
            # Padding tokens see one token of location 0; they follow the last request.
            pad = query_request[-1:].expand(queries - query_request.shape[0])
            query_request = torch.cat([query_request, pad])
    column = torch.arange(core.swa_page_indices.shape[1], device=device)
    in_window = column < core.swa_topk_lengths.unsqueeze(1)
    return Step(
        is_decode=is_decode,
        page_table=core.page_table[first],
        query_request=query_request,
        entry_lens=core.c4_topk_lengths_raw,
        window=list_rows(torch.where(in_window, core.swa_page_indices, -1)),
    )


def recently_used(
    core: DSV4AttnMetadata, forward_batch: ForwardBatch, step: Step, top_k: int
) -> torch.Tensor | None:
    """bool [T]: does the entry that the token completes belong to its request's last `top_k` entries?

    A long prefill enters its older entries at the least-recently-used end, so that it does not wipe the hot set.
    None in decode: all of them do.
    """
    if step.is_decode:
        return None
    total = (forward_batch.seq_lens // 4).to(core.c4_topk_lengths_raw.dtype)
    return core.c4_topk_lengths_raw > total[step.query_request] - top_k
