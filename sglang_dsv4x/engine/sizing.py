"""Seam: pool sizing. Every pool is charged what it will hold (`capacity/byte_model.py`), page padding included.

The SWA pool is sized by need; a --swa-full-tokens-ratio that the user gave stays a share of the tokens. What was
predicted is compared with what was allocated once the pools exist.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.pool_configurator import (
    DSV4PoolConfigurator,
    MemoryPoolConfig,
    _get_dsv4_compress_state_dtype_sizes,
)

from ..capacity.byte_model import (
    C4_STATE_RING,
    PAGE,
    Settings,
    Sizes,
    objects,
    resume_bytes,
    total,
)
from ..capacity.errors import PlanError
from ..capacity.fit import DEVICE, HOST, Budget, Fitter
from ..capacity.shape import CacheShape
from ..capacity.window import smallest_window_tokens
from ..config import Dsv4xConfig, load_published
from ..hicache.host_memory import host_memory
from .allocated import allocated_bytes, check_allocation
from .hooks import Seam

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.8
"""Share of the free host memory that the store takes when --dsv4x-host-memory-gb does not say."""

GIB = 1 << 30
_UNLIMITED = 1 << 62


class SizingError(ValueError):
    """The pools cannot serve; the message names the flag and the number that would do."""


@dataclass
class SizedPoolConfig(MemoryPoolConfig):
    """SGLang's sizes, and why they are not larger."""

    limit: str = ""
    """What keeps more tokens from fitting, with its flag."""
    window_rule: str = ""
    """How the SWA pool's size came about."""


def describe(config: MemoryPoolConfig) -> str:
    """One line for the banner. Raises: SizingError when another plug-in has sized the pools."""
    if not isinstance(config, SizedPoolConfig):
        raise SizingError(
            f"The pools were sized by {type(config).__module__}, not by --enable-dsv4x. Run `sglang-dsv4x check`."
        )
    return (
        f"tokens limited by {config.limit}; SWA pool {config.swa_max_total_num_tokens} tokens: {config.window_rule}; "
        "allocated bytes as predicted"
    )


class HostLimit:
    """Host memory that the C4 store and the resume points may take, in bytes, and in words."""

    def __init__(self, config: Dsv4xConfig, resume: int) -> None:
        """`resume`: bytes of the resume points, which are not part of --dsv4x-host-memory-gb."""
        memory = host_memory()
        by = "the cgroup leaves" if memory.cgroup_free == memory.free else "are available"
        free = f"{memory.free / GIB:.2f} GiB {by}"
        self.free = memory.free
        self.allowed = int(memory.free * DEFAULT_SHARE)
        self.words = f"{HOST} ({free}, {DEFAULT_SHARE:.0%} of it used; --dsv4x-host-memory-gb)"
        if config.host_memory_gb is not None:
            given = int(config.host_memory_gb * GIB) + resume
            self.allowed = min(given, memory.free)
            self.words = f"{HOST} (--dsv4x-host-memory-gb {config.host_memory_gb:g})"
            if given > memory.free:
                self.words = f"{HOST} ({free}, less than --dsv4x-host-memory-gb {config.host_memory_gb:g})"


def cache_shape(kvc: Any) -> CacheShape:
    """Layers of this server's model. `kvc`: SGLang's KVCacheConfigurator."""
    ratios = kvc.model_config.compress_ratios[kvc.layer_info.start_layer : kvc.layer_info.end_layer]
    return CacheShape(
        layers=len(ratios),
        c4_layers=sum(ratio == 4 for ratio in ratios),
        c128_layers=sum(ratio == 128 for ratio in ratios),
        top_k=int(kvc.model_config.hf_text_config.index_topk),
        max_context=kvc.model_config.context_len,
    )


def cache_settings(kvc: Any, config: Dsv4xConfig) -> Settings:
    """This server's settings for the byte model."""
    return Settings(
        tier=config.tier == "on",
        index_dtype=config.index_dtype,
        storage=config.storage,
        fetch_unit=config.fetch_unit,
        hot_entries=config.hot_entries,
        chunk_tokens=kvc.server_args.chunked_prefill_size,
        context_tokens=kvc.model_config.context_len,
        state_bytes=_get_dsv4_compress_state_dtype_sizes()[0],
        checks=config.checks == "step",
        resume_memory=0 if kvc.server_args.disable_radix_cache else int(config.resume_memory_gb * GIB),
        cuda=torch.device(kvc.device).type == "cuda",
    )


