"""What every benchmark's JSON holds beside its numbers, so that a figure can be made again."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..replay.report import source_commit

SCHEMA = 1


def record(benchmark: str, arguments: Sequence[str], settings: Any, results: Any) -> dict[str, Any]:
    """One benchmark's result as a JSON object. `settings` and `results` are the benchmark's own."""
    return {
        "kind": "sglang-dsv4x bench",
        "schema": SCHEMA,
        "benchmark": benchmark,
        "command": shlex.join(["sglang-dsv4x", "bench", benchmark, *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": device(),
        "versions": {name: _version(name) for name in ("sglang-dsv4x", "sglang", "torch")},
        "settings": settings,
        "results": results,
    }


def write(path: Path, value: dict[str, Any]) -> None:
    """Writes a new file beside `path` and renames it, so that an interrupted run leaves the old result."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    os.replace(part, path)


def device() -> dict[str, Any]:
    """The GPU if there is one, else the processor."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {"type": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    return {"type": "cpu", "name": _processor(), "cpus": os.cpu_count()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
