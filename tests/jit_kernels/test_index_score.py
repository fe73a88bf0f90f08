"""Index scores against a loop over queries, heads and keys, and selected sets against sorting."""

from __future__ import annotations

import pytest
import torch
from sglang_dsv4x.jit_kernels import index_score
from sglang_dsv4x.jit_kernels.index_rows import pack_index_rows, quantise_index_query, unpack_index_rows
from sglang_dsv4x.jit_kernels.index_score import index_scores, select_top_k
from sglang_dsv4x.jit_kernels.layouts import index_layout
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows, scatter_rows

HEADS = 4
FORMATS = [("fp4", "released"), ("fp8", "released"), ("fp4", "float32")]


class _Case:
    """Requests on shuffled pages; every byte that belongs to no entry is 0xFF, so a stray read shows as NaN."""

    def __init__(self, entries: list[int], queries: list[int], dtype, storage) -> None:
        self.dtype, self.storage, self.layout = dtype, storage, index_layout(dtype, storage)
        needed = [-(-n // 64) for n in entries]
        total = sum(needed) + 3
        self.pages = torch.full((total, self.layout.page_bytes), 0xFF, dtype=torch.uint8)
        free = torch.randperm(total).tolist()
        # What lies beyond a request's pages must not matter, not even as a page number.
        self.table = torch.randint(-5, 1 << 20, (len(entries), max(needed) + 2), dtype=torch.int32)
        for request, (count, pages) in enumerate(zip(entries, needed, strict=True)):
            mine = torch.tensor([free.pop() for _ in range(pages)], dtype=torch.int64)
            self.table[request, :pages] = mine.int()
            position = torch.arange(count)
            keys = pack_index_rows(torch.randn(count, 128), dtype, storage)
            if count:
                scatter_rows(self.pages, self.layout, mine[position // 64] * 64 + position % 64, keys)
        self.request = torch.arange(len(entries)).repeat_interleave(torch.tensor(queries))
        lens = []
        for count, n in zip(entries, queries, strict=True):
            lens += [max(0, count - (n - 1 - i) // 4) for i in range(n)]
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.q = quantise_index_query(torch.randn(len(lens), HEADS, 128), dtype, storage)
        self.weights = torch.randn(len(lens), HEADS)

    def scores(self) -> torch.Tensor:
        return index_scores(
            self.q,
            self.weights,
            self.pages,
            self.layout,
            self.dtype,
            self.storage,
            self.table,
            self.request,
            self.lens,
        )

    def naive(self) -> torch.Tensor:
        out = torch.full((len(self.lens), int(self.lens.max())), float("-inf"))
        for t, (request, count) in enumerate(zip(self.request.tolist(), self.lens.tolist(), strict=True)):
            for j in range(count):
                loc = self.table[request, j // 64].long() * 64 + j % 64
                key = unpack_index_rows(
                    gather_rows(self.pages, self.layout, loc[None]), self.dtype, self.storage
                )[0]
                dots = (self.q[t].double() @ key.double()).relu()
                out[t, j] = (dots * self.weights[t].double()).sum()
        return out


SHAPES = {
    "decode": ([200, 1, 64, 65], [1, 1, 1, 1]),
    "decode of one request": ([130], [1]),
    "prefill": ([70, 129, 3], [17, 1, 9]),
    "one request": ([130], [33]),
    "request that sees nothing": ([0, 70], [2, 3]),
    "decode that sees nothing": ([0, 70], [1, 1]),
    "request without a query": ([5, 70, 9], [3, 0, 4]),
    "decode without some requests": ([5, 70, 9], [1, 0, 1]),
}


@pytest.mark.parametrize("shape", SHAPES, ids=list(SHAPES))
@pytest.mark.parametrize(("dtype", "storage"), FORMATS)
def test_scores_equal_the_plain_sum(shape, dtype, storage) -> None:
    case = _Case(*SHAPES[shape], dtype, storage)
    torch.testing.assert_close(case.scores(), case.naive(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("shape", ["decode", "prefill"])
def test_scores_in_small_blocks_are_the_same_scores(shape, monkeypatch) -> None:
    case = _Case(*SHAPES[shape], "fp4", "released")
    whole = case.scores()
    monkeypatch.setattr(index_score, "_QUERY_BLOCK_BYTES", 4 * HEADS * 64 * 4)
    monkeypatch.setattr(index_score, "_KEY_BLOCK_BYTES", 64 * 128 * 4)
    torch.testing.assert_close(case.scores(), whole, rtol=1e-6, atol=1e-5)


def test_nothing_to_score() -> None:
    case = _Case([0], [1], "fp4", "released")
    assert case.scores().shape == (1, 0)
    assert select_top_k(case.scores(), case.lens, 4).tolist() == [[-1] * 4]
    case = _Case([70, 3], [0, 0], "fp4", "released")
    assert case.scores().shape == (0, 0)
    assert select_top_k(torch.empty(0, 90), case.lens, 4).shape == (0, 4)


def test_scores_agree_with_sglangs_torch_path() -> None:
    from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch

    case = _Case([200, 3, 64], [1, 1, 1], "fp8", "released")
    case.table.clamp_(0, len(case.pages) - 1)
    rows = pack_index_rows(torch.randn(3 * HEADS, 128), "fp8", "released")
    case.q = unpack_index_rows(rows, "fp8", "released").view(3, HEADS, 128)
    q8 = rows[:, :128].contiguous().view(torch.float8_e4m3fn).view(3, 1, HEADS, 128)
    scale = rows[:, 128:].contiguous().view(torch.float32).view(3, HEADS)
    theirs = fp8_paged_mqa_logits_torch(
        q8, case.pages.view(-1, 64, 1, 132), case.weights * scale, case.lens, case.table, None, 200, False
    )
    ours = case.scores()
    seen = torch.arange(200) < case.lens[:, None]
    # Theirs multiplies in bf16.
    torch.testing.assert_close(
        ours[seen], theirs[seen].float(), rtol=0.02, atol=0.02 * ours[seen].abs().max().item()
    )


def _naive_top_k(scores: torch.Tensor, lens: list[int], k: int) -> list[list[int]]:
    chosen = []
    for row, n in zip(scores.tolist(), lens, strict=True):
        best = sorted(sorted(range(n), key=lambda j: (-row[j], j))[:k])
        chosen.append(best + [-1] * (k - len(best)))
    return chosen


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "many ties"])
@pytest.mark.parametrize("n", [1, 40, 64, 65, 500])
def test_selection_takes_the_best_in_rising_order(ties, n) -> None:
    lens = [min(n, x) for x in (0, 1, 30, 63, 64, 65, 66, 499, 500)]
    scores = torch.randn(len(lens), n)
    if ties:
        scores = scores.mul(1.5).round().mul(torch.where(torch.rand(len(lens), n) < 0.5, 1.0, -1.0))
    scores[torch.arange(n) >= torch.tensor(lens)[:, None]] = float("-inf")
    got = select_top_k(scores, torch.tensor(lens, dtype=torch.int32), 64)
    assert got.dtype == torch.int32
    assert got.tolist() == _naive_top_k(scores, lens, 64)


def test_negative_zero_ties_with_zero() -> None:
    scores = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0]])
    assert select_top_k(scores, torch.tensor([5]), 3).tolist() == [[0, 1, 2]]


def test_valid_entries_that_score_minus_infinity_still_come_before_none() -> None:
    scores = torch.full((1, 8), float("-inf"))
    assert select_top_k(scores, torch.tensor([5]), 4).tolist() == [[0, 1, 2, 3]]


def test_nan_score_is_selected_and_does_not_disturb_the_rest() -> None:
    scores = torch.tensor([[3.0, float("nan"), 1.0, 2.0, -1.0]])
    assert select_top_k(scores, torch.tensor([5]), 3).tolist() == [[0, 1, 3]]


def test_selected_set_equals_sglangs() -> None:
    from sglang.srt.layers.attention.dsv4.indexer import topk_transform_512_pytorch_vectorized

    lens = torch.tensor([3, 511, 512, 513, 1400], dtype=torch.int32)
    scores = torch.randn(5, 1400).masked_fill_(torch.arange(1400) >= lens[:, None], float("-inf"))
    raw = torch.full((5, 512), -1, dtype=torch.int32)
    table = torch.arange(5 * 22, dtype=torch.int32).view(5, 22)
    topk_transform_512_pytorch_vectorized(scores, lens, table, torch.empty_like(raw), 64, raw)
    ours = select_top_k(scores, lens, 512)
    assert [set(r) for r in ours.tolist()] == [set(r) for r in raw.tolist()]
