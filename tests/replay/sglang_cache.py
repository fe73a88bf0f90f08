"""SGLang's own unified radix cache and allocators on the CPU, driven as its scheduler drives them for one request at a
time, with a pool that holds no bytes. What the simulated cache is compared with."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

WINDOW = 128


class NoBytes(BaseSWAKVPool):
    """The full-to-SWA mapping alone."""

    def __init__(self) -> None:
        self.full_to_swa_index_mapping: torch.Tensor = torch.empty(0)

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[kv_indices.to(torch.int64)].to(torch.int32)

    def get_state_buf_infos(self) -> Any:
        raise NotImplementedError

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = get_state_buf_infos


class SglangCache:
    """`capacity` and `swa_capacity` in tokens, whole pages."""

    def __init__(self, capacity: int, swa_capacity: int, page_size: int, policy: str, chunk: int | None):
        self.page = page_size
        self.chunk = chunk
        pool = NoBytes()
        self.allocator = SWATokenToKVPoolAllocator(
            capacity, swa_capacity, page_size, torch.float16, "cpu", pool, need_sort=False
        )
        self.requests = ReqToTokenPool(4, 65536, "cpu", enable_memory_saver=False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.requests,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                eviction_policy=policy,
                sliding_window_size=WINDOW,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )

    def request(self, prompt: list[int], outputs: list[int]) -> int:
        """Runs one request to its end and returns how many tokens of its prompt were cached."""
        match = self.cache.match_prefix(
            MatchPrefixParams(key=RadixKey(array("q", prompt[: len(prompt) - 1])))
        )
        cached = len(match.device_indices)
        slot = self.requests.free_slots.pop()
        req = SimpleNamespace(
            origin_input_ids=array("q", prompt),
            output_ids=array("q"),
            extra_key=None,
            priority=0,
            req_pool_idx=slot,
            kv=SimpleNamespace(swa_evicted_seqlen=0),
            last_node=match.last_device_node,
            cache_protected_len=cached,
            prefix_indices=match.device_indices,
            swa_prefix_lock_released=False,
            mamba_pool_idx=None,
            session=None,
            filled=len(prompt),
        )
        req.get_fill_ids = lambda: (req.origin_input_ids + req.output_ids)[: req.filled]
        locked = self.cache.inc_lock_ref(req.last_node)
        req.swa_uuid_for_lock, req.skip_lock_node_ids = locked.swa_uuid_for_lock, locked.skip_lock_node_ids
        self.requests.write((slot, slice(0, cached)), match.device_indices.to(torch.int32))
        done = cached
        while done < len(prompt):
            end = len(prompt)
            if self.chunk is not None and end - done > self.chunk:
                end = max(done + self.page, (done + self.chunk) // self.page * self.page)
            self._allocate(slot, done, end, end - done + self.page)
            done = req.filled = end
            if end < len(prompt) or len(outputs) > 1:
                self.cache.cache_unfinished_req(req, chunked=end < len(prompt))
        length = len(prompt)
        for step, token in enumerate(outputs[:-1]):
            req.output_ids.append(token)
            if step and step % 128 == 0:
                free_swa_out_of_window_slots(
                    req,
                    length - 1,
                    sliding_window_size=WINDOW,
                    page_size=self.page,
                    req_to_token_pool=self.requests,
                    token_to_kv_pool_allocator=self.allocator,
                )
            self._allocate(slot, length, length + 1, self.page)
            length += 1
        self.cache.cache_finished_req(req, kv_len_to_handle=length)
        self.requests.free_slots.append(slot)
        return cached

    def _allocate(self, slot: int, start: int, end: int, room: int) -> None:
        """Locations for the tokens [start, end), new pages where the last one is full."""
        evict_from_tree_cache(self.cache, room)
        in_page = min(end, -(-start // self.page) * self.page)
        if in_page > start:
            last = int(self.requests.req_to_token[slot, start - 1])
            self.requests.write((slot, slice(start, in_page)), torch.arange(in_page - start) + last + 1)
        if end > in_page:
            size = -(-(end - in_page) // self.page) * self.page
            full = self.allocator.full_attn_allocator.alloc(size)
            swa = self.allocator.swa_attn_allocator.alloc(size)
            assert full is not None and swa is not None, "the pools are too small for this request"
            self.allocator.set_full_to_swa_mapping(full, swa)
            self.requests.write((slot, slice(in_page, end)), full[: end - in_page].to(torch.int32))

    def check(self) -> None:
        """SGLang's own invariants, and that nothing is held by a request that has ended."""
        self.cache.sanity_check()
        free, held = self.allocator.full_available_size(), self.cache.full_evictable_size()
        assert free + held == self.allocator.full_attn_allocator.size
        free, held = self.allocator.swa_available_size(), self.cache.swa_evictable_size()
        assert free + held == self.allocator.swa_attn_allocator.size
