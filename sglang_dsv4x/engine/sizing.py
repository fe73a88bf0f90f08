"""Seam: pool sizing. Tokens are clamped to what the host store may hold; too small an SWA pool is refused.

Everything else is SGLang's own arithmetic.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator, _DSV4PoolSizes
from sglang.srt.runtime_context import get_server_args

from ..config import Dsv4xConfig, load_published
from ..hicache.host_memory import host_memory
from ..jit_kernels.layouts import C4_ENTRIES_PER_PAGE, main_layout
from .hooks import Seam

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.8
"""Share of the free host memory that the store takes when --dsv4x-host-memory-gb does not say."""

TOKENS_PER_ENTRY = 4


class SizingError(ValueError):
    """The pools cannot serve; the message names the flag and the number that would do."""


def host_token_limit(config: Dsv4xConfig, c4_layers: int, page_size: int) -> int:
    """Most tokens, in whole pages, whose C4 rows fit the host memory that the store may take.

    One page of entries is SGLang's reserved page 0. Raises: SizingError when not even one page fits.
    """
    free = host_memory().free
    allowed = free * DEFAULT_SHARE if config.host_memory_gb is None else config.host_memory_gb * 2**30
    row = main_layout(C4_ENTRIES_PER_PAGE, config.storage).row_bytes
    entries = int(allowed // (c4_layers * row)) - C4_ENTRIES_PER_PAGE
    tokens = entries * TOKENS_PER_ENTRY // page_size * page_size
    if tokens < page_size:
        need = 2 * C4_ENTRIES_PER_PAGE * c4_layers * row / 2**30
        raise SizingError(
            f"The host store may take {allowed / 2**30:.3f} GiB, less than one page of {page_size} tokens needs "
            f"({need:.3f} GiB). Raise --dsv4x-host-memory-gb (free now: {free / 2**30:.2f} GiB) or use "
            "--dsv4x-tier off."
        )
    return tokens


def smallest_swa_tokens(chunk_tokens: int, page_size: int) -> int:
    """SWA tokens with which one request always makes progress, whatever the radix tree holds.

    A chunk's new pages and the page that a chunk may begin in, the window before it, which stays locked (a page,
    or two where it straddles a boundary), and the page that decode is about to open.
    """
    chunk_pages = -(-chunk_tokens // page_size)
    return (chunk_pages + 1 + 2 + 1) * page_size


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
    """SGLang's sizes, clamped by the host store."""

    def _compute_dsv4_sizes(self, full_token: int, page_size: int) -> _DSV4PoolSizes:
        config = load_published()
        if config.tier == "on":
            if self.num_layers_ca4 == 0:
                raise SizingError(
                    "This model has no C4 layer, so there is nothing to page: use --dsv4x-tier off."
                )
            limit = host_token_limit(config, self.num_layers_ca4, page_size)
            if full_token > limit:
                logger.warning(
                    "max_total_num_tokens is clamped from %d to %d: that is what the host store may hold "
                    "(--dsv4x-host-memory-gb).",
                    full_token,
                    limit,
                )
                full_token = limit
        sizes = super()._compute_dsv4_sizes(full_token, page_size)
        chunk = get_server_args().chunked_prefill_size
        needed = smallest_swa_tokens(chunk, page_size)
        if sizes.swa_max_total_num_tokens < needed:
            raise SizingError(
                f"The SWA pool has {sizes.swa_max_total_num_tokens} tokens; with chunks of {chunk} a request can "
                f"need {needed}, and SGLang's scheduler would wait for ever. Raise --max-total-tokens (now "
                f"{sizes.full_max_total_num_tokens}) or --swa-full-tokens-ratio (now {self.swa_ratio}) so that their "
                f"product is at least {needed}, or lower --chunked-prefill-size."
            )
        return sizes


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
        reason="tokens are clamped to what the host store may hold",
        hook=Dsv4xPoolConfigurator,
    ),
    Seam(
        path="sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator._compute_dsv4_sizes",
        signature="(self, full_token, page_size)",
        kind="read",
        reason="overridden by our configurator",
    ),
]
