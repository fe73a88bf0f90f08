"""SGLang's paged allocators without Triton, which has no CPU backend.

Only the two methods that launch a Triton kernel are replaced; pages are chosen exactly as by
`alloc_extend_kernel` and `alloc_decode_kernel` (sglang/kernels/ops/memory/allocator.py), so schedules, page ids and
the radix tree are the same as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.utils.common import get_num_new_pages


def extend_locations(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    extend_num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Locations of the tokens [prefix_lens[i], seq_lens[i]) of each request i, requests one after the other.

    The last page of the prefix is filled up first; then pages are taken from the front of `free_pages`, request by
    request. A formula per token for the three parts of SGLang's `alloc_extend_kernel`.

    Args:
        prefix_lens, seq_lens: [requests] integer, tokens; prefix_lens <= seq_lens.
        last_loc: [requests] integer, location of the last prefix token, -1 where there is none.
        free_pages: [pages] int64 page ids, at least as many as the requests need.
        extend_num_tokens: sum of seq_lens - prefix_lens.
        page_size: tokens in a page.

    Returns: [extend_num_tokens] int64. Changes nothing. Raises RuntimeError when `extend_num_tokens` is not that sum.
    """
    prefix, end = prefix_lens.long(), seq_lens.long()
    extend = end - prefix
    pages_before = (prefix + page_size - 1) // page_size
    new_pages = (end + page_size - 1) // page_size - pages_before

    request = torch.repeat_interleave(extend, output_size=extend_num_tokens)
    offset = torch.arange(extend_num_tokens, device=end.device) - (extend.cumsum(0) - extend)[request]
    position = prefix[request] + offset
    new_page = position // page_size - pages_before[request]

    locations = last_loc.long()[request] + 1 + offset
    on_new_page = new_page >= 0
    taken = (new_pages.cumsum(0) - new_pages)[request] + new_page
    locations[on_new_page] = free_pages[taken[on_new_page]] * page_size + position[on_new_page] % page_size
    return locations


def decode_locations(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Location of each request's newest token, as SGLang's `alloc_decode_kernel`.

    The one after `last_loc`, or, where the token opens a page, the start of the next page of `free_pages`.

    Args:
        seq_lens: [requests] integer, tokens including the new one.
        last_loc: [requests] integer, location of the token before it.
        free_pages: [pages] int64 page ids, at least as many as requests open a page.
        page_size: tokens in a page.

    Returns: [requests] int64. Changes nothing.
    """
    locations = last_loc.long() + 1
    opens_page = (seq_lens - 1) % page_size == 0
    locations[opens_page] = free_pages[: int(opens_page.sum())] * page_size
    return locations


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's `PagedTokenToKVPoolAllocator` with both kernels in torch. State and page order are the parent's."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """[extend_num_tokens] int64 locations, see `extend_locations`; takes their pages off the free list.

        None, and no page is taken, when too few are free.
        """
        if self.debug_mode:
            assert torch.all((last_loc + 1) % self.page_size == prefix_lens % self.page_size)
        # The parent sorts under this very condition; a later or rarer sort would hand out other pages than a GPU.
        if self.need_sort and extend_num_tokens // self.page_size + len(prefix_lens) + 1 > len(
            self.free_pages
        ):
            self.merge_and_sort_free()
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages > len(self.free_pages):
            return None
        locations = extend_locations(
            prefix_lens, seq_lens, last_loc, self.free_pages, extend_num_tokens, self.page_size
        )
        self._take(num_new_pages, locations)
        return locations

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """[requests] int64 locations, see `decode_locations`; takes opened pages off the free list.

        None, and no page is taken, when too few are free.
        """
        if self.debug_mode:
            assert torch.all((last_loc + 2) % self.page_size == seq_lens % self.page_size)
        if self.need_sort and len(seq_lens) > len(self.free_pages):
            self.merge_and_sort_free()
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if num_new_pages > len(self.free_pages):
            return None
        locations = decode_locations(seq_lens, last_loc, self.free_pages, self.page_size)
        self._take(num_new_pages, locations)
        return locations

    def _take(self, num_pages: int, locations: torch.Tensor) -> None:
        if self.debug_mode:
            assert len(torch.unique(locations)) == len(locations)
        self.free_pages = self.free_pages[num_pages:]


class TorchSWAAllocator(SWATokenToKVPoolAllocator):
    """SGLang's `SWATokenToKVPoolAllocator` over two `TorchPagedAllocator`s, or the parent's own where pages are 1."""

    full_attn_allocator: BaseTokenToKVPoolAllocator
    swa_attn_allocator: BaseTokenToKVPoolAllocator

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: BaseSWAKVPool,
        need_sort: bool,
    ):
        """`size`, `size_swa`: tokens of the full and of the SWA pool; `page_size`: tokens."""
        super().__init__(size, size_swa, page_size, dtype, device, kvcache, need_sort)
        if page_size == 1:
            return
        # The parent names its inner classes itself; both are as new here, so nothing is lost with them.
        self.full_attn_allocator = TorchPagedAllocator(
            size, page_size, dtype, device, self.full_attn_allocator.get_kvcache(), need_sort
        )
        self.swa_attn_allocator = TorchPagedAllocator(
            size_swa, page_size, dtype, device, self.swa_attn_allocator.get_kvcache(), need_sort
        )


def make_allocator(
    size: int,
    *,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    kvcache: Any,
    need_sort: bool,
) -> BaseTokenToKVPoolAllocator:
    """The allocator for a pool, called as SGLang calls what `get_paged_allocator_cls` returns.

    That call carries one size only, so the SWA pool's is read off the pool. Raises ValueError for a model with
    window layers only, for which SGLang passes 0.
    """
    if isinstance(kvcache, BaseSWAKVPool):
        if size == 0:
            raise ValueError(
                "The dsv4x_cpu platform does not serve models in which every layer is a window layer."
            )
        return TorchSWAAllocator(size, swa_tokens(kvcache), page_size, dtype, device, kvcache, need_sort)
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


def swa_tokens(pool: BaseSWAKVPool) -> int:
    """Tokens that a pool's SWA part holds; SGLang's pools name it differently. Raises TypeError for unknown ones."""
    for name in ("swa_size", "size_swa"):
        if (tokens := getattr(pool, name, None)) is not None:
            return int(tokens)
    raise TypeError(f"The dsv4x_cpu platform cannot tell the SWA size of {type(pool).__name__}.")
