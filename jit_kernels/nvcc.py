"""CUDA sources of `csrc/` to shared libraries with a C interface, built by nvcc at first use and kept.

The kernels need nothing of PyTorch's headers, so a build takes seconds, and a library works with any PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from .registry import KernelError

SOURCES = Path(__file__).resolve().parent / "csrc"
CACHE = Path.home() / ".cache" / "sglang_dsv4x" / "kernels"
FLAGS = ("-O3", "-std=c++17", "--shared", "-Xcompiler", "-fPIC", "-lineinfo")


@lru_cache
def load(name: str) -> ctypes.CDLL:
    """The library of `csrc/<name>.cu` for the current device. Builds it if no build of this source, these
    headers and this compiler is kept.

    Raises: KernelError without nvcc, or when it refuses the source (with its output).
    """
    return ctypes.CDLL(str(build(name, architecture())))


def architecture() -> str:
    """nvcc's name of the current device, e.g. sm_90a."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def build(name: str, arch: str, folder: Path = CACHE) -> Path:
    """Compiles `csrc/<name>.cu` for `arch` unless it is in `folder` already; returns the library's path.

    Raises: KernelError as `load`.
    """
    compiler = _compiler(name)
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    text = b"".join(path.read_bytes() for path in (SOURCES / f"{name}.cu", *sorted(SOURCES.glob("*.cuh"))))
    key = hashlib.sha256(b"\0".join([text, version, arch.encode(), *map(str.encode, FLAGS)])).hexdigest()[:20]
    library = folder / f"{name}-{arch}-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / library.name
        # Not -arch=sm_90a: some compilers then also run a pass for plain sm_90, which lacks wgmma.
        target = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
        command = [compiler, *FLAGS, target, "-o", str(made), str(SOURCES / f"{name}.cu")]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise KernelError(
                f"nvcc cannot build {name}.cu for {arch} (exit {result.returncode}): {' '.join(command)}\n"
                f"{result.stderr.strip() or result.stdout.strip()}"
            )
        # Renamed into place: several processes may build at once, and none may load half a library.
        os.replace(made, library)
    return library


def _compiler(name: str) -> str:
    from torch.utils.cpp_extension import CUDA_HOME

    found = shutil.which("nvcc")
    if found is None and CUDA_HOME is not None and (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        found = str(Path(CUDA_HOME) / "bin" / "nvcc")
    if found is None:
        raise KernelError(
            f"nvcc is needed to build the CUDA kernel {name} and is neither on the PATH nor under CUDA_HOME "
            f"({CUDA_HOME}): install the CUDA toolkit of PyTorch's version ({torch.version.cuda}) or set "
            f"CUDA_HOME, or serve without CUDA kernels (--dsv4x-kernels torch)"
        )
    return found
