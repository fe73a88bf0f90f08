"""The declarative table's row: one place where SGLang is patched, or whose form our code relies on.

SGLang's own hook registry only logs a hook that fails, and then serves stock code. Here the whole table is checked
before anything is patched, and any mismatch is an error.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["before", "after", "around", "replace", "register", "read"]


class SeamError(RuntimeError):
    """Something that we patch or rely on is not what was tested; lists every such seam."""


@dataclass(frozen=True)
class Seam:
    """One seam.

    path: dotted path of the function, method, class or table.
    signature: parameter names, with `=...` where there is a default; `class (...)` for a class's constructor,
        `dict['key']` for a table with that key.
    kind: `after` hooks get (result, *args) and may return a new result; `around` hooks get (original, *args);
        `replace` puts `hook` under that very name and nowhere else; `register` sets the table's key; `read` patches
        nothing: our code calls or overrides it.
    only: `torch` seams are patched only where torch kernels serve.
    """

    path: str
    signature: str
    kind: Kind
    reason: str
    hook: Callable[..., Any] | None = None
    tested: tuple[str, ...] = ("0.5.17",)
    only: Literal["always", "torch"] = "always"


_installed: set[str] = set()
"""Paths that `install` has dealt with in this process."""


class SeamState(NamedTuple):
    seam: Seam
    ok: bool
    found: str


def describe_signature(target: Any) -> str:
    """The parameters as the table writes them."""
    parts: list[str] = []
    star = False
    for p in inspect.signature(target).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        name = p.name
        if p.kind is p.VAR_POSITIONAL:
            name, star = "*" + name, True
        elif p.kind is p.VAR_KEYWORD:
            name = "**" + name
        parts.append(name + ("=..." if p.default is not p.empty else ""))
    return "(" + ", ".join(parts) + ")"


def check_seam(seam: Seam) -> SeamState:
    """Compares one seam with the installed SGLang. Imports its module; patches nothing."""
    owner_path, name = seam.path.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(owner_path)
        target = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        return SeamState(seam, False, f"missing ({error})")
    if isinstance(target, (staticmethod, classmethod)):
        target = target.__func__
    if isinstance(target, dict):
        key = seam.signature.removeprefix("dict['").removesuffix("']")
        found = seam.signature if key in target else f"dict without '{key}'"
    elif isinstance(target, type):
        found = "class " + describe_signature(target.__init__)
    else:
        found = describe_signature(inspect.unwrap(target))
    return SeamState(seam, found == seam.signature, found)


def check(seams: Iterable[Seam]) -> list[SeamState]:
    return [check_seam(seam) for seam in seams]


def require(seams: Iterable[Seam]) -> None:
    """Raises: SeamError listing every seam that is off. One that this process has patched was checked before."""
    wrong = [state for state in check(seam for seam in seams if seam.path not in _installed) if not state.ok]
    if wrong:
        raise SeamError(explain(wrong))


def install(seams: list[Seam], *, torch_kernels: bool) -> None:
    """Checks every seam, then patches; one that was patched before is left alone.

    Raises: SeamError, before anything is patched, when one is off.
    """
    require(seams)
    for seam in seams:
        if seam.path not in _installed and (seam.only == "always" or torch_kernels):
            _patch(seam)
            _installed.add(seam.path)


def explain(wrong: list[SeamState]) -> str:
    import sglang

    lines = [f"{len(wrong)} of the places where --enable-dsv4x changes SGLang are not as tested:"]
    for state in wrong:
        lines += [
            f"  {state.seam.path}",
            f"    expected {state.seam.signature}",
            f"    found    {state.found}",
            f"    needed because {state.seam.reason}",
        ]
    tested = sorted({version for state in wrong for version in state.seam.tested})
    lines.append(
        f"SGLang {sglang.__version__} is installed; tested: {', '.join(tested)}. Install sglang=={tested[-1]}, or "
        "drop --enable-dsv4x."
    )
    return "\n".join(lines)


def _patch(seam: Seam) -> None:
    if seam.kind == "read":
        return
    owner_path, name = seam.path.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_path)
    hook = seam.hook
    assert hook is not None, f"{seam.path}: a {seam.kind} seam needs a hook"
    if seam.kind == "register":
        getattr(owner, name)[seam.signature.removeprefix("dict['").removesuffix("']")] = hook
        return
    raw = inspect.getattr_static(owner, name)
    original = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    new: Any = hook if seam.kind == "replace" else _wrap(original, hook, seam.kind)
    if isinstance(raw, (staticmethod, classmethod)):
        new = type(raw)(new)
    setattr(owner, name, new)


def _wrap(original: Callable[..., Any], hook: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kind == "around":
            return hook(original, *args, **kwargs)
        if kind == "before":
            changed = hook(*args, **kwargs)
            args, kwargs = changed if changed is not None else (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        new = hook(result, *args, **kwargs)
        return result if new is None else new

    return wrapped
