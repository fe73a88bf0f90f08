"""The seam table: what counts as changed, and that nothing is patched unless everything fits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from sglang_dsv4x.engine import hooks, seams
from sglang_dsv4x.engine.hooks import Seam, SeamError, check_seam, install

SOURCE = """
def plain(a, b=1, *rest, c, d=2, **more): return ("plain", a, b)
def keyword(a, *, b): return (a, b)
class Base:
    def __init__(self, size): self.size = size
    def method(self, x): return ("method", x)
    @staticmethod
    def static(x): return ("static", x)
    @classmethod
    def klass(cls, x): return (cls.__name__, x)
class Child(Base): pass
TABLE = {"known": 1}
"""


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = ModuleType("dsv4x_test_upstream")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hooks, "_installed", set())
    yield module


def seam(name: str, signature: str, kind: hooks.Kind, hook: Any = None, **more: Any) -> Seam:
    return Seam(f"dsv4x_test_upstream.{name}", signature, kind, "a reason", hook, **more)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("plain", "(a, b=..., *rest, c, d=..., **more)"),
        ("keyword", "(a, *, b)"),
        ("Base", "class (self, size)"),
        ("Base.method", "(self, x)"),
        ("Base.static", "(x)"),
        ("Base.klass", "(cls, x)"),
        ("TABLE", "dict['known']"),
    ],
)
def test_what_is_as_expected_is_ok(upstream: Any, name: str, signature: str) -> None:
    assert check_seam(seam(name, signature, "read")).ok


@pytest.mark.parametrize(
    ("name", "signature", "found"),
    [
        ("plain", "(a, b, *rest, c, d=..., **more)", "(a, b=..., *rest, c, d=..., **more)"),
        ("keyword", "(a, b)", "(a, *, b)"),
        ("Base", "class (self)", "class (self, size)"),
        ("Base.method", "(self, x, y)", "(self, x)"),
        ("Base.gone", "(self)", "missing"),
        ("gone.method", "(self)", "missing"),
        ("TABLE", "dict['unknown']", "dict without 'unknown'"),
    ],
)
def test_any_other_name_order_kind_or_default_is_off(
    upstream: Any, name: str, signature: str, found: str
) -> None:
    state = check_seam(seam(name, signature, "read"))
    assert not state.ok and state.found.startswith(found)


def test_a_module_that_is_gone_is_off_and_not_an_exception() -> None:
    assert not check_seam(Seam("sglang.no_such_module.name", "(x)", "read", "a reason")).ok


def test_every_kind_of_hook_does_what_it_says(upstream: Any) -> None:
    install(
        [
            seam("plain", "(a, b=..., *rest, c, d=..., **more)", "before", lambda a, **k: (("changed",), k)),
            seam("keyword", "(a, *, b)", "after", lambda result, a, b: (*result, "after")),
            seam(
                "Base.method",
                "(self, x)",
                "around",
                lambda original, self, x: ("around", original(self, x + 1)),
            ),
            seam("Base.static", "(x)", "replace", lambda x: ("ours", x)),
            seam("Base.klass", "(cls, x)", "after", lambda result, cls, x: None),
            seam("TABLE", "dict['known']", "register", "ours"),
        ],
        torch_kernels=True,
    )
    assert upstream.plain(1, c=3) == ("plain", "changed", 1)
    assert upstream.keyword(1, b=2) == (1, 2, "after")
    assert upstream.Base(1).method(1) == ("around", ("method", 2))
    assert upstream.Base.static(5) == upstream.Base(1).static(5) == ("ours", 5)
    assert upstream.Child.klass(5) == ("Child", 5), "an after hook that returns None keeps the result"
    assert upstream.TABLE == {"known": "ours"}


def test_one_changed_seam_leaves_everything_as_it_was_and_all_changed_ones_are_listed(upstream: Any) -> None:
    before = upstream.keyword
    with pytest.raises(SeamError) as error:
        install(
            [
                seam("keyword", "(a, *, b)", "after", lambda *a, **k: None),
                seam("Base.method", "(self, x, y)", "after", lambda *a: None),
                seam("gone", "(x)", "replace", lambda x: x),
            ],
            torch_kernels=True,
        )
    assert upstream.keyword is before
    text = str(error.value)
    for words in (
        "2 of the places",
        "dsv4x_test_upstream.Base.method",
        "expected (self, x, y)",
        "found    (self, x)",
        "dsv4x_test_upstream.gone",
        "needed because a reason",
        "tested: 0.5.17",
        "Install sglang==0.5.17, or drop --enable-dsv4x",
    ):
        assert words in text
    assert "dsv4x_test_upstream.keyword" not in text


def test_installing_twice_patches_once(upstream: Any) -> None:
    """The plug-in prepares a launch at load and again after parsing when both the environment and a flag enable it.

    Without the record of what is installed the second time wraps the first, and the hook runs twice.
    """
    calls: list[int] = []
    row = seam("Base.method", "(self, x)", "after", lambda result, self, x: calls.append(x))
    install([row], torch_kernels=True)
    install([row], torch_kernels=True)
    upstream.Base(1).method(3)
    assert calls == [3]


def test_a_torch_seam_is_checked_everywhere_but_patched_only_for_torch_kernels(upstream: Any) -> None:
    row = seam("keyword", "(a, *, b)", "replace", lambda a, *, b: "ours", only="torch")
    install([row], torch_kernels=False)
    assert upstream.keyword(1, b=2) == (1, 2)
    with pytest.raises(SeamError):
        install([replace(row, signature="(a)")], torch_kernels=False)


def test_the_signature_is_seen_through_another_plug_ins_wrapper(upstream: Any) -> None:
    install([seam("Base.method", "(self, x)", "after", lambda *a: None)], torch_kernels=True)
    assert check_seam(seam("Base.method", "(self, x)", "read")).ok


def all_seams() -> list[Seam]:
    return [*seams.argument_seams(), *seams.engine_seams()]


def test_the_whole_table_fits_the_installed_sglang() -> None:
    assert [(s.seam.path, s.found) for s in hooks.check(all_seams()) if not s.ok] == []


def test_every_row_of_the_table_is_complete() -> None:
    paths = [row.path for row in all_seams()]
    assert len(paths) == len(set(paths)), "a second row for one path would never be patched"
    for row in all_seams():
        assert row.path.startswith("sglang.")
        assert row.reason and "0.5.17" in row.tested
        assert (row.hook is None) == (row.kind == "read"), row.path
