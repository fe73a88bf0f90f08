"""Triton's index quantisers against the torch backend, bit for bit: natively on a GPU, interpreted without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def _rows(count: int) -> torch.Tensor:
    from test_index_rows import _cases

    rows = torch.cat([_cases(), torch.randn(count, 128), torch.randn(3, 128)])
    rows[-1, 5], rows[-2, 100], rows[-3, 64] = float("inf"), float("nan"), -float("inf")
    return rows


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, where NaN equals NaN."""
    a, b = a.cpu(), b.cpu()
    if a.is_floating_point():
        assert torch.equal(a.isnan(), b.isnan())
        a, b = (x.float().nan_to_num(1e30) for x in (a, b))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare(device: torch.device) -> None:
    """Every op on edges, ties, subnormals, infinities and NaN."""
    from sglang_dsv4x.jit_kernels import index_rows, index_rows_triton

    rows = _rows(37)
    weights = torch.randn(len(rows), 1)
    x, w = rows.to(device), weights.to(device)
    finite = len(rows) - 3
    assert _same(index_rows_triton.hadamard(x[:finite]), index_rows.hadamard(rows[:finite]))
    assert _same(
        index_rows_triton.pack_index_rows(x, "fp4", "released"),
        index_rows.pack_index_rows(rows, "fp4", "released"),
    )
    assert _same(
        index_rows_triton.quantise_index_query(x[:, None], "fp4", "released"),
        index_rows.quantise_index_query(rows[:, None], "fp4", "released"),
    )
    ours = index_rows_triton.fold_index_query(x[:, None], w, "fp4")
    theirs = index_rows.fold_index_query(rows[:, None], weights, "fp4")
    assert all(_same(a, b) for a, b in zip(ours, theirs, strict=True))
    for empty in (rows[:0], rows[:0, None]):
        assert index_rows_triton.hadamard(empty.to(device)).shape == empty.shape
    assert index_rows_triton.pack_index_rows(x[:0], "fp4", "released").shape == (0, 68)


@pytest.mark.gpu
def test_bits_on_the_device() -> None:
    compare(torch.device("cuda"))


def test_bits_in_the_interpreter() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    here = Path(__file__).parent
    code = f"import sys, torch; sys.path.insert(0, {str(here)!r}); torch.manual_seed(0)\n"
    code += "from test_index_rows_triton import compare; compare(torch.device('cpu'))"
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
