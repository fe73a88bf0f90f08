"""Lets `import torchvision` work beside a torch without CUDA.

SGLang imports torchvision at start, and torchvision's wheel on PyPI is built for CUDA. Beside a CPU torch its C++
library does not load, so the operators `torchvision::nms` and `torchvision::qnms` do not exist, and torchvision's
Python code fails at once when it registers shape functions for them. Here an import hook declares the two schemas,
without kernels, just before torchvision runs and only if its library does not load: calling them stays an error.

The hook must be in place before anything imports sglang, in SGLang's child processes too, so no entry point comes
early enough; a .pth file imports this module when Python starts. Until torchvision is imported it costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# As in torchvision/csrc/ops/nms.cpp and torchvision/csrc/ops/quantized/cpu/qnms_kernel.cpp (torchvision 0.28).
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Schemas live as long as the library object that declared them.
_declared: list[Any] = []


class TorchvisionFinder:
    """A meta path finder that knows `torchvision` only, and steps back once it was imported."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec, whose module first makes sure of the schemas. Looking it up imports nothing."""
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        folders = [Path(p) for p in spec.submodule_search_locations or ()]
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if cls in sys.meta_path:
                sys.meta_path.remove(cls)
            declare_missing_schemas(folders)
            run(module)

        # On the instance: the loader keeps its type, which importlib.resources and pickling ask for.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def declare_missing_schemas(folders: Sequence[Path]) -> bool:
    """Declares SCHEMAS unless torchvision's C++ library, looked for in `folders`, loads. True if it had to.

    Changes torch's operator table for the life of the process. Calling it again changes nothing.
    """
    if _declared:
        return False
    import torch

    for extension in [file for folder in folders for file in sorted(folder.glob("_C.*"))]:
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return True


sys.meta_path.insert(0, TorchvisionFinder)
