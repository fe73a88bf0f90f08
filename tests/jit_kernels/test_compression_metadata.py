"""Compression metadata against a loop, and against SGLang's own kernel in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from sglang_dsv4x.jit_kernels.metadata import compression_metadata

_UPSTREAM = """
import json, sys, torch
from sglang.kernels.ops.attention.dsv4.metadata_kernel import _init_compressed_attn_metadata_triton as kernel
case = json.load(sys.stdin)
args = [torch.tensor(case[n], dtype=getattr(torch, t)) for n, t in case["types"].items()]
out = kernel(*args, page_size=case["page_size"])
print("RESULT" + json.dumps([[str(o.dtype), o.tolist()] for o in out]))
"""


def _case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    seq_lens = torch.tensor([1, 3, 4, 5, 127, 128, 129, 255, 256, 511, 512, 513, 768], dtype=torch.int32)
    table = torch.randint(0, 1000, (len(seq_lens), 3), dtype=torch.int32)
    positions = seq_lens - 1
    out_loc = table.gather(1, (positions // 256)[:, None].long())[:, 0].long() * 256 + positions % 256
    return seq_lens, positions, out_loc, table


def test_equals_sglangs_kernel() -> None:
    seq_lens, positions, out_loc, table = _case()
    case = {
        "seq_lens": seq_lens.tolist(),
        "positions": positions.tolist(),
        "out_loc": out_loc.tolist(),
        "table": table.tolist(),
        "types": {"seq_lens": "int32", "positions": "int32", "out_loc": "int64", "table": "int32"},
        "page_size": 256,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _UPSTREAM],
        input=json.dumps(case),
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.split("RESULT")[1])
    ours = compression_metadata(seq_lens, positions, out_loc, table, 256)
    assert len(ours) == len(theirs) == 9
    for name, mine, (dtype, values) in zip(ours._fields, ours, theirs, strict=True):
        assert str(mine.dtype) == dtype, name
        assert mine.tolist() == values, name


def test_entry_of_the_completing_token_and_counts() -> None:
    seq_lens, positions, out_loc, table = _case()
    got = compression_metadata(seq_lens, positions, out_loc, table, 256)
    for i, (n, p, loc) in enumerate(
        zip(seq_lens.tolist(), positions.tolist(), out_loc.tolist(), strict=True)
    ):
        assert got.c4_out_loc[i] == (loc // 4 if n % 4 == 0 else 0)
        assert got.c128_out_loc[i] == (loc // 128 if n % 128 == 0 else 0)
        assert (got.c4_positions[i], got.c128_positions[i]) == (p - p % 4, p - p % 128)
        assert (got.c4_seq_lens_raw[i], got.c128_seq_lens_raw[i]) == (n // 4, n // 128)
        assert (got.c4_seq_lens_clamp1[i], got.c128_seq_lens_clamp1[i]) == (max(n // 4, 1), max(n // 128, 1))
        entries = [int(table[i, j // 2]) * 2 + j % 2 for j in range(n // 128)]
        assert got.c128_page_indices is not None
        assert got.c128_page_indices[i].tolist() == entries + [-1] * (6 - len(entries))


def test_page_indices_are_left_out_on_request() -> None:
    seq_lens, positions, out_loc, _ = _case()
    assert compression_metadata(seq_lens, positions, out_loc, compute_page_indices=False)[8] is None
    with pytest.raises(ValueError, match="page table"):
        compression_metadata(seq_lens, positions, out_loc)
    with pytest.raises(ValueError, match="not 64"):
        compression_metadata(seq_lens, positions, out_loc, torch.zeros(13, 1), 64)
