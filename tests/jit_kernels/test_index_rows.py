"""Index keys and queries against a byte-by-byte reading of both formats."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from byte_readers import e2m1, e4m3, nearest_code, power_of_two_scale, ue8m0
from sglang_dsv4x.jit_kernels.index_rows import (
    fold_index_query,
    hadamard,
    pack_index_rows,
    quantise_index_query,
    unpack_index_rows,
)
from sglang_dsv4x.jit_kernels.layouts import index_layout

FORMATS = [("fp4", "released"), ("fp8", "released"), ("fp4", "float32"), ("fp8", "float32")]
_EDGES = [6.0 * 2.0**k for k in (-126, -125, -40, -1, 0, 1, 30)]


def _cases() -> torch.Tensor:
    stepped = [np.nextafter(np.float32(e), np.float32(d)) for e in _EDGES for d in (0, np.inf)]
    edges = [*_EDGES, *stepped]
    keys = torch.randn(len(edges) + 8, 128)
    for i, edge in enumerate(edges):
        keys[i] = torch.linspace(-1, 1, 128) * float(edge) * 0.9
        keys[i, 31] = float(edge)
    rest = keys[len(edges) :]
    rest[0] = 0.0
    rest[1] = -0.0
    rest[2] *= 1e-30
    rest[3] *= 1e30
    rest[4] *= torch.logspace(-12, 12, 128)
    rest[5] = torch.full((128,), 2.0**-140)
    rest[6] = torch.arange(-64, 64) / 8
    rest[7] = 2.0 ** torch.arange(128).remainder(20).sub(10)
    return keys


def test_hadamard_is_the_sylvester_matrix_in_float64() -> None:
    sign = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    matrix = torch.tensor(sign, dtype=torch.float64) / 128**0.5
    x = torch.randn(3, 5, 128)
    got = hadamard(x)
    assert got.shape == x.shape and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ matrix, rtol=0, atol=2e-6)


def test_hadamard_bits_do_not_depend_on_the_number_of_rows() -> None:
    x = torch.randn(70, 128)
    together = hadamard(x)
    assert torch.equal(torch.cat([hadamard(x[i : i + 1]) for i in range(70)]), together)
    assert torch.equal(torch.cat([hadamard(x[:13]), hadamard(x[13:])]), together)


def test_fp4_bytes_equal_those_of_the_layout() -> None:
    keys = _cases()
    rows = pack_index_rows(keys, "fp4", "released")
    assert rows.shape == (len(keys), 68)
    for row, source in zip(rows.numpy(), keys.numpy().astype(np.float64), strict=True):
        for group in range(4):
            x = source[32 * group : 32 * group + 32]
            byte = power_of_two_scale(max(float(np.abs(x).max()), 6 * 2.0**-126), 6.0)
            assert row[64 + group] == byte
            codes = nearest_code(x / 2.0 ** (byte - 127), e2m1, 8) + np.where(np.signbit(x), 8, 0)
            nibbles = row[16 * group : 16 * group + 16]
            assert (nibbles & 15 == codes[0::2]).all(), "even element in the low nibble"
            assert (nibbles >> 4 == codes[1::2]).all()


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**20])
def test_fp4_ties_go_to_the_even_code(value, rounded, sign, scale) -> None:
    key = torch.zeros(1, 128)
    key[0, 0] = 6.0 * scale
    key[0, 1] = sign * value * scale
    back = unpack_index_rows(pack_index_rows(key, "fp4", "released"), "fp4", "released")
    assert back[0, 1].item() == sign * rounded * scale
    assert quantise_index_query(key[:, None], "fp4", "released")[0, 0, 1].item() == sign * rounded * scale


def test_fp8_bytes_equal_those_of_the_layout() -> None:
    keys = _cases()
    rows = pack_index_rows(keys, "fp8", "released")
    assert rows.shape == (len(keys), 132)
    for row, source in zip(rows.numpy(), keys.numpy(), strict=True):
        scale = np.maximum(np.abs(source).max(), np.float32(1e-4)) / np.float32(448)
        assert struct.unpack("<f", row[128:].tobytes())[0] == scale
        scaled = np.clip(source * (np.float32(1) / scale), -448, 448)
        codes = nearest_code(scaled, e4m3, 127) + np.where(np.signbit(source), 128, 0)
        assert (row[:128] == codes).all()


def test_unpacked_values_equal_the_bytes_read_one_by_one() -> None:
    fp4 = torch.randint(0, 256, (20, 68), dtype=torch.uint8)
    fp4[0, 64:] = torch.tensor([0, 1, 254, 255])
    want = [
        [e2m1(r[i // 2] >> 4 * (i % 2) & 15) * ue8m0(r[64 + i // 32]) for i in range(128)]
        for r in fp4.tolist()
    ]
    got = unpack_index_rows(fp4, "fp4", "released")
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=0, equal_nan=True)

    fp8 = torch.randint(0, 256, (20, 132), dtype=torch.uint8)
    fp8[:, 128:] = torch.rand(20, 1).view(torch.uint8)
    scales = [struct.unpack("<f", bytes(r[128:]))[0] for r in fp8.tolist()]
    codes = torch.tensor([[e4m3(b) for b in r[:128]] for r in fp8.tolist()])
    got = unpack_index_rows(fp8, "fp8", "released")
    torch.testing.assert_close(got, codes * torch.tensor(scales)[:, None], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "storage"), FORMATS)
def test_query_lies_on_the_grid_of_the_keys(dtype, storage) -> None:
    keys = _cases()
    stored = unpack_index_rows(pack_index_rows(keys, dtype, storage), dtype, storage)
    query = quantise_index_query(
        keys.view(-1, 2, 128) if len(keys) % 2 == 0 else keys[:, None], dtype, storage
    )
    assert torch.equal(query.view(-1, 128), stored)


@pytest.mark.parametrize(("dtype", "storage"), FORMATS)
def test_poisoned_row_is_nan_throughout(dtype, storage) -> None:
    rows = torch.full((2, index_layout(dtype, storage).row_bytes), 0xFF, dtype=torch.uint8)
    assert unpack_index_rows(rows, dtype, storage).isnan().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
def test_unrepresentable_value_reads_back_as_nan(dtype, bad) -> None:
    keys = torch.randn(2, 128)
    keys[1, 40] = bad
    width = 32 if dtype == "fp4" else 128
    start = 32 if dtype == "fp4" else 0
    back = unpack_index_rows(pack_index_rows(keys, dtype, "released"), dtype, "released")
    if dtype == "fp4":
        assert back[1, start : start + width].isnan().all()
        assert back.isnan().sum() == width
        assert quantise_index_query(keys[None], dtype, "released")[0, 1, 32:64].isnan().all()
    else:
        assert back[1].isnan().any()
    assert not back[0].isnan().any()


@pytest.mark.parametrize(("dtype", "storage"), FORMATS)
def test_no_rows(dtype, storage) -> None:
    """Most decode steps complete no entry. FP8 packing failed there: a scale [0, 1] cannot be viewed as bytes."""
    rows = pack_index_rows(hadamard(torch.empty(0, 128)), dtype, storage)
    assert rows.shape == (0, index_layout(dtype, storage).row_bytes)
    assert unpack_index_rows(rows, dtype, storage).shape == (0, 128)
    assert quantise_index_query(torch.empty(0, 3, 128), dtype, storage).shape == (0, 3, 128)


@pytest.mark.parametrize("dtype", ["fp4", "fp8"])
def test_folded_query_gives_the_same_products(dtype) -> None:
    q = torch.randn(3, 5, 128) * torch.logspace(-6, 6, 15).view(3, 5, 1)
    weights = torch.randn(3, 5)
    folded, scaled = fold_index_query(q, weights, dtype)
    assert folded.dtype == torch.float8_e4m3fn
    want = quantise_index_query(q, dtype, "released") * weights[..., None]
    torch.testing.assert_close(folded.float() * scaled[..., None], want, rtol=1e-6, atol=0)


def test_folded_fp4_query_rounds_only_what_is_far_below_its_largest_value() -> None:
    q = torch.randn(4, 1, 4, 32) * 2.0 ** torch.tensor([[0, -14, -20, -40]]).view(1, 1, 4, 1)
    folded, scaled = fold_index_query(q.view(4, 1, 128), torch.ones(4, 1), "fp4")
    got = (folded.float() * scaled[..., None]).view(4, 4, 32)
    want = quantise_index_query(q.view(4, 1, 128), "fp4", "released").view(4, 4, 32)
    assert torch.equal(got[:, 0], want[:, 0])
    error = (got - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    assert 0 < error.max() <= 2.0**-17


def test_folded_faulty_query_is_nan() -> None:
    q = torch.randn(2, 2, 128)
    q[0, 1, 3], q[1, 0, 5] = float("nan"), float("inf")
    folded, _ = fold_index_query(q, torch.ones(2, 2), "fp4")
    assert folded.float().isnan().all(-1).tolist() == [[False, True], [True, False]]
    assert folded.float().isnan().any(-1).tolist() == [[False, True], [True, False]]
