"""Scores of the lightning indexer over paged index keys, and the entries they select.

S[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]) (paper, arXiv 2606.19348, section 2.3; sglang 0.5.17
`srt/layers/attention/dsv4/indexer.py`). The head weights carry 128^-0.5 * heads^-0.5 already.
"""

from __future__ import annotations

import torch

from .index_rows import decode_index_keys
from .layouts import INDEX_HEAD_DIM, IndexDtype, PageLayout, Storage
from .registry import register

# Temporaries per block. A query block is small enough for the caches; a key block bounds what a context of a
# million tokens needs.
_QUERY_BLOCK_BYTES = 8 << 20
_KEY_BLOCK_BYTES = 32 << 20


@register("index_scores", "torch")
def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_pages: torch.Tensor,
    layout: PageLayout,
    dtype: IndexDtype,
    storage: Storage,
    page_table: torch.Tensor,
    query_request: torch.Tensor,
    lens: torch.Tensor,
    width: int | None = None,
    clean: bool = True,
) -> torch.Tensor:
    """Scores of every query against the index keys of its request.

    Where no two queries share a request (decode) all requests go through one batched product; else there is a
    loop over requests. Temporaries stay below 128 MiB; the result itself is T * max(lens) * 4 bytes.

    Args:
        q: fp32 [T, H, 128] from `quantise_index_query`, or e4m3 [T, H, 128] from `fold_index_query`.
        weights: fp32 [T, H]; with an e4m3 query, those that `fold_index_query` returned.
        index_pages: u8 [P, layout.page_bytes].
        page_table: int32 [B, pages]: page of the entries 64 i .. 64 i + 63 of each request; what lies beyond
            a request's length may hold any number.
        query_request: int64 [T], row of `page_table` for each query, non-decreasing.
        lens: int32 [T], number of entries that the query sees.
        width: columns of the result, at least max(lens). None is max(lens), which the host then waits for; a
            captured graph needs a number.
        clean: whether columns at and beyond lens[t] must be -inf. False leaves them to the backend, for a
            reader that goes by `lens`.
    Returns: fp32 [T, width], -inf at and beyond lens[t].
    """
    q = q.to(torch.float32)
    longest = width if width is not None else int(lens.max()) if lens.numel() else 0
    scores = q.new_full((q.shape[0], longest), float("-inf"), dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    pages = page_table[:, : -(-longest // layout.entries)].clamp(0, index_pages.shape[0] - 1)
    if bool((query_request[1:] > query_request[:-1]).all()):
        _score_batch(scores, q, weights, index_pages, layout, dtype, storage, pages[query_request])
    else:
        requests, counts = torch.unique_consecutive(query_request, return_counts=True)
        ends = counts.cumsum(0)
        furthest = lens.new_zeros(page_table.shape[0]).scatter_reduce_(0, query_request, lens, "amax")
        used = furthest[requests].tolist()
        for request, count, end, entries in zip(
            requests.tolist(), counts.tolist(), ends.tolist(), used, strict=True
        ):
            if entries:
                mine = slice(end - count, end)
                table = pages[request, : -(-entries // layout.entries)]
                _score_request(
                    scores[mine], q[mine], weights[mine], index_pages, layout, dtype, storage, table
                )
    outside = torch.arange(longest, device=q.device, dtype=lens.dtype) >= lens.unsqueeze(1)
    return scores.masked_fill_(outside, float("-inf"))


def _read_keys(
    index_pages: torch.Tensor, layout: PageLayout, dtype: IndexDtype, storage: Storage, pages: torch.Tensor
) -> torch.Tensor:
    """fp32 [pages * 64, 128]: the keys of whole pages, in the order of `pages` [n]."""
    raw = index_pages.index_select(0, pages)
    end = layout.entries * layout.value_bytes
    values = raw[:, :end].reshape(-1, layout.value_bytes)
    scales = raw[:, end : end + layout.entries * layout.scale_bytes].reshape(-1, layout.scale_bytes or 1)
    return decode_index_keys(values, scales, dtype, storage)


def _score_batch(
    scores: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_pages: torch.Tensor,
    layout: PageLayout,
    dtype: IndexDtype,
    storage: Storage,
    pages: torch.Tensor,
) -> None:
    """One query per row of `pages` [T, n]; writes `scores` [T, longest]."""
    queries, heads, longest = q.shape[0], q.shape[1], scores.shape[1]
    per_page = queries * layout.entries * (INDEX_HEAD_DIM + heads) * 4
    step = max(1, _KEY_BLOCK_BYTES // per_page)
    for first in range(0, pages.shape[1], step):
        block = pages[:, first : first + step]
        keys = _read_keys(index_pages, layout, dtype, storage, block.flatten()).view(
            queries, -1, INDEX_HEAD_DIM
        )
        start = first * layout.entries
        count = min(longest - start, keys.shape[1])
        dots = torch.bmm(q, keys[:, :count].transpose(1, 2)).relu_()
        scores[:, start : start + count] = torch.bmm(weights.unsqueeze(1), dots).squeeze(1)


def _score_request(
    scores: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_pages: torch.Tensor,
    layout: PageLayout,
    dtype: IndexDtype,
    storage: Storage,
    pages: torch.Tensor,
) -> None:
    """All queries of one request over its `pages` [n]; writes `scores` [t, longest]."""
    queries, heads, longest = q.shape[0], q.shape[1], scores.shape[1]
    page_step = max(1, _KEY_BLOCK_BYTES // (layout.entries * INDEX_HEAD_DIM * 4))
    for first in range(0, pages.shape[0], page_step):
        keys = _read_keys(index_pages, layout, dtype, storage, pages[first : first + page_step])
        start = first * layout.entries
        keys = keys[: longest - start]
        count = keys.shape[0]
        step = max(1, _QUERY_BLOCK_BYTES // (heads * count * 4))
        for i in range(0, queries, step):
            some = q[i : i + step]
            dots = torch.mm(some.reshape(-1, INDEX_HEAD_DIM), keys.T).relu_().view(-1, heads, count)
            sums = torch.bmm(weights[i : i + step].unsqueeze(1), dots).squeeze(1)
            scores[i : i + step, start : start + count] = sums


@register("select_top_k", "torch")
def select_top_k(scores: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """The k best entries of every query, as a set.

    Deterministic: of equal scores (0.0 and -0.0 are) the lower positions are taken. Where lens[t] <= k all
    are taken.
    A NaN score ranks highest: a faulty key shows instead of vanishing.

    Args:
        scores: fp32 [T, n], -inf at and beyond lens[t], as from `index_scores`.
        lens: int [T], number of entries that the query sees, at most n.
        k: entries to take.
    Returns: int32 [T, k], positions in rising order, then -1.
    """
    queries, n = scores.shape
    position = torch.arange(n, device=scores.device, dtype=torch.int32)
    seen = position < lens.unsqueeze(1)
    if n > k:
        ranked = scores.nan_to_num(float("inf"), float("inf"), float("-inf"))
        least = ranked.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
        above, tied = ranked > least, ranked == least
        room = k - above.sum(1, keepdim=True, dtype=torch.int32)
        above |= tied & (tied.cumsum(1, dtype=torch.int32) <= room)
        seen = torch.where(lens.unsqueeze(1) <= k, seen, above)
    # Row-major order on both sides: the positions of a query fill its columns from the left.
    columns = torch.arange(k, device=scores.device, dtype=torch.int32)
    filled = columns < seen.sum(1, keepdim=True, dtype=torch.int32)
    chosen = columns.new_full((queries, k), -1)
    return chosen.masked_scatter_(filled, seen.nonzero()[:, 1].to(torch.int32))
