"""Put first on PYTHONPATH by tests: gives one function of SGLang another signature, as another version might.

CHANGED_SEAM is "module:Class.method" (or "module:function"); CHANGED_IN is "everywhere" or "children".
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE, _, NAME = os.environ["CHANGED_SEAM"].partition(":")


def something_else(self: Any, renamed: Any) -> None:
    """Not what it was."""


class Changer:
    """Imports MODULE as usual, then changes it."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # Asked late: a child process knows its parent only after Python has started.
            if os.environ["CHANGED_IN"] == "everywhere" or multiprocessing.parent_process() is not None:
                owner: Any = module
                *classes, attribute = NAME.split(".")
                for part in classes:
                    owner = getattr(owner, part)
                setattr(owner, attribute, something_else)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changer)  # type: ignore[arg-type]
