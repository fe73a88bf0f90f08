"""`sglang-dsv4x check`: everything that must be right before a server starts, and what is off.

Unlike the plug-in, which can notice nothing when SGLang never calls it, this command also says whether SGLang will.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any, NamedTuple

import torch

from . import __version__
from .config import platform_choice, plugin_filter
from .hicache.errors import HostMemoryError
from .hicache.host_memory import GIB, host_memory
from .jit_kernels import registry
from .jit_kernels.registry import KernelError

PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "dsv4x"
PLATFORM_GROUP, PLATFORM = "sglang.srt.platforms", "dsv4x_cpu"
PACKAGES = ("sglang", "torch", "triton", "transformers")


class Report(NamedTuple):
    """What was found; `facts` can be written as JSON, `problems` are sentences with their remedy."""

    facts: dict[str, Any]
    problems: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `run` reads."""
    parser.add_argument("--json", action="store_true", help="print the facts and problems as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 1 when something is off, else 0."""
    report = inspect_installation()
    if args.json:
        print(json.dumps({"ok": not report.problems, **report.facts, "problems": report.problems}, indent=2))
    else:
        print(render(report))
    return 1 if report.problems else 0


def inspect_installation() -> Report:
    """Looks at this interpreter's installation. Imports SGLang's modules that the seam table names; patches nothing."""
    cuda = torch.cuda.is_available()
    problems: list[str] = []
    facts = {
        "versions": _versions(problems),
        "device": _device(cuda, problems),
        "plugin": _plugin(cuda, problems),
        "seams": _seams(problems),
        "kernels": _kernels(cuda, problems),
        "host_memory": _memory(problems),
    }
    return Report(facts, problems)


def _versions(problems: list[str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"sglang-dsv4x": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
            problems.append(f"{package} is not installed: run `make venv`.")
    return versions


def _device(cuda: bool, problems: list[str]) -> dict[str, Any]:
    if torch.version.hip is not None:
        problems.append(
            "This torch is built for AMD GPUs; only NVIDIA GPUs and, through torch, CPUs are supported."
        )
    if not cuda:
        return {
            "type": "cpu",
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


def _plugin(cuda: bool, problems: list[str]) -> dict[str, Any]:
    """Will SGLang find and call our plug-in, and without a GPU our platform?"""
    allowed = plugin_filter()
    names = None if allowed is None else {name.strip() for name in allowed.split(",") if name.strip()}
    chosen = platform_choice()
    plugins = _entry_points(PLUGIN_GROUP)
    platforms = _entry_points(PLATFORM_GROUP)
    ours = plugins.get(PLUGIN)
    if ours is None:
        problems.append(f"No entry point {PLUGIN!r} in {PLUGIN_GROUP}: install this package with pip.")
    elif ours != "sglang_dsv4x.plugin:register":
        problems.append(
            f"The entry point {PLUGIN!r} in {PLUGIN_GROUP} is {ours}: another package took its name."
        )
    if names is not None and PLUGIN not in names:
        problems.append(
            f"SGLANG_PLUGINS={allowed} leaves {PLUGIN} out: SGLang will not know --enable-dsv4x. Add it, or unset it."
        )
    if not cuda:
        if PLATFORM not in platforms:
            problems.append(
                "There is no GPU, and the platform for that is not installed: "
                "pip install --no-deps ./sglang_dsv4x/engine/cpu_platform"
            )
        elif chosen is not None and chosen != PLATFORM:
            problems.append(f"SGLANG_PLATFORM={chosen}, but without a GPU it must be {PLATFORM}, or unset.")
        elif chosen is None and names is not None and PLATFORM not in names:
            problems.append(
                f"SGLANG_PLUGINS={allowed} leaves the platform {PLATFORM} out. Add it, or unset it."
            )
    return {
        "entry_point": ours,
        "SGLANG_PLUGINS": allowed,
        "SGLANG_PLATFORM": chosen,
        "platform": platforms.get(PLATFORM),
    }


def _seams(problems: list[str]) -> list[dict[str, Any]]:
    try:
        from .engine import seams
        from .engine.hooks import check

        states = check([*seams.argument_seams(), *seams.engine_seams()])
    # Whatever SGLang raises while it is imported is what this command is there to show.
    except Exception as error:
        problems.append(f"SGLang's modules cannot be imported: {type(error).__name__}: {error}")
        return []
    installed = _installed("sglang")
    for state in states:
        if not state.ok:
            problems.append(
                f"{state.seam.path} is {state.found}, expected {state.seam.signature} ({state.seam.reason}): "
                f"install sglang=={state.seam.tested[-1]}."
            )
    return [
        {
            "path": state.seam.path,
            "kind": state.seam.kind,
            "ok": state.ok,
            "expected": state.seam.signature,
            "found": state.found,
            "reason": state.seam.reason,
            "tested": list(state.seam.tested),
            "this_version_tested": installed in state.seam.tested,
        }
        for state in states
    ]


def _kernels(cuda: bool, problems: list[str]) -> list[dict[str, Any]]:
    try:
        rows = registry.table(torch.device("cuda" if cuda else "cpu"))
    except KernelError as error:
        problems.append(str(error))
        return []
    return [{"op": row.op, "backends": list(row.backends), "auto": row.chosen} for row in rows]


def _memory(problems: list[str]) -> dict[str, int | None]:
    try:
        memory = host_memory()
    except (HostMemoryError, OSError) as error:
        problems.append(str(error))
        return {}
    return {
        "free_bytes": memory.free,
        "machine_available_bytes": memory.machine_available,
        "cgroup_limit_bytes": memory.cgroup_limit,
        "cgroup_free_bytes": memory.cgroup_free,
    }


def _entry_points(group: str) -> dict[str, str]:
    return {entry.name: entry.value for entry in metadata.entry_points(group=group)}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def render(report: Report) -> str:
    """The report as text."""
    facts = report.facts
    lines = [
        "versions    " + ", ".join(f"{name} {version or '-'}" for name, version in facts["versions"].items())
    ]
    lines.append("device      " + ", ".join(f"{value}" for value in facts["device"].values()))
    plugin = facts["plugin"]
    for label, entry, variable in (
        ("plug-in ", plugin["entry_point"], "SGLANG_PLUGINS"),
        ("platform", plugin["platform"], "SGLANG_PLATFORM"),
    ):
        lines.append(f"{label}    {entry or 'not installed'} ({variable}: {plugin[variable] or 'unset'})")
    lines.append("memory      " + (", ".join(_memory_words(facts["host_memory"])) or "unknown"))
    seams = facts["seams"]
    good = sum(seam["ok"] for seam in seams)
    untested = seams and not all(seam["this_version_tested"] for seam in seams)
    lines.append(
        f"seams       {good} of {len(seams)} as expected"
        + (", but this SGLang is not a tested one" if untested else "")
    )
    lines += [f"  {'ok ' if seam['ok'] else 'OFF'} {seam['kind']:<8} {seam['path']}" for seam in seams]
    lines.append(f"kernels     {len(facts['kernels'])} ops")
    lines += [f"  {row['auto']:<8} {row['op']} (of {', '.join(row['backends'])})" for row in facts["kernels"]]
    lines.append("")
    if not report.problems:
        lines.append("OK: --enable-dsv4x can serve here.")
    else:
        lines.append(f"{len(report.problems)} thing(s) are off:")
        lines += [f"  - {problem}" for problem in report.problems]
    return "\n".join(lines)


def _memory_words(memory: dict[str, int | None]) -> list[str]:
    words = {
        "free_bytes": "free for the host store's process",
        "machine_available_bytes": "available on the machine",
        "cgroup_limit_bytes": "cgroup limit",
        "cgroup_free_bytes": "left in the cgroup",
    }
    return [f"{value / GIB:.2f} GiB {words[name]}" for name, value in memory.items() if value is not None]
