"""Norm and rope against complex arithmetic in float64, and against the signatures that they replace in SGLang."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from sglang_dsv4x.jit_kernels import norm_rope as ops

EPS = 1e-6


def _frequencies(base: float, yarn: bool) -> list[float]:
    """DeepSeek-V4: base 160000 with YaRN 16x from 65536 in compressed layers, base 10000 without in the others."""
    plain = [base ** (-2 * i / 64) for i in range(32)]
    if not yarn:
        return plain
    turn = lambda rotations: 64 * math.log(65536 / (rotations * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
    low, high = math.floor(turn(32)), math.ceil(turn(1))
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(32)]
    return [f / 16 * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def _table(base: float = 160000.0, yarn: bool = True, length: int = 3000) -> torch.Tensor:
    angle = torch.outer(
        torch.arange(length).double(), torch.tensor(_frequencies(base, yarn), dtype=torch.float64)
    )
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def _naive(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
    turn = table.to(torch.complex128)[positions.long()]
    turn = (turn.conj() if inverse else turn).view(-1, *(1,) * (x.dim() - 2), 32)
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize(("base", "yarn"), [(160000.0, True), (10000.0, False)])
def test_table_by_formula_equals_sglangs(base, yarn) -> None:
    from sglang.kernels.ops.attention.deepseek_v4_rope import precompute_freqs_cis

    theirs = precompute_freqs_cis(64, 3000, 65536 if yarn else 0, base, 16, 32, 1)
    torch.testing.assert_close(theirs, _table(base, yarn), rtol=0, atol=4e-4)


@pytest.mark.parametrize("shape", [(7, 64), (7, 3, 64), (7, 2, 3, 64)])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("yarn", [False, True])
def test_rope_turns_interleaved_pairs(shape, inverse, yarn) -> None:
    x, table = torch.randn(shape), _table(yarn=yarn)
    positions = torch.randint(0, 3000, (7,), dtype=torch.int32)
    got = ops.rope(x, table, positions, inverse)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), _naive(x, table, positions, inverse), rtol=0, atol=1e-6)


def test_rope_takes_an_expanded_table_row_for_every_dtype() -> None:
    x, table = torch.randn(4, 2, 64).bfloat16(), _table()
    positions = torch.tensor([0, 1, 2999, 5])
    assert torch.equal(ops.rope(x, table, positions), ops.rope(x.float(), table, positions))
    assert torch.equal(ops.rope(x, table, positions)[0], x[0].float())


def test_inverse_rotation_undoes_rotation() -> None:
    x, table, positions = torch.randn(5, 64), _table(), torch.randint(0, 3000, (5,))
    torch.testing.assert_close(ops.rope(ops.rope(x, table, positions), table, positions, True), x)


def _normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    y = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return y if weight is None else y * weight.double()


def _rotated(
    y: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    y = y.to(dtype)
    return torch.cat([y[..., :448].double(), _naive(y[..., 448:], table, positions)], -1)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
def test_query_is_normed_per_head_without_weight_then_roped(dtype, rtol) -> None:
    q, table, positions = (torch.randn(6, 3, 512) * 4).to(dtype), _table(), torch.randint(0, 3000, (6,))
    out, before = torch.empty_like(q), q.clone()
    ops.q_norm_rope(q, out, EPS, table, positions)
    want = _rotated(_normed(q, None), table, positions, dtype)
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    assert torch.equal(q, before)
    ops.q_norm_rope(q, q, EPS, table, positions)
    assert torch.equal(q, out)


def test_query_output_may_be_a_slice_of_a_padded_tensor() -> None:
    q, table, positions = torch.randn(6, 3, 512), _table(), torch.arange(6)
    padded, plain = torch.zeros(6, 8, 512), torch.empty_like(q)
    ops.q_norm_rope(q, padded[:, :3], EPS, table, positions)
    ops.q_norm_rope(q, plain, EPS, table, positions)
    assert torch.equal(padded[:, :3], plain) and (padded[:, 3:] == 0).all()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
def test_kv_is_normed_with_weight_then_roped_in_place(dtype, rtol) -> None:
    kv, weight = (torch.randn(6, 512) * 4).to(dtype), torch.randn(512).to(dtype)
    table, positions = _table(), torch.randint(0, 3000, (6,))
    want = _rotated(_normed(kv, weight), table, positions, dtype)
    ops.norm_rope_inplace(kv, weight, EPS, table, positions)
    torch.testing.assert_close(kv.double(), want, rtol=rtol, atol=rtol)


def test_rope_inplace_turns_only_the_view_it_is_given() -> None:
    o, k, table, positions = (
        torch.randn(5, 3, 512),
        torch.randn(5, 1, 64),
        _table(),
        torch.randint(0, 3000, (5,)),
    )
    before, k_before = o.clone(), k.clone()
    ops.rope_inplace(o[..., -64:], k, table, positions=positions, inverse=True)
    assert torch.equal(o[..., :448], before[..., :448])
    assert torch.equal(o[..., 448:], ops.rope(before[..., 448:], table, positions, True))
    assert torch.equal(k, ops.rope(k_before, table, positions, True))
    ops.rope_inplace(o[..., -64:], None, table, positions)
    torch.testing.assert_close(o, before)


def test_no_tokens() -> None:
    q, kv, none, table = (
        torch.empty(0, 3, 512),
        torch.empty(0, 512),
        torch.empty(0, dtype=torch.int64),
        _table(),
    )
    ops.q_norm_rope(q, torch.empty_like(q), EPS, table, none)
    ops.norm_rope_inplace(kv, torch.ones(512), EPS, table, none)
    ops.rope_inplace(q[..., -64:], None, table, none)
    assert ops.rope(q[..., -64:], table, none).shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("q_norm_rope", "fused_q_norm_rope"),
        ("norm_rope_inplace", "fused_norm_rope_inplace"),
        ("rope_inplace", "fused_rope_inplace"),
    ],
)
def test_signatures_are_those_they_replace(ours, theirs) -> None:
    import sglang.kernels.ops.attention.dsv4 as dsv4

    ours_, theirs_ = (
        inspect.signature(f).parameters.values() for f in (getattr(ops, ours), getattr(dsv4, theirs))
    )
    assert [(p.name, p.default) for p in ours_] == [(p.name, p.default) for p in theirs_]
