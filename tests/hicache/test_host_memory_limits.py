"""What the machine and its cgroups leave, and the refusal before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang_dsv4x.hicache import HostMemory, HostMemoryError, TierShape, host_memory
from sglang_dsv4x.hicache.host_store import HostStore
from sglang_dsv4x.jit_kernels.layouts import main_layout

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A /proc that says 8,000 MiB are available, and an empty /sys/fs/cgroup."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {16000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {8000 * 1024} kB\n"
    )
    return tmp_path


def read(machine: Path) -> HostMemory:
    return host_memory(machine / "proc", machine / "cgroup")


def group(machine: Path, path: str, **files: object) -> None:
    folder = machine / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_a_cgroup_the_machines_available_memory_counts(machine: Path) -> None:
    assert read(machine) == HostMemory(8000 * MIB, 8000 * MIB, None, None)


def test_cgroup_v2_limit_counts_and_droppable_page_cache_is_free(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/job\n")
    group(
        machine,
        "job",
        memory__max=1000 * MIB,
        memory__current=700 * MIB,
        memory__stat=f"anon 1\ninactive_file {200 * MIB}\nactive_file 7",
    )
    assert read(machine) == HostMemory(500 * MIB, 8000 * MIB, 1000 * MIB, 500 * MIB)


def test_the_tightest_cgroup_above_the_process_decides(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/slice/job\n")
    group(machine, "slice/job", memory__max="max", memory__current=1)
    group(machine, "slice", memory__max=2000 * MIB, memory__current=1800 * MIB)
    assert read(machine).free == 200 * MIB
    group(machine, "slice/job", memory__max=1900 * MIB, memory__current=1850 * MIB)
    assert read(machine) == HostMemory(50 * MIB, 8000 * MIB, 1900 * MIB, 50 * MIB)


def test_a_container_whose_cgroup_path_is_not_mounted_reads_the_root(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/../outside\n")
    group(machine, ".", memory__max=3000 * MIB, memory__current=0)
    assert read(machine).free == 3000 * MIB


def test_cgroup_v1_limit_counts_unless_it_is_its_unlimited_number(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n")
    group(
        machine,
        "memory/job",
        memory__limit_in_bytes=1000 * MIB,
        memory__usage_in_bytes=900 * MIB,
        memory__stat=f"total_inactive_file {50 * MIB}",
    )
    group(machine, "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    assert read(machine) == HostMemory(150 * MIB, 8000 * MIB, 1000 * MIB, 150 * MIB)


def test_meminfo_without_available_memory_is_an_error(machine: Path) -> None:
    (machine / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(HostMemoryError, match="MemAvailable"):
        read(machine)


def test_this_machine_can_be_read() -> None:
    memory = host_memory()
    assert 0 < memory.free <= memory.machine_available


def shape(pages: int) -> TierShape:
    return TierShape(2, 64 * pages, 64, 1, main_layout(64), 4, 1, 64)


def test_a_store_beyond_the_limit_is_refused_with_numbers_and_remedies() -> None:
    sizes = shape(1000)
    memory = HostMemory(50 * MIB, 8000 * MIB, 900 * MIB, 50 * MIB)
    with pytest.raises(HostMemoryError) as error:
        HostStore(sizes, torch.device("cpu"), memory)
    message = str(error.value)
    for part in (
        str(sizes.host_bytes),
        "0.05 GiB is free",
        "7.81 GiB available",
        "cgroup limit 0.88 GiB",
        "--dsv4x-host-memory-gb",
        "--max-total-tokens",
    ):
        assert part in message


def test_what_the_kernel_will_not_map_is_a_host_memory_error() -> None:
    impossible = HostMemory(1 << 62, 1 << 62, None, None)
    with pytest.raises(HostMemoryError, match="cannot be mapped"):
        HostStore(shape(1 << 40), torch.device("cpu"), impossible)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_store_is_exact_zero_and_touched_lazily() -> None:
    sizes = shape(5000)
    before = resident_bytes()
    store = HostStore(sizes, torch.device("cpu"))
    assert store.rows.shape == (2, 64 * 5000, 584)
    assert store.rows.untyped_storage().nbytes() == sizes.host_bytes
    assert resident_bytes() - before < 20 * MIB < sizes.host_bytes
    store.write(1, torch.tensor([64 * 4999]), torch.full((1, 584), 7, dtype=torch.uint8))
    assert store.read(1, torch.tensor([64 * 4999, 70]))[:, 0].tolist() == [7, 0]
