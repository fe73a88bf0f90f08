"""Which backend is chosen for an op, and what is said when none can be."""

from __future__ import annotations

import pytest
import torch
from sglang_dsv4x.jit_kernels import registry
from sglang_dsv4x.jit_kernels.registry import KernelError, register, select, table

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPS = {
    "pack_kv_rows",
    "unpack_kv_rows",
    "hadamard",
    "pack_index_rows",
    "unpack_index_rows",
    "quantise_index_query",
    "fold_index_query",
    "index_scores",
    "select_top_k",
    "sparse_attention",
    "rope",
    "q_norm_rope",
    "norm_rope_inplace",
    "rope_inplace",
    "plan_compression",
    "compress",
    "write_state",
    "compression_metadata",
    "hc_split_sinkhorn",
    "silu_and_mul_clamp",
    "hash_top_k",
    "claim_writes",
    "write_rows",
    "resolve",
    "resolve_rows",
    "fetch_rows",
    "finish_fetch",
}


@pytest.fixture
def one_op(monkeypatch) -> dict:
    """A registry that holds what the test registers and nothing else."""
    registered: dict = {}
    monkeypatch.setattr(registry, "_registered", registered)
    monkeypatch.setattr(registry, "_ops", lambda: sorted(registered))
    return registered


def _add(op: str, backend: str):
    def function() -> str:
        return backend

    function.__qualname__ = f"{op}_{backend}"
    return register(op, backend)(function)


def test_every_op_has_a_torch_backend_and_is_an_attribute() -> None:
    for requested in ("auto", "torch"):
        kernels = select(requested, CPU)
        assert set(kernels.chosen) >= OPS
        assert set(kernels.chosen.values()) == {"torch"}
        assert all(callable(getattr(kernels, op)) for op in kernels.chosen)


def test_auto_takes_the_fastest_backend_of_each_op_that_runs_on_the_device(one_op) -> None:
    for op, backends in {"a": "torch", "b": "torch triton", "c": "torch triton cuda"}.items():
        for backend in backends.split():
            _add(op, backend)
    assert select("auto", CPU).chosen == {"a": "torch", "b": "torch", "c": "torch"}
    kernels = select("auto", CUDA)
    assert kernels.chosen == {"a": "torch", "b": "triton", "c": "cuda"}
    assert (kernels.a(), kernels.b(), kernels.c()) == ("torch", "triton", "cuda")


@pytest.mark.parametrize(
    ("requested", "device", "reason"),
    [("triton", CPU, "does not run on cpu"), ("cuda", CUDA, "is not registered")],
)
def test_an_explicit_backend_that_an_op_lacks_is_refused_by_name(one_op, requested, device, reason) -> None:
    _add("a", "torch")
    _add("a", "triton")
    with pytest.raises(KernelError) as error:
        select(requested, device)
    for part in ("op a", repr(requested), reason, "--dsv4x-kernels", "auto"):
        assert part in str(error.value)


def test_a_kernel_for_one_compute_capability_serves_on_that_alone(one_op, monkeypatch) -> None:
    _add("a", "torch")
    register("a", "cuda", capability=(9, 0))(lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert select("auto", CUDA).chosen == {"a": "cuda"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert select("auto", CUDA).chosen == {"a": "torch"}
    with pytest.raises(KernelError, match=r"does not run on cuda of another compute capability than 9\.0"):
        select("cuda", CUDA)


def test_an_op_that_runs_nowhere_here_is_refused(one_op) -> None:
    _add("a", "cuda")
    with pytest.raises(KernelError, match=r"op a: no registered backend \(cuda\) runs on cpu"):
        select("auto", CPU)


def test_unknown_backends_are_refused(one_op) -> None:
    with pytest.raises(KernelError, match="--dsv4x-kernels fast"):
        select("fast", CPU)
    with pytest.raises(ValueError, match="unknown backend"):
        register("a", "fast")


def test_a_second_function_for_the_same_op_and_backend_is_refused(one_op) -> None:
    first = _add("a", "torch")
    assert register("a", "torch")(first) is first
    with pytest.raises(ValueError, match="already"):
        register("a", "torch")(_add)


def test_table_says_that_torch_serves_on_cuda_where_nothing_else_does() -> None:
    rows = {row.op: row for row in table(CPU)}
    assert rows.keys() >= OPS
    assert rows["compress"].chosen == "torch" and "torch" in rows["compress"].backends
    slow = [row for row in table(CUDA) if row.backends == ("torch",)]
    assert slow and all("no kernel for cuda" in row.chosen for row in slow)


def test_an_unknown_op_names_those_that_exist() -> None:
    with pytest.raises(AttributeError, match="sparse_attention"):
        _ = select("auto", CPU).no_such_op
