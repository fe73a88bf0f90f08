"""What the two wheels hold, and that the installed package imports, from a wheel and in place."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_PLATFORM = ROOT / "sglang_dsv4x" / "engine" / "cpu_platform"
FOLDERS = {
    "sglang_dsv4x": "sglang_dsv4x",
    "hicache": "sglang_dsv4x/hicache",
    "jit_kernels": "sglang_dsv4x/jit_kernels",
    "configs": "sglang_dsv4x/configs",
}
"""Folder in the tree -> folder in the wheel."""

SHIPPED = {".py", ".json", ".yaml", ".typed", ".cu", ".cuh", ".h"}
MODULES = ("", ".config", ".configs", ".hicache", ".jit_kernels", ".make_model", ".replay", ".replay.formats")
"""Relative to sglang_dsv4x; those that need no SGLang."""

ENTRY_POINTS = {
    "sglang.srt.plugins": {"dsv4x": "sglang_dsv4x.plugin:register"},
    "console_scripts": {"sglang-dsv4x": "sglang_dsv4x.cli:main"},
}


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel of `source`, built from a copy so that setuptools leaves nothing in the tree, nor takes from it."""
    copy = out / "source"
    ignored = shutil.ignore_patterns(".*", "tests", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(source, copy, ignore=ignored)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy))
    (wheel,) = out.glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def names(wheel: Path) -> set[str]:
    """Files in the wheel without its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def declared_entry_points(wheel: Path) -> dict[str, dict[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(name).decode())
    return {section: dict(parser[section]) for section in parser.sections()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def platform_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(CPU_PLATFORM, tmp_path_factory.mktemp("platform_wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


def run_installed(code: str, target: Path) -> str:
    """Output of `code` where `target` comes before everything else, outside the tree."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=target,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_module_and_data_file_of_the_tree_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{inside}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.suffix in SHIPPED and CPU_PLATFORM not in file.parents
    }
    assert len(expected) > 50
    assert names(wheel) == expected


def test_the_wheel_declares_the_plug_in_and_the_command(wheel: Path) -> None:
    assert declared_entry_points(wheel) == ENTRY_POINTS


def test_the_platform_is_only_in_its_own_wheel_with_the_hook_at_its_root(
    wheel: Path, platform_wheel: Path
) -> None:
    assert not any("cpu_platform" in name for name in names(wheel))
    assert names(platform_wheel) == {
        "dsv4x_cpu_platform.pth",
        *(
            file.relative_to(CPU_PLATFORM).as_posix()
            for file in (CPU_PLATFORM / "dsv4x_cpu_platform").rglob("*")
            if file.suffix in SHIPPED
        ),
    }
    assert declared_entry_points(platform_wheel) == {
        "sglang.srt.platforms": {"dsv4x_cpu": "dsv4x_cpu_platform:activate"}
    }


def test_modules_import_from_the_installed_wheel(installed: Path) -> None:
    code = (
        "import importlib, json\n"
        f"files = [importlib.import_module('sglang_dsv4x' + m).__file__ for m in {MODULES!r}]\n"
        "print(json.dumps(files))"
    )
    files = json.loads(run_installed(code, installed))
    assert len(files) == len(MODULES)
    assert all(Path(file).is_relative_to(installed) for file in files), files


def test_data_files_load_from_the_installed_wheel(installed: Path) -> None:
    code = (
        "from sglang_dsv4x import configs\n"
        "from sglang_dsv4x.replay.formats import load_trace, trace_path\n"
        "assert configs.load('tiny')['index_topk'] > 0\n"
        "assert load_trace(trace_path('small'), 'weka')\n"
        "print(trace_path('small'))"
    )
    assert Path(run_installed(code, installed).strip()).is_relative_to(installed)


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_from_the_tree_in_the_editable_install(module: str) -> None:
    file = importlib.import_module("sglang_dsv4x" + module).__file__
    assert file is not None and Path(file).is_relative_to(ROOT)


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_entry_points_of_the_install_lead_to_something_callable(group: str) -> None:
    for name in ENTRY_POINTS[group]:
        (found,) = entry_points(group=group, name=name)
        assert callable(found.load())
