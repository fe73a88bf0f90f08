"""Building kernels at first use: what is said without a compiler or with a broken source, and what is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.utils.cpp_extension
from sglang_dsv4x.jit_kernels import nvcc
from sglang_dsv4x.jit_kernels.registry import KernelError


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)


def test_without_nvcc_the_error_names_it_and_the_remedies(no_compiler: None, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"nvcc .*resolve.*CUDA_HOME.*--dsv4x-kernels torch"):
        nvcc.build("resolve", "sm_90a", tmp_path)


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A program in nvcc's place that notes its calls, then runs `body` with $to as the library to write."""
    calls = tmp_path / "calls"
    program = tmp_path / "nvcc"
    program.write_text(
        f'#!/bin/bash\n[ "$1" = --version ] && echo release 1 && exit\necho call >> {calls}\n'
        f'while [ "$1" != -o ]; do shift; done; to="$2"\n{body}\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    return calls


def test_a_library_is_built_once_and_again_when_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = compiler(tmp_path, monkeypatch, 'echo lib > "$to"')
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cu").write_text("a")
    monkeypatch.setattr(nvcc, "SOURCES", sources)
    folder = tmp_path / "cache"
    first = nvcc.build("one", "sm_90a", folder)
    assert nvcc.build("one", "sm_90a", folder) == first
    assert calls.read_text().count("call") == 1
    (sources / "shared.cuh").write_text("b")
    second = nvcc.build("one", "sm_90a", folder)
    assert second != first != nvcc.build("one", "sm_80", folder)
    assert sorted(path.suffix for path in folder.iterdir()) == [".so"] * 3


def test_a_source_that_does_not_compile_shows_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, "echo 'expected a semicolon' >&2; exit 2")
    with pytest.raises(KernelError, match=r"(?s)resolve\.cu for sm_90a \(exit 2\).*expected a semicolon"):
        nvcc.build("resolve", "sm_90a", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
