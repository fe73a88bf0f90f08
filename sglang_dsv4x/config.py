"""The one configuration object, and the only place that reads flags and environment variables.

`Dsv4xConfig` is filled from `launch_server` flags (also through SGLang's YAML `--config`) or, for users of
`sglang.Engine`, from the environment variable SGLANG_DSV4X_CONFIG holding JSON with the field names below.
It travels to the scheduler processes through that same variable.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

CONFIG_VARIABLE = "SGLANG_DSV4X_CONFIG"
FETCH_UNITS = (1, 2, 4, 8)
PAGE_TOKENS = 256
"""Tokens of a radix page: SGLang's fixed page size for this model."""


class ConfigError(ValueError):
    """A flag or its JSON counterpart has an impossible value; the message names it and the remedy."""


def _flag(default: Any, help: str, choices: tuple[Any, ...] | None = None, metavar: str | None = None) -> Any:
    """A field that is also the flag --dsv4x-<name>; `help` says what it does and why the default is what it is."""
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass(frozen=True)
class Dsv4xConfig:
    """Every setting with its default and the reason for it. `enable` is the flag --enable-dsv4x."""

    enable: bool = False
    tier: Literal["on", "off"] = _flag(
        "on",
        "Page cold C4 main KV to host memory ('on'), or keep everything resident on the device ('off'), which is "
        "the comparator: outputs are the same bits either way. Default on: it is what the extension is for.",
        ("on", "off"),
    )
    host_memory_gb: float | None = _flag(
        None,
        "Cap, in GiB per node, on the host memory that holds C4 main KV. max_total_num_tokens is clamped to what "
        "fits and the banner says so. Default: no cap beyond 80 %% of the memory that the machine and its cgroup "
        "have free at start.",
        metavar="GIB",
    )
    hot_entries: int | None = _flag(
        None,
        "Hot C4 entries kept on the device, per C4 layer. Default: twice the smallest number with which every step "
        "fits, unit * (max_running_requests * (top_k + 2) + chunk / 4). Fewer than that number is refused at start.",
        metavar="N",
    )
    fetch_unit: int = _flag(
        2,
        "Neighbouring C4 entries fetched together. Default 2: above about 1 GiB of touched host memory the link "
        "moves rows, not bytes (40 million a second), so one neighbour is nearly free.",
        FETCH_UNITS,
    )
    index_dtype: Literal["fp4", "fp8"] = _flag(
        "fp4",
        "Storage of the C4 index keys, which always stay on the device: 'fp4' (MXFP4, 68 B an entry, as DeepSeek's "
        "reference) or 'fp8' (132 B, stock SGLang's). Default fp4: half the bytes that limit parked tokens.",
        ("fp4", "fp8"),
    )
    kernels: Literal["auto", "cuda", "triton", "torch"] = _flag(
        "auto",
        "Kernel backend. 'auto' takes, op by op, the fastest backend that exists for the device; any other value "
        "insists on that backend and fails where an op lacks it. Default auto. 'torch' is the reference, runs on "
        "any device and is what serves without a GPU.",
        ("auto", "cuda", "triton", "torch"),
    )
    checks: Literal["off", "step"] = _flag(
        "off",
        "'step' keeps a resident copy of all C4 rows, compares every row that attention reads with it byte by byte, "
        "checks the tables after every step and poisons freed rows. Default off: it costs the memory the tier saves.",
        ("off", "step"),
    )
    resume_memory_gb: float = _flag(
        4.0,
        "Host memory, in GiB, for resume points: what a prefix hit needs beside C4 rows (the last window rows and the "
        "compressors' overlap), so that a paused prefix is never recomputed because its window pages were given away. "
        "Default 4, some 1,100 points of Flash; 0 switches them off (stock SGLang's cache).",
        metavar="GIB",
    )
    resume_interval: int = _flag(
        4096,
        "Write a resume point every so many tokens of a prompt, beside those at the ends of prompts and outputs and at "
        "forks; a multiple of 256. Default 4096: a first fork elsewhere recomputes at most that, and a point costs as "
        "much host memory as 1 to 2 thousand tokens of C4 rows.",
        metavar="TOKENS",
    )
    yarn_fix: Literal["on", "off"] = _flag(
        "on",
        "Leave YaRN off in window-only layers, as DeepSeek's reference does. SGLang 0.5.17 applies it there too "
        "(fixed upstream by #34788); 'off' restores stock's bits for comparisons. Default on.",
        ("on", "off"),
    )
    storage: Literal["released", "float32"] = _flag(
        "released",
        "Debug only, torch kernels only: 'float32' keeps KV rows, index keys and weights in fp32, so that the whole "
        "server can be held against transformers without quantisation noise; needs --dtype float32. Default "
        "released: the byte layouts of the released model.",
        ("released", "float32"),
    )
    copy_timeout_s: float = _flag(
        60.0,
        "A fetch that has not arrived after this many seconds is an error that stops the server, not a silent "
        "stall. Default 60: a whole host store crosses the link in less.",
        metavar="S",
    )
    copy_delay_ms: float = _flag(
        0.0,
        "Tests only: delay every fetch by up to this many milliseconds, so that a missing wait shows. Default 0.",
        metavar="MS",
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata.get("choices")
            if choices is not None and value not in choices:
                raise ConfigError(
                    f"{flag_name(f.name)} is {value!r}; choose one of {', '.join(map(str, choices))}."
                )
        if self.host_memory_gb is not None and not self.host_memory_gb > 0:
            raise ConfigError(
                f"--dsv4x-host-memory-gb is {self.host_memory_gb}; give a positive number of GiB."
            )
        if self.hot_entries is not None and self.hot_entries <= 0:
            raise ConfigError(
                f"--dsv4x-hot-entries is {self.hot_entries}; give a positive number of entries."
            )
        if not self.resume_memory_gb >= 0:
            raise ConfigError(
                f"--dsv4x-resume-memory-gb is {self.resume_memory_gb}; give 0 or more GiB (0: no resume points)."
            )
        if self.resume_interval <= 0 or self.resume_interval % PAGE_TOKENS:
            below = max(PAGE_TOKENS, self.resume_interval // PAGE_TOKENS * PAGE_TOKENS)
            raise ConfigError(
                f"--dsv4x-resume-interval is {self.resume_interval}; give a multiple of {PAGE_TOKENS}, the page of the "
                f"radix cache, such as {below}."
            )
        if self.copy_timeout_s <= 0:
            raise ConfigError(
                f"--dsv4x-copy-timeout-s is {self.copy_timeout_s}; give a positive number of seconds."
            )
        if self.copy_delay_ms < 0:
            raise ConfigError(f"--dsv4x-copy-delay-ms is {self.copy_delay_ms}; it cannot be negative.")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Dsv4xConfig:
        """Raises ConfigError for text that is not a JSON object of known fields with values of the right type."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{CONFIG_VARIABLE} must hold a JSON object, not {type(values).__name__}.")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise ConfigError(f"{CONFIG_VARIABLE} has unknown fields {', '.join(unknown)}; known: {known}.")
        hints = get_type_hints(cls)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                raise ConfigError(f"{CONFIG_VARIABLE}: {name} is {value!r}, a {type(value).__name__}.")
        return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Is a JSON value of the annotated type? A whole number also fits where a fraction may stand."""
    if get_origin(hint) is Literal:
        return isinstance(value, str)
    kinds = set(get_args(hint)) or {hint}
    return type(value) in kinds or (type(value) is int and float in kinds)


def flag_name(field_name: str) -> str:
    """The command-line flag of a field: --enable-dsv4x for `enable`, else --dsv4x-<name>."""
    return "--enable-dsv4x" if field_name == "enable" else "--dsv4x-" + field_name.replace("_", "-")


def load_published() -> Dsv4xConfig:
    """The configuration that this process was given; the default (extension off) when there is none."""
    text = os.environ.get(CONFIG_VARIABLE)
    return Dsv4xConfig.from_json(text) if text else Dsv4xConfig()


def publish(config: Dsv4xConfig) -> None:
    """Makes `config` what `load_published` returns here and in every process started from here."""
    os.environ[CONFIG_VARIABLE] = config.to_json()


_TORCH_KERNEL_SWITCHES = {
    # Paths of SGLang 0.5.17 that exist only as CUDA kernels; each has a torch form behind its switch.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
    "SGLANG_OPT_USE_FUSED_STORE_CACHE": "0",
    # Window KV goes through the backend's store_cache instead of a fused CUDA kernel.
    "SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE": "1",
    # Metadata is built before the forward pass, not inside a captured graph.
    "SGLANG_PREP_IN_CUDA_GRAPH": "0",
}


def apply_process_environment(*, torch_kernels: bool, cuda: bool) -> None:
    """Sets the switches that SGLang reads from the environment, here and for the processes started from here.

    Call it before SGLang's model modules are imported: they freeze some of them. A value that the user has set to
    something else is an error where torch kernels cannot work with it.

    Raises: ConfigError naming the variable.
    """
    if torch_kernels:
        for name, value in _TORCH_KERNEL_SWITCHES.items():
            given = os.environ.get(name)
            if given is not None and _truth(given) != _truth(value):
                raise ConfigError(
                    f"{name}={given}: torch kernels (--dsv4x-kernels) need {name}={value}; unset it."
                )
            os.environ[name] = value
    if not cuda:
        os.environ.setdefault("SGLANG_DSV4_FP4_EXPERTS", "0")
        # More threads make the many small products of a tiny model slower, by up to 100x on two cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # A server that fails would wait a minute for CUDA to dump its state.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def sparse_prefill_switched_off() -> bool:
    """Has the user asked SGLang to prefill through its decode kernel (SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0)?"""
    return not _truth(os.environ.get("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "1"))


def plugin_filter() -> str | None:
    """SGLANG_PLUGINS, the user's list of the plug-ins that SGLang may load; None when there is none."""
    return os.environ.get("SGLANG_PLUGINS") or None


def platform_choice() -> str | None:
    """SGLANG_PLATFORM, the one platform that SGLang shall use; None when it may choose."""
    return os.environ.get("SGLANG_PLATFORM") or None


def _truth(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "y", "on", "t")
