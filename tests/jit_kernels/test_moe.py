"""Clamped SwiGLU and hash routing against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from sglang_dsv4x.jit_kernels.moe import hash_top_k, silu_and_mul_clamp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_is_clamped_from_above_and_up_on_both_sides(dtype) -> None:
    x = torch.tensor([[20.0, -20.0, 3.0, 1.0, 20.0, -20.0, 10.0, 0.5]]).to(dtype)
    out = torch.empty(1, 4, dtype=dtype)
    silu_and_mul_clamp(x, out, 10.0)
    silu = lambda v: v / (1 + math.exp(-v))  # noqa: E731
    want = torch.tensor([[silu(10.0) * 10, silu(-20.0) * -10, silu(3.0) * 10, silu(1.0) * 0.5]])
    torch.testing.assert_close(out, want.to(dtype))


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_token_id_names_the_experts_and_the_router_weighs_them(scoring) -> None:
    logits, table = torch.randn(6, 16), torch.stack([torch.randperm(16)[:3] for _ in range(50)]).int()
    ids = torch.randint(0, 50, (6,))
    weights, experts = hash_top_k(logits, ids, table, scoring)
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32
    for t in range(6):
        assert experts[t].tolist() == table[ids[t]].tolist()
        score = {
            "sqrtsoftplus": lambda v: math.sqrt(math.log1p(math.exp(v))),
            "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
            "softmax": lambda v, t=t: math.exp(v) / logits[t].exp().sum().item(),
        }[scoring]
        raw = [score(logits[t, e].item()) for e in experts[t].tolist()]
        total = 1.0 if scoring == "softmax" else sum(raw)
        torch.testing.assert_close(weights[t], torch.tensor([r / total for r in raw]))


def test_unknown_scoring_function_is_refused() -> None:
    with pytest.raises(ValueError, match="sqrtsoftplus, sigmoid or softmax"):
        hash_top_k(torch.zeros(1, 4), torch.zeros(1), torch.zeros(1, 1), "relu")
