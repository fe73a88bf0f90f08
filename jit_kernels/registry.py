"""Which backend serves each op, chosen once at start.

Every op is a public function of one module; a backend of it is a function with the same signature, put on
record with `@register(op, backend)`. The torch backend runs on any device, and serves where there is no GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

AUTO = "auto"
FLAG = "--dsv4x-kernels"
# Fastest first, each with the device types it runs on; None is any.
_DEVICE_TYPES: dict[str, frozenset[str] | None] = {
    "cuda": frozenset({"cuda"}),
    "triton": frozenset({"cuda"}),
    "torch": None,
}

_registered: dict[str, dict[str, Callable[..., Any]]] = {}
# (op, backend) -> the only compute capability that it runs on; absent: any.
_capabilities: dict[tuple[str, str], tuple[int, int]] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class KernelError(RuntimeError):
    """No backend of an op can serve as asked; the message names the op, the flag and the remedy."""


class OpRow(NamedTuple):
    """One op as `sglang-dsv4x check` prints it: what is registered, and what `auto` takes."""

    op: str
    backends: tuple[str, ...]
    chosen: str


class Kernels:
    """The chosen function of every op, as an attribute named after the op; `chosen` maps op to backend."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], chosen: Mapping[str, str]) -> None:
        self.chosen = dict(chosen)
        self.__dict__.update(functions)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {op!r} is registered; there are: {', '.join(sorted(self.chosen))}")


def register(
    op: str, backend: str, capability: tuple[int, int] | None = None
) -> Callable[[_Function], _Function]:
    """Decorator: records the function as `backend` of `op` and returns it unchanged.

    Args:
        capability: the one compute capability of a GPU that it runs on, (9, 0) for Hopper; None is any.
    Raises: ValueError for an unknown backend, or for a second function under the same op and backend.
    """
    if backend not in _DEVICE_TYPES:
        raise ValueError(f"{op}: unknown backend {backend!r}; known are {', '.join(_DEVICE_TYPES)}")

    def record(function: _Function) -> _Function:
        known = _registered.setdefault(op, {})
        other = known.get(backend)
        if other is not None and (other.__module__, other.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ValueError(f"{op}: backend {backend!r} is already {other.__module__}.{other.__qualname__}")
        known[backend] = function
        if capability is not None:
            _capabilities[op, backend] = capability
        return function

    return record


def select(requested: str, device: torch.device) -> Kernels:
    """The functions to serve with.

    Args:
        requested: "auto" takes, per op, the fastest registered backend that runs on `device`; "cuda",
            "triton" or "torch" takes that backend for every op.
        device: where the tensors will be.
    Raises: KernelError where an op has no such backend, or none that runs on `device`.
    """
    device = torch.device(device)
    if requested != AUTO and requested not in _DEVICE_TYPES:
        raise KernelError(f"{FLAG} {requested}: unknown; choose one of auto, {', '.join(_DEVICE_TYPES)}")
    chosen = {op: _choose(op, requested, device) for op in _ops()}
    return Kernels({op: _registered[op][backend] for op, backend in chosen.items()}, chosen)


def table(device: torch.device) -> list[OpRow]:
    """Every op, its backends and the one that `auto` takes on `device`, for `sglang-dsv4x check`."""
    device = torch.device(device)
    rows = []
    for op in _ops():
        chosen = _choose(op, AUTO, device)
        if device.type != "cpu" and chosen == "torch":
            chosen = f"torch (slow: no kernel for {device.type} is registered)"
        rows.append(OpRow(op, tuple(b for b in _DEVICE_TYPES if b in _registered[op]), chosen))
    return rows


def _ops() -> list[str]:
    # Op modules import this one, so they are imported here and not at the top.
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return sorted(_registered)


def _runs_on(op: str, backend: str, device: torch.device) -> bool:
    types = _DEVICE_TYPES[backend]
    if types is not None and device.type not in types:
        return False
    needed = _capabilities.get((op, backend))
    # Without a GPU, as when `check` describes what would serve on one, nothing is known that speaks against it.
    return (
        needed is None or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) == needed
    )


def _choose(op: str, requested: str, device: torch.device) -> str:
    backends = _registered[op]
    usable = [b for b in _DEVICE_TYPES if b in backends and _runs_on(op, b, device)]
    if requested == AUTO:
        if not usable:
            raise KernelError(
                f"op {op}: no registered backend ({', '.join(backends)}) runs on {device.type} "
                f"({FLAG} auto); register a torch backend for it"
            )
        return usable[0]
    if requested not in usable:
        reason = "is not registered"
        if requested in backends:
            needed = _capabilities.get((op, requested))
            other = f" of another compute capability than {needed[0]}.{needed[1]}" if needed else ""
            reason = f"does not run on {device.type}{other}"
        raise KernelError(
            f"op {op}: backend {requested!r} {reason} ({FLAG} {requested}); it has: {', '.join(backends)}. "
            f"Use {FLAG} auto, which takes the fastest backend that runs on this device, op by op"
        )
    return requested
