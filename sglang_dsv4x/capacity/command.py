"""`sglang-dsv4x plan`: what fits on a machine, before there is one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .. import configs
from .byte_model import Settings
from .errors import DeviceMemoryError, PlanError
from .machine import GIB, GPUS, LINK, Machine, default_mem_fraction, gib_bytes, gpu_memory, weight_bytes
from .plan import Plan, make_plan
from .question import Question
from .report import as_json, as_text
from .shape import CacheShape
from .traffic import MISS_RATE, STEP_S

CHUNK_TOKENS = 8192
RESUME_GIB = Settings.resume_memory / GIB
TP_SIZES = (1, 2, 4, 8)
"""One node."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `run` reads. Flags that the server has too carry its names."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Bytes per token and per request by object, and the requests and tokens that fit, with the tier, without it "
        "and\nby stock SGLang's own formula. Nothing is started and no GPU is needed."
    )
    parser.epilog = (
        "example: one million tokens of Flash on two H200, with 400 GiB of host memory\n"
        "  sglang-dsv4x plan --model flash --context 1048576 --gpu h200 --tp-size 2 --host-memory-gb 400"
    )
    what = parser.add_argument_group("what is served")
    what.add_argument(
        "--model",
        default="flash",
        help="flash, pro, or any DeepSeek-V4 config.json or its folder (default: flash)",
    )
    what.add_argument("--context", type=int, help="tokens of one request (default: the model's longest)")
    what.add_argument("--requests", type=int, help="that must run at once: an error when they do not fit")
    what.add_argument(
        "--max-running-requests",
        type=int,
        help="limit of the server (default: as many as fit at this context)",
    )
    what.add_argument(
        "--chunked-prefill-size", type=int, default=CHUNK_TOKENS, help=f"default: {CHUNK_TOKENS}"
    )
    on = parser.add_argument_group("the machine, one node")
    on.add_argument(
        "--gpu",
        help="; ".join(f"{name}: {gpu.memory / GIB:g} GiB" for name, gpu in GPUS.items())
        + " (default: h200)",
    )
    on.add_argument("--gpu-memory", type=float, metavar="GIB", help="of one GPU, instead of --gpu")
    on.add_argument("--gpus", type=int, metavar="N", help="GPUs in all, instead of --tp-size")
    on.add_argument(
        "--tp-size",
        "--tp",
        type=int,
        help="GPUs of one replica (default: the fewest on which a request fits)",
    )
    on.add_argument(
        "--dp-size", "--dp", type=int, default=1, help="replicas, each of --tp-size GPUs (default: 1)"
    )
    on.add_argument(
        "--enable-dp-attention",
        action="store_true",
        help="--tp-size GPUs in all, caches in --dp-size groups of them",
    )
    on.add_argument(
        "--weights", type=float, metavar="GIB", help="one copy (default: the released model's, or the files')"
    )
    on.add_argument(
        "--host-memory-gb",
        "--dsv4x-host-memory-gb",
        type=float,
        metavar="GIB",
        help="of the node, for the host stores of all its ranks (default: not limited; the plan says what is needed)",
    )
    on.add_argument(
        "--mem-fraction-static", type=float, help="default: SGLang's own, from chunk and GPU memory"
    )
    tier = parser.add_argument_group("the tier")
    tier.add_argument(
        "--dsv4x-tier", choices=("on", "off"), default="on", help="plan for this one (default: on)"
    )
    tier.add_argument(
        "--hot-entries",
        "--dsv4x-hot-entries",
        type=int,
        metavar="N",
        help="per C4 layer (default: twice the fewest with which every step fits)",
    )
    tier.add_argument("--dsv4x-fetch-unit", type=int, choices=(1, 2, 4, 8), default=2, help="default: 2")
    tier.add_argument("--dsv4x-index-dtype", choices=("fp4", "fp8"), default="fp4", help="default: fp4")
    tier.add_argument(
        "--dsv4x-resume-memory-gb",
        type=float,
        default=RESUME_GIB,
        metavar="GIB",
        help=f"host memory of each rank for resume points; 0: none (default: {RESUME_GIB:g})",
    )
    link = parser.add_argument_group("fetches")
    link.add_argument(
        "--miss-rate",
        type=float,
        default=MISS_RATE,
        help=f"share of selected entries that are not hot (default: {MISS_RATE}, measured by others on GLM-5.1)",
    )
    link.add_argument(
        "--step-ms",
        type=float,
        default=STEP_S * 1e3,
        help="decode step without fetches (default: %(default)s, stock, 16 requests of 128K, shrunken MoE, one H200)",
    )
    link.add_argument(
        "--link-gb-per-s",
        type=float,
        help="that gathers of neighbouring host rows reach (default: 41.3, measured on PCIe 5.0 x16)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw requests against context (.png, .svg or .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 1, with one sentence on stderr, when there is none."""
    try:
        plan = plan_of(args)
        if args.plot is not None:
            from .plot import draw

            draw(plan.question, args.plot)
    except (PlanError, configs.UnknownConfigError) as error:
        print(f"sglang-dsv4x plan: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan))
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    """On --tp-size GPUs a replica, or on the fewest with which the requests fit. Raises: PlanError,
    UnknownConfigError."""
    given = _given_tp_size(args)
    sizes = TP_SIZES if given is None else (given,)
    for tp in sizes:
        try:
            return make_plan(question_of(args, tp))
        except DeviceMemoryError:
            if tp == sizes[-1]:
                raise
    raise AssertionError("unreachable: the last size raises")


def _given_tp_size(args: argparse.Namespace) -> int | None:
    if args.gpus is None:
        return args.tp_size  # type: ignore[no-any-return]
    replicas = 1 if args.enable_dp_attention else max(1, args.dp_size)
    if args.tp_size not in (None, args.gpus // replicas) or args.gpus % replicas:
        raise PlanError(
            f"--gpus {args.gpus} does not agree with --tp-size {args.tp_size} and --dp-size {args.dp_size}: leave "
            "--tp-size out, or --gpus."
        )
    return args.gpus // replicas


def _resume_bytes(gib: float) -> int:
    return 0 if gib == 0 else gib_bytes("--dsv4x-resume-memory-gb", gib)


def question_of(args: argparse.Namespace, tp: int) -> Question:
    """The parsed arguments with `tp` GPUs a replica, or in all with DP attention."""
    shape = CacheShape.of(configs.load(args.model))
    memory = gpu_memory(args.gpu, args.gpu_memory)
    context = shape.max_context if args.context is None else args.context
    fraction = args.mem_fraction_static
    machine = Machine(
        gpu_memory=memory,
        tp=tp,
        dp=args.dp_size,
        dp_attention=args.enable_dp_attention,
        weights=weight_bytes(args.model, args.weights),
        host_memory=None
        if args.host_memory_gb is None
        else gib_bytes("--host-memory-gb", args.host_memory_gb),
        mem_fraction=default_mem_fraction(memory, args.chunked_prefill_size, tp)
        if fraction is None
        else fraction,
    )
    link = LINK
    if args.link_gb_per_s is not None:
        link = link._replace(bytes_per_s=args.link_gb_per_s * 1e9)
    return Question(
        name=args.model,
        shape=shape,
        settings=Settings(
            tier=args.dsv4x_tier == "on",
            index_dtype=args.dsv4x_index_dtype,
            fetch_unit=args.dsv4x_fetch_unit,
            hot_entries=args.hot_entries,
            chunk_tokens=args.chunked_prefill_size,
            context_tokens=context,
            resume_memory=_resume_bytes(args.dsv4x_resume_memory_gb),
        ),
        machine=machine,
        context=context,
        requests=args.requests,
        running=args.max_running_requests,
        miss_rate=args.miss_rate,
        step_s=args.step_ms / 1e3,
        link=link,
    )
