"""A plan: what fits on a machine, with the tier, without it and in stock SGLang, and what to watch for."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from . import stock
from .byte_model import PAGE, Sizes, objects, payload_bytes, tier_shape, total
from .errors import DeviceMemoryError, PlanError
from .fit import DEVICE, HOST, RUNNING, Budget, Fitter, largest, whole_pages
from .machine import GIB
from .question import Question
from .traffic import Traffic, decode_traffic

TIER_ON, TIER_OFF = "tier on", "tier off"
STOCK, STOCK_TUNED = "stock SGLang", "stock, best SWA ratio"

BUSY_LINK = 0.5
"""Share of a step above which a plan warns: overlap with compute cannot hide much more."""


class Variant(NamedTuple):
    """One way to serve, per rank."""

    name: str
    requests: int
    """Of the context, running at once."""
    tokens: int
    """max_total_num_tokens with that many running requests."""
    limit: str
    """What keeps more requests from fitting."""
    token_limit: str
    """What keeps more tokens from fitting."""
    device_bytes_per_token: float
    host_bytes: int


class Cost(NamedTuple):
    """One object of the tier-on server (tier-off for a model without C4 layers)."""

    name: str
    where: str
    per_token: float
    """Bytes that one more token takes."""
    per_request: float
    """Bytes that one more running request takes, its tokens left out."""
    bytes: int
    """With the planned requests."""


class Plan(NamedTuple):
    """The answer, per rank unless said otherwise."""

    question: Question
    budget: Budget
    variants: list[Variant]
    """The planned one first."""
    costs: list[Cost]
    sizes: Sizes
    host_bytes_node: int
    """Host memory that the planned requests need, all ranks of the node."""
    host_bytes_full_node: int | None
    """Host memory with which the device memory is the limit; None without a tier."""
    payload: float
    """Bytes of one request's rows, without padding and states."""
    break_even: int | None
    """Shortest context, in tokens, from which on the tier serves more requests; None: none up to the model's."""
    traffic: Traffic | None
    warnings: list[str]


def make_plan(question: Question) -> Plan:
    """Raises: PlanError, one sentence, when nothing can be served or the asked requests do not fit."""
    machine, settings, shape = question.machine, question.settings, question.shape
    if machine.device_budget <= 0:
        raise DeviceMemoryError(
            f"The weights ({machine.weights_per_gpu / GIB:.1f} GiB on each of {machine.gpus} GPUs) leave no memory "
            f"of {machine.gpu_memory / GIB:.1f} GiB at --mem-fraction-static {machine.mem_fraction}: use more GPUs, or "
            "a higher fraction."
        )
    if settings.tier:
        tier_shape(shape, settings, whole_pages(question.context), 1)
    fitter, resident = _fitters(question)
    budget = fitter.budget
    variants = variants_of(question)
    planned = variants[0]
    _refuse_what_does_not_fit(question, fitter, planned)
    sizes = fitter.sizes(planned.requests * whole_pages(question.context), planned.requests)
    unlimited = replace(fitter, budget=Budget(budget.device, None))
    full = None
    if settings.tier:
        full = _variant(TIER_ON, unlimited, question).host_bytes * machine.gpus
    traffic = None
    if settings.tier:
        traffic = decode_traffic(
            shape,
            settings,
            question.link,
            planned.requests,
            question.context,
            question.miss_rate,
            question.step_s,
        )
    plan = Plan(
        question=question,
        budget=budget,
        variants=variants,
        costs=_costs(fitter, sizes),
        sizes=sizes,
        host_bytes_node=total(objects(shape, settings, sizes), "host") * machine.gpus,
        host_bytes_full_node=full,
        payload=payload_bytes(shape, question.context, settings.index_dtype),
        break_even=_break_even(unlimited, resident) if settings.tier else None,
        traffic=traffic,
        warnings=[],
    )
    plan.warnings.extend(_warnings(plan))
    return plan


def variants_of(question: Question) -> list[Variant]:
    """Every way to serve, the planned one first: with the tier, without it, stock, and stock at its best."""
    fitter, resident = _fitters(question)
    variants = [_variant(TIER_ON, fitter, question)] if question.settings.tier else []
    return [*variants, _variant(TIER_OFF, resident, question), *_stock(question, resident)]


def _fitters(question: Question) -> tuple[Fitter, Fitter]:
    """With the question's settings, and with everything resident."""
    budget = Budget(question.machine.device_budget, question.machine.host_budget)
    fitter = Fitter(question.shape, question.settings, budget)
    return fitter, replace(fitter, settings=replace(question.settings, tier=False, hot_entries=None))


def _variant(name: str, fitter: Fitter, question: Question) -> Variant:
    fit = fitter.most_requests(question.context, question.running)
    running = question.running or max(1, fit.requests)
    most = fitter.most_tokens(running)
    sizes = fitter.sizes(max(PAGE, most.tokens), running)
    found = objects(fitter.shape, fitter.settings, sizes)
    price = sum(cost.per_token for cost in _costs(fitter, sizes) if cost.where == "device")
    host = total(found, "host") if most.tokens else 0
    return Variant(name, fit.requests, most.tokens, fit.limit, most.limit, price, host)