def longest_prompt(total_tokens: int, page_size: int) -> int:
    """Prompt tokens with which SGLang's scheduler can start a request when nothing else runs.

    `PrefillAdder.add_one_req` starts a request when its prompt, its output of at least one token and one page more
    are fewer than all tokens; pages are counted whole, so that a prompt may have all of them but two.
    """
    return (total_tokens // page_size - 2) * page_size


def limit_prompts(result: None, self: Scheduler) -> None:
    """A longer prompt is refused when it arrives: SGLang 0.5.17 would keep it, and all behind it, waiting for ever."""
    longest = longest_prompt(self.max_total_num_tokens, self.page_size)
    # SGLang refuses a prompt of max_req_input_len tokens and more.
    self.max_req_input_len = min(self.max_req_input_len, longest + 1)


class Dsv4xPoolConfigurator(DSV4PoolConfigurator):
    """SGLang's interface, our bytes."""

    def __init__(self, kvc: Any) -> None:
        super().__init__(kvc)
        config = load_published()
        self.shape = cache_shape(kvc)
        self.settings = cache_settings(kvc, config)
        if self.settings.tier and self.shape.c4_layers == 0:
            raise SizingError(
                "This model has no C4 layer, so there is nothing to page: use --dsv4x-tier off."
            )
        self.host = HostLimit(config, resume_bytes(self.shape, self.settings))
        self.ratio_given: bool = kvc.server_args.dsv4x_swa_ratio_given
        self.device_bytes: int | None = None
        self.fraction = kvc.server_args.mem_fraction_static

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """Most tokens that fit `available_bytes` of device memory and the host store. Raises: SizingError."""
        self.device_bytes = available_bytes
        return self._sized(None)

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        """The same, and at most `max_total_num_tokens`. Raises: SizingError."""
        return self._sized(max_total_num_tokens)

    def _sized(self, cap: int | None) -> SizedPoolConfig:
        fitter, requests = self._fitter(), self._requests()
        fit = fitter.most_tokens(requests)
        if fit.tokens == 0:
            raise SizingError(self._why_nothing_fits(fitter, requests))
        tokens, limit = fit.tokens, self._words(fit.limit)
        if cap is not None and cap < tokens:
            tokens, limit = cap // PAGE * PAGE, "--max-total-tokens"
            if tokens == 0:
                raise SizingError(f"--max-total-tokens is {cap}, less than one page: give at least {PAGE}.")
        spare = fit.limit != DEVICE or tokens < fit.tokens
        sizes, rule = self._window(fitter, fitter.sizes(tokens, requests), spare)
        self._refuse_small_window(sizes)
        logger.info("%d tokens, %d in the SWA pool (%s); limited by %s", *sizes[:2], rule, limit)
        return SizedPoolConfig(
            max_total_num_tokens=sizes.tokens,
            full_max_total_num_tokens=sizes.tokens,
            swa_max_total_num_tokens=sizes.window_tokens,
            c4_max_total_num_tokens=sizes.tokens // 4,
            c128_max_total_num_tokens=sizes.tokens // 128,
            # SGLang counts rings by 128-token pages and addresses them by 256-token ones.
            c4_state_pool_size=sizes.window_tokens // PAGE * C4_STATE_RING,
            limit=limit,
            window_rule=rule,
        )

    def _requests(self) -> int:
        requests = self.requested_max_running_requests_per_worker
        if requests is None:
            raise SizingError("Give --max-running-requests: the pools are sized for it.")
        return int(requests)

    def _fitter(self) -> Fitter:
        device = _UNLIMITED if self.device_bytes is None else self.device_bytes
        share = self.swa_ratio if self.ratio_given else None
        return Fitter(self.shape, self.settings, Budget(device, self.host.allowed), share)

    def _window(self, fitter: Fitter, sizes: Sizes, spare: bool) -> tuple[Sizes, str]:
        """Sizes with the SWA pool's final size, and how it came about."""
        if self.ratio_given:
            return sizes, f"--swa-full-tokens-ratio {self.swa_ratio:g}"
        # Device memory that tokens cannot use: a share of them, as in SGLang, keeps more prefixes ready for a hit.
        share = sizes._replace(window_tokens=int(sizes.tokens * self.swa_ratio) // PAGE * PAGE)
        if spare and share.window_tokens > sizes.window_tokens and fitter.limit_of(share) is None:
            return share, f"SGLang's share, {self.swa_ratio:g}"
        return sizes, f"what {sizes.requests} running requests and a chunk need"

    def _refuse_small_window(self, sizes: Sizes) -> None:
        chunk = self.settings.chunk_tokens
        needed = smallest_window_tokens(chunk)
        if sizes.window_tokens < needed:
            raise SizingError(
                f"The SWA pool has {sizes.window_tokens} tokens; with chunks of {chunk} a request can need {needed}, "
                f"and SGLang's scheduler would wait for ever. Raise --max-total-tokens (now {sizes.tokens}) or "
                f"--swa-full-tokens-ratio (now {self.swa_ratio}) so that their product is at least {needed}, or lower "
                "--chunked-prefill-size."
            )

    def _words(self, limit: str) -> str:
        """The limit with the flag that moves it."""
        if limit == DEVICE:
            return f"{DEVICE} (--mem-fraction-static {self.fraction:g})"
        return self.host.words if limit == HOST else limit

    def _why_nothing_fits(self, fitter: Fitter, requests: int) -> str:
        least = fitter.sizes(PAGE, requests)
        try:
            found = objects(self.shape, self.settings, least)
        except PlanError as error:
            return str(error)
        host, points = total(found, "host"), resume_bytes(self.shape, self.settings)
        if host > self.host.allowed:
            return (
                f"The host memory that may be taken, {self.host.allowed / GIB:.3f} GiB ({self.host.free / GIB:.2f} "
                f"free), is less than resume points ({points / GIB:.3f} GiB) and the C4 rows of one page ("
                f"{(host - points) / GIB:.3f} GiB) need. Raise --dsv4x-host-memory-gb, lower --dsv4x-resume-memory-gb, "
                "or use --dsv4x-tier off."
            )
        largest = max((item for item in found if item.where == "device"), key=lambda item: item.bytes)
        return (
            f"The device memory left for caches ({fitter.budget.device / GIB:.3f} GiB) does not hold one page beside "
            f"what {requests} running requests take ({total(found, 'device') / GIB:.3f} GiB, most of it "
            f"{largest.name}). Lower --max-running-requests, --chunked-prefill-size or --dsv4x-hot-entries, or raise "
            "--mem-fraction-static."
        )


def check_server(result: Any, kvc: Any) -> None:
    """After SGLang has built its pools (`result`: KVCacheConfigResult). Raises: AllocationError, as
    `check_allocation`."""
    config = load_published()
    sizes = Sizes(result.max_total_num_tokens, result.swa_max_total_num_tokens, result.max_running_requests)
    predicted = objects(cache_shape(kvc), cache_settings(kvc, config), sizes)
    held = allocated_bytes(
        result.token_to_kv_pool, result.token_to_kv_pool_allocator, result.req_to_token_pool
    )
    check_allocation(predicted, held)


SEAMS: list[Any] = [
    Seam(
        path="sglang.srt.managers.scheduler.Scheduler.init_model_worker",
        signature="(self)",
        kind="after",
        reason="a prompt that fits the pool but can never be scheduled is refused",
        hook=limit_prompts,
    ),
    Seam(
        path="sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator",
        signature="class (self, kvc)",
        kind="replace",
        reason="every pool is charged what it holds, and tokens are limited by the host store too",
        hook=Dsv4xPoolConfigurator,
    ),
    Seam(
        path="sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator.calculate_pool_sizes",
        signature="(self, available_bytes, page_size)",
        kind="read",
        reason="overridden by our configurator",
    ),
    Seam(
        path="sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator.calculate_pool_sizes_from_max_tokens",
        signature="(self, max_total_num_tokens, page_size)",
        kind="read",
        reason="overridden by our configurator",
    ),
]
