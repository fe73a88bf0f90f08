"""Main KV rows against a byte-by-byte reading of the layout, and against SGLang's own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byte_readers import bf16, e4m3, nearest_code, power_of_two_scale, ue8m0
from sglang_dsv4x.jit_kernels.kv_rows import pack_kv_rows, unpack_kv_rows
from sglang_dsv4x.jit_kernels.layouts import main_layout
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows, scatter_rows

# amax of the first group of each row: around 448 * 2^k, where a rounded log2 would pick the wrong power.
_EDGES = [448.0 * 2.0**k for k in (-30, -9, -8, 0, 1, 7, 60)]
_STEPPED = [np.nextafter(np.float32(e), np.float32(d)) for e in _EDGES for d in (0, np.inf)]
# Halfway between neighbours when the scale is 1: normal, subnormal (step 2^-9), and below the smallest.
_TIES = [17.0, 19.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, 432.0, 416.0]


def _cases() -> torch.Tensor:
    rows = torch.randn(len(_EDGES) + len(_STEPPED) + 8, 512)
    for i, edge in enumerate([*_EDGES, *_STEPPED]):
        rows[i] = 0.0
        rows[i, :64] = torch.linspace(-1, 1, 64) * float(edge) * 0.9
        rows[i, 5] = float(edge)
    rest = rows[len(_EDGES) + len(_STEPPED) :]
    rest[0] = 0.0
    rest[1] = -0.0
    rest[2, :64] = 0.0
    rest[2, : len(_TIES)] = torch.tensor(_TIES)
    rest[2, 20 : 20 + len(_TIES)] = -torch.tensor(_TIES)
    rest[2, 63] = 448.0
    rest[3] *= 1e-30
    rest[4] *= 1e30
    rest[5] *= torch.logspace(-8, 8, 512)
    rest[6, 64:128] = 1e-4
    rest[7] = 2.0 ** torch.arange(512).remainder(40).sub(20)
    return rows


def _read_row(row: bytes) -> list[float]:
    values = [e4m3(row[i]) * ue8m0(row[576 + i // 64]) for i in range(448)]
    return values + [bf16(row[448 + 2 * i], row[449 + 2 * i]) for i in range(64)]


def test_packed_bytes_equal_those_of_the_layout() -> None:
    kv = _cases()
    rows = pack_kv_rows(kv, "released")
    assert rows.shape == (len(kv), 584)
    for row, source in zip(rows.numpy(), kv.numpy(), strict=True):
        for group in range(7):
            x = source[64 * group : 64 * group + 64].astype(np.float64)
            floor = float(np.float32(1e-4))
            byte = power_of_two_scale(max(float(np.abs(x).max()), floor), 448.0)
            assert row[576 + group] == byte
            codes = nearest_code(x / 2.0 ** (byte - 127), e4m3, 127) + np.where(np.signbit(x), 128, 0)
            assert (row[64 * group : 64 * group + 64] == codes).all()
        assert row[583] == 0
        rope = torch.from_numpy(source[448:]).bfloat16().view(torch.uint8).numpy()
        assert (row[448:576] == rope).all()


def test_unpacked_values_equal_the_bytes_read_one_by_one() -> None:
    rows = torch.randint(0, 256, (40, 584), dtype=torch.uint8)
    rows[:20, 576:583] = torch.randint(100, 140, (20, 7), dtype=torch.uint8)
    rows[20, 576:583] = torch.tensor([0, 1, 2, 126, 127, 254, 255])
    got = unpack_kv_rows(rows, "released")
    assert got.dtype == torch.bfloat16
    want = torch.tensor([_read_row(bytes(r.tolist())) for r in rows]).bfloat16()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_unpacking_loses_nothing() -> None:
    rows = pack_kv_rows(_cases(), "released")
    exact = torch.tensor([_read_row(bytes(r.tolist())) for r in rows], dtype=torch.float64)
    assert torch.equal(unpack_kv_rows(rows, "released").double(), exact)


def test_values_on_the_grid_survive_packing() -> None:
    once = unpack_kv_rows(pack_kv_rows(_cases(), "released"), "released")
    assert torch.equal(unpack_kv_rows(pack_kv_rows(once, "released"), "released"), once)


@pytest.mark.parametrize("storage", ["released", "float32"])
def test_poisoned_row_is_nan_throughout(storage) -> None:
    rows = torch.full((3, main_layout(64, storage).row_bytes), 0xFF, dtype=torch.uint8)
    assert unpack_kv_rows(rows, storage).isnan().all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_unrepresentable_value_makes_its_group_nan_and_no_other(bad) -> None:
    kv = torch.randn(2, 512)
    kv[1, 70] = bad
    back = unpack_kv_rows(pack_kv_rows(kv, "released"), "released")
    assert back[1, 64:128].isnan().all()
    assert not back[0].isnan().any()
    assert not back[1, :64].isnan().any() and not back[1, 128:].isnan().any()


def test_float32_storage_keeps_every_bit() -> None:
    kv = _cases()
    rows = pack_kv_rows(kv, "float32")
    assert rows.shape == (len(kv), 2048)
    assert torch.equal(unpack_kv_rows(rows, "float32"), kv)


def test_bf16_input_packs_as_its_fp32_value() -> None:
    kv = torch.randn(5, 512).bfloat16()
    assert torch.equal(pack_kv_rows(kv, "released"), pack_kv_rows(kv.float(), "released"))


@pytest.mark.parametrize("entries", [64, 256, 2])
def test_pages_read_as_sglang_reads_them(entries) -> None:
    from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_ref

    layout = main_layout(entries)
    pages = torch.randint(0, 256, (3, layout.page_bytes), dtype=torch.uint8)
    locs = torch.randperm(3 * entries)
    scatter_rows(pages, layout, locs, pack_kv_rows(torch.randn(3 * entries, 512) * 3, "released"))
    want = dequantize_k_cache_paged_ref(pages, locs, entries).squeeze(1)
    assert torch.equal(unpack_kv_rows(gather_rows(pages, layout, locs), "released"), want)


def test_no_rows() -> None:
    rows = pack_kv_rows(torch.empty(0, 512), "released")
    assert rows.shape == (0, 584)
    assert unpack_kv_rows(rows, "released").shape == (0, 512)