def _stock(question: Question, resident: Fitter) -> list[Variant]:
    """Stock's own formula at its default SWA ratio, and at the lowest that holds what its requests need."""
    shape, each = question.shape, whole_pages(question.context)
    device, state = resident.budget.device, question.settings.state_bytes
    top = question.running or 1 << 20

    def at(requests: int, tuned: bool) -> stock.StockSizes:
        if not tuned:
            return stock.sizes(shape, device, requests, state_bytes=state)
        need = resident.needed_window(requests)
        return stock.best_tuned(shape, device, requests, need, state_bytes=state)

    def holds(requests: int, tuned: bool) -> bool:
        found = at(requests, tuned)
        need = resident.needed_window(requests)
        return found.tokens >= requests * each and found.window_tokens >= need

    variants = []
    for name, tuned in ((STOCK, False), (STOCK_TUNED, True)):
        requests = largest(lambda n, tuned=tuned: holds(n, tuned), top)  # type: ignore[misc]
        found = at(question.running or max(1, requests), tuned)
        price = stock.bytes_per_token(shape, found.ratio, state_bytes=state)
        limit = RUNNING if requests == top else DEVICE
        variants.append(Variant(name, requests, found.tokens, limit, DEVICE, price, 0))
    return variants


_HOT = ("C4 KV, hot", "C4 KV, tables", "C4 KV, scratch")


def _costs(fitter: Fitter, sizes: Sizes) -> list[Cost]:
    """By differences: what a thousand pages more, or one running request more, would take."""
    shape, settings = fitter.shape, fitter.settings
    probe = replace(settings, hot_entries=None)

    def of(tokens: int, requests: int) -> dict[str, int]:
        return {item.name: item.bytes for item in objects(shape, probe, fitter.sizes(tokens, requests))}

    # From enough tokens on, the default number of hot entries no longer follows the number of entries.
    tokens, requests, pages = max(sizes.tokens, 1 << 30), sizes.requests, 1000 * PAGE
    here, more, one_more = of(tokens, requests), of(tokens + pages, requests), of(tokens, requests + 1)
    given = settings.hot_entries is not None

    def per_request(name: str) -> int:
        return 0 if given and name in _HOT else one_more[name] - here[name]

    return [
        Cost(
            item.name,
            item.where,
            (more[item.name] - here[item.name]) / pages,
            per_request(item.name),
            item.bytes,
        )
        for item in objects(shape, settings, sizes)
    ]


def _break_even(tiered: Fitter, resident: Fitter) -> int | None:
    """Whole pages; the tier's gain rises with the context, so bisection finds where it starts."""
    pages = tiered.shape.max_context // PAGE

    def gains(context: int) -> bool:
        return tiered.most_requests(context).requests > resident.most_requests(context).requests

    if not gains(pages * PAGE):
        return None
    return PAGE * (largest(lambda n: not gains(n * PAGE), pages) + 1)


def _refuse_what_does_not_fit(question: Question, fitter: Fitter, planned: Variant) -> None:
    wanted = question.requests or 1
    if planned.requests >= wanted:
        return
    each = whole_pages(question.context)
    found = objects(fitter.shape, fitter.settings, fitter.sizes(wanted * each, wanted))
    device, host = total(found, "device"), total(found, "host")
    what = f"{wanted} request{'s' if wanted > 1 else ''} of {question.context} tokens"
    if device > fitter.budget.device:
        raise DeviceMemoryError(
            f"{what} need {device / GIB:.2f} GiB of device memory on each GPU and "
            f"{fitter.budget.device / GIB:.2f} GiB are left beside the weights: plan for fewer or shorter requests, or "
            "more GPUs."
        )
    assert fitter.budget.host is not None
    gpus = question.machine.gpus
    raise PlanError(
        f"{what} need {host * gpus / GIB:.2f} GiB of host memory ({gpus} rank{'s' if gpus > 1 else ''}) and "
        f"{fitter.budget.host * gpus / GIB:.2f} GiB are given: raise --host-memory-gb, or plan for fewer or shorter "
        "requests."
    )


def _warnings(plan: Plan) -> list[str]:
    question, said = plan.question, []
    if question.shape.c4_layers and question.settings.tier:
        on, off = plan.variants[0], plan.variants[1]
        if on.requests <= off.requests:
            why = "the host memory is too small" if on.limit == HOST else "the context is too short"
            said.append(
                f"The tier buys nothing here: {on.requests} requests with it, {off.requests} without; {why}"
                + (f" (it pays from about {plan.break_even:,} tokens on)." if plan.break_even else ".")
            )
        if on.limit == HOST and plan.host_bytes_full_node is not None:
            said.append(
                f"Host memory is the limit: {plan.host_bytes_full_node / GIB:.1f} GiB would fill the device memory."
            )
    if plan.traffic is not None:
        share = plan.traffic.share
        if share > 1:
            said.append(
                f"The link is too slow: fetches take {share:.0%} of a decode step of {question.step_s * 1e3:g} ms, so "
                "decode would wait for them. Plan for fewer requests, more hot entries, or a faster link."
            )
        elif share > BUSY_LINK:
            said.append(
                f"The link is busy {share:.0%} of a decode step: most of that shows in token latency."
            )
    if question.machine.gpus > 1:
        said.append(
            "A server with --enable-dsv4x still refuses --tp-size, --dp-size and --enable-dp-attention above 1: these "
            "are the bytes that each rank would hold."
        )
    return said
