"""The machine of a plan: GPUs, how ranks share them, weights, host memory and the host link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import PlanError

GIB = 1 << 30
MIB = 1 << 20


class Gpu(NamedTuple):
    """A GPU's usable memory, in bytes, and where the figure is from."""

    memory: int
    source: str


GPUS = {
    "h100": Gpu(79 * GIB, "80 GB part; assumed usable"),
    "h200": Gpu(139 * GIB, "141 GB part; measured"),
    "b200": Gpu(179 * GIB, "192 GB part; assumed usable"),
}

RELEASED_WEIGHTS = {
    # Bytes of the released checkpoints, FP8 with FP4 experts: DeepSeek-V4-Flash, and DeepSeek-V4-Pro-0813 with its
    # draft stages.
    "flash": round(148.66 * GIB),
    "pro": 892_727_580_904,
}


class Link(NamedTuple):
    """What a grid-wide gather of host rows reaches: a fixed time, then units per second or bytes per second.

    The defaults were measured on one H200 behind PCIe 5.0 x16: random 584-byte rows of an 8 GiB store with a cold L2
    (69 to 32,768 rows), and runs of neighbouring rows. They are about 30 million rows a second whatever the row size.
    """

    latency_s: float = 5.4e-6
    units_per_s: float = 30.3e6
    bytes_per_s: float = 41.3e9

    def seconds(self, units: float, row_bytes: float) -> float:
        """Time of one gather of `units` runs of rows, `row_bytes` in each; 0 when there is nothing to fetch."""
        if units <= 0:
            return 0.0
        return self.latency_s + max(units / self.units_per_s, units * row_bytes / self.bytes_per_s)


LINK = Link()


@dataclass(frozen=True)
class Machine:
    """One node. Without DP attention each of `dp` replicas has `tp` GPUs; with it `tp` GPUs are all, in `dp` groups."""

    gpu_memory: int
    """Bytes of one GPU."""
    tp: int
    dp: int
    dp_attention: bool
    weights: int
    """Bytes of one copy of the model."""
    host_memory: int | None
    """Bytes of the node that the host stores may take; None: not limited."""
    mem_fraction: float
    """--mem-fraction-static: the share of a GPU's memory for weights and caches."""

    def __post_init__(self) -> None:
        if min(self.tp, self.dp) < 1:
            raise PlanError(f"--tp-size {self.tp} and --dp-size {self.dp} must be at least 1.")
        if self.dp_attention and self.tp % self.dp:
            raise PlanError(f"--enable-dp-attention needs --dp-size {self.dp} to divide --tp-size {self.tp}.")
        if not 0 < self.mem_fraction < 1:
            raise PlanError(f"--mem-fraction-static is {self.mem_fraction}; give a number between 0 and 1.")
        for flag, value in (("--gpu-memory", self.gpu_memory), ("--weights", self.weights)):
            if value <= 0:
                raise PlanError(f"{flag} is {value / GIB:g} GiB; give a positive number of GiB.")
        if self.host_memory is not None and self.host_memory <= 0:
            raise PlanError(f"--host-memory-gb is {self.host_memory / GIB:g}; give a positive number of GiB.")

    @property
    def gpus(self) -> int:
        return self.tp if self.dp_attention else self.tp * self.dp

    @property
    def weights_per_gpu(self) -> int:
        return -(-self.weights // self.tp)

    @property
    def device_budget(self) -> int:
        """Bytes of one GPU for caches: SGLang charges weights against mem_fraction of what was free before them."""
        return int(self.gpu_memory * self.mem_fraction) - self.weights_per_gpu

    @property
    def host_budget(self) -> int | None:
        """Bytes of one rank: KV is replicated over TP ranks, and so is each rank's host store."""
        return None if self.host_memory is None else self.host_memory // self.gpus


def gib_bytes(flag: str, gib: float) -> int:
    """Raises: PlanError, naming the flag, for anything but a positive, finite number."""
    if not (math.isfinite(gib) and gib > 0):
        raise PlanError(f"{flag} is {gib:g}; give a positive number of GiB.")
    return int(gib * GIB)


def gpu_memory(name: str | None, gib: float | None) -> int:
    """Bytes of the named GPU, or of `gib`, which wins. Raises: PlanError for an unknown name."""
    if gib is not None:
        return gib_bytes("--gpu-memory", gib)
    chosen = (name or "h200").lower()
    if chosen not in GPUS:
        raise PlanError(
            f"--gpu {name} is unknown; choose one of {', '.join(sorted(GPUS))}, or give --gpu-memory GIB."
        )
    return GPUS[chosen].memory


def default_mem_fraction(gpu_bytes: int, chunk_tokens: int, tp: int) -> float:
    """What SGLang 0.5.17 takes by default on a GPU of more than 60 GiB, CUDA graphs left out
    (`srt/server_args.py: _handle_gpu_memory_settings`): 1.5 MiB a chunk token and more stay free, at least 10 GiB.

    Raises: PlanError for a GPU that is smaller than that."""
    memory = gpu_bytes / MIB
    reserved = 512 + max(chunk_tokens, 2048) * 1.5 + tp / 8 * 1024
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if reserved >= memory:
        raise PlanError(
            f"A GPU of {memory / 1024:g} GiB is smaller than what SGLang leaves free for a chunk of "
            f"{chunk_tokens} tokens ({reserved / 1024:.1f} GiB): give --mem-fraction-static or a smaller "
            "--chunked-prefill-size."
        )
    return round((memory - reserved) / memory, 3)


def weight_bytes(model: str, gib: float | None) -> int:
    """Bytes of the weights: `gib`, else those of a released model, else of the *.safetensors beside `config.json`.

    Raises: PlanError when none of the three says.
    """
    if gib is not None:
        return gib_bytes("--weights", gib)
    if model in RELEASED_WEIGHTS:
        return RELEASED_WEIGHTS[model]
    folder = Path(model).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    found = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not found:
        raise PlanError(
            f"The weights of {model} are unknown (no *.safetensors beside it): give --weights GIB."
        )
    return found
