"""How much host memory this process may still take: the machine's and every cgroup's above it, v1 and v2."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .errors import HostMemoryError

GIB = 1 << 30

_V1_UNLIMITED = 1 << 60
"""cgroup v1 has no word for 'no limit': it reports the largest multiple of a page, about 2**63."""


class HostMemory(NamedTuple):
    """Bytes."""

    free: int
    """What this process may still take: the smaller of the machine's available memory and what its cgroups
    leave."""
    machine_available: int
    """MemAvailable of /proc/meminfo."""
    cgroup_limit: int | None
    """Limit of the cgroup that leaves least, or None without one."""
    cgroup_free: int | None
    """What that cgroup leaves; page cache that the kernel can drop counts as free."""


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads the limits now. `proc` and `cgroups` are where those file systems are mounted.

    Raises: HostMemoryError when /proc/meminfo does not say what is available.
    """
    available = _meminfo_available(proc / "meminfo")
    limits = [limit for limit in _cgroup_limits(proc / "self/cgroup", cgroups) if limit is not None]
    if not limits:
        return HostMemory(available, available, None, None)
    free, limit = min(limits)
    return HostMemory(min(available, free), available, limit, free)


def require_host_memory(
    needed: int,
    memory: HostMemory,
    *,
    what: str = "The host store",
    remedy: str = "Lower --dsv4x-host-memory-gb or --max-total-tokens",
) -> None:
    """Raises HostMemoryError, with the numbers and what to change, when `needed` bytes are more than there
    are."""
    if needed <= memory.free:
        return
    limit = "no cgroup limit"
    if memory.cgroup_limit is not None and memory.cgroup_free is not None:
        limit = f"cgroup limit {_gib(memory.cgroup_limit)}, of which {_gib(memory.cgroup_free)} is left"
    raise HostMemoryError(
        f"{what} needs {_gib(needed)} ({needed} bytes) and {_gib(memory.free)} is free (machine: "
        f"{_gib(memory.machine_available)} available; {limit}). {remedy}, or give the process more memory."
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _meminfo_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise HostMemoryError(f"{path} has no MemAvailable line; the host store cannot be sized.")


def _cgroup_limits(membership: Path, root: Path) -> list[tuple[int, int] | None]:
    """(free, limit) of the process's memory cgroup and of every cgroup above it, of either version."""
    if not membership.exists():
        return []
    found: list[tuple[int, int] | None] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [_read_v2(folder) for folder in _ancestors(root, path)]
        elif "memory" in controllers.split(","):
            found += [_read_v1(folder) for folder in _ancestors(root / "memory", path)]
    return found


def _ancestors(root: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it. In a container the path may lie outside what is mounted: then
    the root."""
    folder = root / path.strip("/")
    below = [folder, *folder.parents]
    return [f for f in below if f == root or root in f.parents] if folder.exists() else [root]


def _read_v2(folder: Path) -> tuple[int, int] | None:
    limit, usage = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or usage is None:
        return None
    return max(0, limit - usage + _inactive_file(folder, "inactive_file")), limit


def _read_v1(folder: Path) -> tuple[int, int] | None:
    limit, usage = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or usage is None or limit >= _V1_UNLIMITED:
        return None
    return max(0, limit - usage + _inactive_file(folder, "total_inactive_file")), limit


def _number(path: Path) -> int | None:
    """The file's number; None when there is no such file or it says 'max'."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _inactive_file(folder: Path, name: str) -> int:
    stat = folder / "memory.stat"
    if not stat.exists():
        return 0
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
