"""The CPU platform steps in only where CUDA is absent, and torchvision imports beside it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

activation = pytest.importorskip(
    "dsv4x_cpu_platform", reason="the CPU platform is installed only where CUDA is absent"
)


def test_inactive_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activation.activate() is None


def test_active_where_cuda_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms.interface import SRTPlatform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert issubclass(pkgutil.resolve_name(activation.activate()), SRTPlatform)


def test_sglang_finds_it_by_its_entry_point() -> None:
    (found,) = entry_points(group="sglang.srt.platforms", name="dsv4x_cpu")
    assert found.load() is activation.activate


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang's own CUDA platform serves here")
def test_sglang_serves_on_it_without_pinned_memory() -> None:
    from sglang.srt.platforms import current_platform

    assert type(current_platform).__name__ == "Dsv4xCpuPlatform"
    assert current_platform.is_out_of_tree()
    assert current_platform.device_type == "cpu"
    assert not current_platform.is_pin_memory_available()


def run(code: str) -> str:
    """Output of `code` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_interpreters_start_without_torch_and_looking_torchvision_up_imports_nothing() -> None:
    code = (
        "import sys, importlib.util\n"
        "assert importlib.util.find_spec('torchvision')\n"
        "print('torch' in sys.modules, 'torchvision' in sys.modules)"
    )
    assert run(code) == "False False"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision's library loads beside a CUDA torch")
def test_torchvision_imports_beside_a_torch_without_cuda_and_its_operators_stay_an_error() -> None:
    """PyPI's torchvision is a CUDA build; without the hook: 'operator torchvision::nms does not exist'."""
    code = (
        "import sys, torch, torchvision\n"
        "from dsv4x_cpu_platform.torchvision_schemas import TorchvisionFinder\n"
        "assert TorchvisionFinder not in sys.meta_path\n"
        "try:\n"
        "    torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)\n"
        "except NotImplementedError:\n"
        "    print('no kernel')"
    )
    assert run(code) == "no kernel"
