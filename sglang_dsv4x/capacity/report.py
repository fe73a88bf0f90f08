"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..replay.table import aligned
from .machine import GIB
from .plan import TIER_ON, Plan

SCHEMA = 1


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything in the table, in bytes, tokens and seconds; per rank unless the name says node."""
    question, machine, settings = plan.question, plan.question.machine, plan.question.settings
    return {
        "kind": "sglang-dsv4x plan",
        "schema": SCHEMA,
        "version": __version__,
        "model": {"name": question.name, **vars(question.shape), "payload_bytes_per_request": plan.payload},
        "machine": {
            "gpus": machine.gpus,
            "tp_size": machine.tp,
            "dp_size": machine.dp,
            "dp_attention": machine.dp_attention,
            "gpu_memory_bytes": machine.gpu_memory,
            "mem_fraction_static": machine.mem_fraction,
            "weight_bytes": machine.weights,
            "weight_bytes_per_gpu": machine.weights_per_gpu,
            "host_memory_bytes": machine.host_memory,
            "device_budget_bytes": plan.budget.device,
            "host_budget_bytes": plan.budget.host,
        },
        "settings": vars(settings),
        "context": question.context,
        "sizes": plan.sizes._asdict(),
        "objects": [cost._asdict() for cost in plan.costs],
        "variants": [variant._asdict() for variant in plan.variants],
        "limit": plan.variants[0].limit,
        "token_limit": plan.variants[0].token_limit,
        "replicas": machine.dp,
        "host_bytes_needed_node": plan.host_bytes_node,
        "host_bytes_to_fill_device_node": plan.host_bytes_full_node,
        "break_even_context": plan.break_even,
        "traffic": None
        if plan.traffic is None
        else {
            "miss_rate": question.miss_rate,
            "step_s": question.step_s,
            "link": question.link._asdict(),
            **plan.traffic._asdict(),
        },
        "warnings": plan.warnings,
    }


def as_text(plan: Plan) -> str:
    """For people; several lines."""
    return "\n".join(
        [*_head(plan), "", *_variants(plan), "", *_objects(plan), "", *_needs(plan), *_warned(plan)]
    )


def _head(plan: Plan) -> list[str]:
    question, machine, shape = plan.question, plan.question.machine, plan.question.shape
    host = "not limited" if machine.host_memory is None else f"{machine.host_memory / GIB:g} GiB"
    return [
        f"{question.name}: {shape.layers} layers ({shape.c4_layers} C4, {shape.c128_layers} C128), "
        f"top-k {shape.top_k}; {question.context:,} tokens are {plan.payload / GIB:.3f} GiB of rows "
        f"({question.settings.index_dtype.upper()} index)",
        f"{machine.gpus} x {machine.gpu_memory / GIB:g} GiB, TP {machine.tp}, DP {machine.dp}"
        f"{' (attention)' if machine.dp_attention else ''}; weights {machine.weights / GIB:.1f} GiB, "
        f"{machine.weights_per_gpu / GIB:.1f} a GPU; --mem-fraction-static {machine.mem_fraction}: "
        f"{plan.budget.device / GIB:.1f} GiB a GPU for caches; host memory {host}",
    ]


def _variants(plan: Plan) -> list[str]:
    each = "" if plan.question.machine.dp == 1 else f", in each of {plan.question.machine.dp} replicas"
    rows = [
        (
            variant.name,
            f"{variant.requests:,}",
            f"{variant.tokens:,}",
            f"{variant.tokens / max(1, plan.variants[-2].tokens):.1f}x",
            f"{variant.device_bytes_per_token:,.1f}",
            variant.limit
            if variant.limit == variant.token_limit
            else f"{variant.limit}; tokens: {variant.token_limit}",
        )
        for variant in plan.variants
    ]
    running = plan.question.running
    kept = f"{running} running" if running else "that many running"
    return [
        f"Requests of {plan.question.context:,} tokens at once, and max_total_num_tokens with {kept}{each}:",
        *aligned([("", "requests", "tokens", "of stock", "B/token", "limited by"), *rows]),
    ]


def _objects(plan: Plan) -> list[str]:
    rows = [
        (
            cost.name,
            cost.where,
            f"{cost.per_token:,.1f}",
            f"{cost.per_request / 2**20:,.2f}",
            f"{cost.bytes / GIB:,.3f}",
        )
        for cost in plan.costs
    ]
    for where in ("device", "host"):
        mine = [cost for cost in plan.costs if cost.where == where]
        if mine:
            rows.append(
                (
                    "all",
                    where,
                    f"{sum(cost.per_token for cost in mine):,.1f}",
                    f"{sum(cost.per_request for cost in mine) / 2**20:,.2f}",
                    f"{sum(cost.bytes for cost in mine) / GIB:,.3f}",
                )
            )
    return [
        f"{plan.variants[0].name}, {plan.sizes.requests:,} requests, {plan.sizes.window_tokens:,} SWA tokens, "
        "per rank:",
        *aligned([("object", "where", "B/token", "MiB/request", "GiB"), *rows]),
    ]


def _needs(plan: Plan) -> list[str]:
    question, lines = plan.question, []
    if plan.variants[0].name == TIER_ON:
        lines.append(
            f"Host memory needed on the node: {plan.host_bytes_node / GIB:.1f} GiB for these requests"
            + (
                f", {plan.host_bytes_full_node / GIB:.1f} GiB to fill the device memory with tokens"
                if plan.host_bytes_full_node is not None
                else ""
            )
        )
        lines.append(
            "The tier pays from "
            + (
                f"{plan.break_even:,} tokens a request on"
                if plan.break_even
                else "no context of this model on"
            )
        )
    if plan.traffic is not None:
        moved = plan.traffic
        lines.append(
            f"Decode step of {plan.variants[0].requests:,} requests at a miss rate of {question.miss_rate:g}: "
            f"{moved.missed:,.0f} of {moved.selected:,} selected entries, {moved.bytes_to_device / 2**20:.1f} MiB "
            f"to the device, {moved.bytes_to_host / 2**20:.2f} MiB to the host; link busy {moved.link_s * 1e3:.2f} ms, "
            f"{moved.share:.0%} of a step of {question.step_s * 1e3:g} ms, nothing overlapped"
        )
    return lines


def _warned(plan: Plan) -> list[str]:
    return ["", *(f"warning: {text}" for text in plan.warnings)] if plan.warnings else []
