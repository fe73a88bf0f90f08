"""Sparse attention against a dense softmax with the sink in the denominator, in float64."""

from __future__ import annotations

import pytest
import torch
from sglang_dsv4x.jit_kernels import attention
from sglang_dsv4x.jit_kernels.attention import sparse_attention

SCALE = 512**-0.5


def _case(queries: int, wanted: int, rows: int, dtype=torch.float32, missing: float = 0.3):
    q = torch.randn(queries, 4, 512).to(dtype)
    kv = torch.randn(rows, 512).to(dtype)
    indices = torch.stack([torch.randperm(rows)[:wanted] for _ in range(queries)]).int()
    indices[torch.rand(queries, wanted) < missing] = -1
    return q, kv, indices, torch.randn(4)


def _dense(q, kv, indices, sink) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t, row in enumerate(indices.tolist()):
        named = [j for j in row if j >= 0]
        if not named:
            continue
        keys = kv[named].double()
        scores = q[t].double() @ keys.T * SCALE
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.double().exp()[:, None])
        out[t] = weights @ keys
    return out


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.97])
@pytest.mark.parametrize("rows", [40, 3000], ids=["small workspace", "more rows than are read"])
def test_equals_dense_softmax_with_sink(missing, rows) -> None:
    q, kv, indices, sink = _case(37, 33, rows, missing=missing)
    got = sparse_attention(q, kv, indices, sink, SCALE)
    torch.testing.assert_close(got.double(), _dense(q, kv, indices, sink), rtol=1e-4, atol=1e-5)


def test_bf16_tensors_are_computed_in_fp32() -> None:
    q, kv, indices, sink = _case(9, 33, 60, torch.bfloat16)
    got = sparse_attention(q, kv, indices, sink, SCALE)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, sparse_attention(q.float(), kv.float(), indices, sink, SCALE).bfloat16())


def test_query_without_rows_gives_zeros() -> None:
    q, kv, indices, sink = _case(5, 8, 20)
    indices[2] = -1
    got = sparse_attention(q, kv, indices, sink, SCALE)
    assert (got[2] == 0).all() and (got[1] != 0).any()
    assert (sparse_attention(q, kv[:0], torch.full_like(indices, -1), sink, SCALE) == 0).all()


@pytest.mark.parametrize("rows", [40, 3000], ids=["small workspace", "more rows than are read"])
def test_rows_that_no_index_names_may_be_nan(rows) -> None:
    q, kv, indices, sink = _case(11, 13, rows)
    clean = sparse_attention(q, kv, indices, sink, SCALE)
    unread = torch.ones(rows, dtype=torch.bool)
    unread[indices[indices >= 0].long()] = False
    assert unread.any()
    kv[unread] = float("nan")
    assert torch.equal(sparse_attention(q, kv, indices, sink, SCALE), clean)


def test_a_nan_row_that_is_named_shows_in_that_query_only() -> None:
    q, kv, indices, sink = _case(6, 5, 30, missing=0)
    indices[indices == 7] = 8
    indices[3, 2] = 7
    kv[7] = float("nan")
    bad = sparse_attention(q, kv, indices, sink, SCALE).isnan().flatten(1)
    assert bad[3].all() and bad.any(1).sum() == 1


def test_bits_do_not_depend_on_where_rows_lie() -> None:
    q, kv, indices, sink = _case(70, 193, 400, torch.bfloat16, missing=0.1)
    want = sparse_attention(q, kv, indices, sink, SCALE)
    for size in (400, 1000, 20000):
        place = torch.randperm(size)[:400]
        moved = torch.full((size, 512), float("nan"), dtype=kv.dtype)
        moved[place] = kv
        where = torch.where(indices < 0, -1, place[indices.long().clamp_min(0)].int())
        assert torch.equal(sparse_attention(q, moved, where, sink, SCALE), want)
    gathered = kv[indices.clamp_min(0).flatten().long()]
    where = torch.where(indices < 0, -1, torch.arange(indices.numel(), dtype=torch.int32).view_as(indices))
    assert torch.equal(sparse_attention(q, gathered, where, sink, SCALE), want)


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    q, kv, indices, sink = _case(4, 20, 30, missing=0)
    got = sparse_attention(q * 1000, kv, indices, sink, SCALE)
    best = ((q * 1000) @ kv[indices.long()].transpose(1, 2)).argmax(-1)
    want = kv[indices.long()].gather(1, best[..., None].expand(-1, -1, 512))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sink_takes_weight_and_gives_none() -> None:
    q, kv, indices, _ = _case(3, 8, 20, missing=0)
    none = sparse_attention(q, kv, indices, torch.full((4,), float("-inf")), SCALE)
    weights = (q @ kv[indices.long()].transpose(1, 2) * SCALE).softmax(-1)
    torch.testing.assert_close(none, weights @ kv[indices.long()], rtol=1e-4, atol=1e-5)
    drowned = sparse_attention(q, kv, indices, torch.full((4,), 100.0), SCALE)
    assert drowned.abs().max() < 1e-30


def test_blocks_cover_every_query(monkeypatch) -> None:
    q, kv, indices, sink = _case(23, 9, 30)
    whole = sparse_attention(q, kv, indices, sink, SCALE)
    monkeypatch.setattr(attention, "_BLOCK_BYTES", 1)
    torch.testing.assert_close(sparse_attention(q, kv, indices, sink, SCALE), whole, rtol=1e-5, atol=1e-6)


def test_no_queries() -> None:
    q, kv, indices, sink = _case(3, 9, 30)
    assert sparse_attention(q[:0], kv, indices[:0], sink, SCALE).shape == (0, 4, 512)
