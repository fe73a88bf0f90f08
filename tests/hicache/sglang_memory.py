"""SGLang's real allocator, radix tree, requests and DeepSeek-V4 pool with the tier, driven without a model.

A row's bytes are a function of the tokens before it, as C4 rows are: whoever reads a shared prefix must see
what its first owner wrote. The pool's own C4 pages, written alongside, are the tier-off store. The Triton
allocation kernels are replaced by SGLang's own torch fallback.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator

import pytest
import torch
from sglang_dsv4x.hicache import TieredCache, TierShape
from sglang_dsv4x.jit_kernels.layouts import main_layout
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows, scatter_rows

PAGE = 256
PAGES, SWA_PAGES = 18, 12
REQUESTS, CONTEXT, CHUNK = 3, 1280, 256
TOP_K, LAYERS, WINDOW = 8, 2, 128
CANARIES = 1021


class TorchKernel:
    """Stands where a Triton kernel stood: kernel[grid](...)."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.function


@pytest.fixture(scope="module")
def sglang() -> Iterator[None]:
    """SGLang's process-wide settings, and torch instead of its two Triton allocation kernels."""
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.runtime_context import publish, reset_context
    from sglang.srt.server_args import ServerArgs

    def extend(
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out: torch.Tensor,
        _: int,
        page_size: int,
    ) -> None:
        paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, "cpu")

    def decode(
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out: torch.Tensor,
        _: int,
        page_size: int,
    ) -> None:
        fresh = (seq_lens - 1) % page_size == 0
        out.copy_(last_loc + 1)
        out[fresh] = free_pages[: int(fresh.sum())] * page_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "alloc_extend_kernel", TorchKernel(extend))
        patch.setattr(paged, "alloc_decode_kernel", TorchKernel(decode))
        publish(ServerArgs(model_path="none", device="cpu", page_size=PAGE), role="scheduler")
        yield
        reset_context()


class Server:
    """The scheduler's part, on SGLang's memory and the tier: who extends, decodes and goes."""

    def __init__(self, unit: int, seed: int) -> None:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.random = random.Random(seed)
        self.pool = self.pool_class()(
            max_num_reqs=REQUESTS,
            swa_size=SWA_PAGES * PAGE,
            c4_size=PAGES * PAGE // 4,
            c128_size=PAGES * PAGE // 128,
            c4_state_pool_size=SWA_PAGES * 8,
            c128_state_pool_size=REQUESTS * 128,
            page_size=PAGE,
            swa_page_size=PAGE,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=[4] * LAYERS,
            sliding_window=WINDOW,
        )
        self.allocator = SWATokenToKVPoolAllocator(
            PAGES * PAGE, SWA_PAGES * PAGE, PAGE, torch.float8_e4m3fn, "cpu", self.pool, need_sort=False
        )
        self.req_pool = ReqToTokenPool(REQUESTS, CONTEXT + PAGE, "cpu", enable_memory_saver=False)
        self.tree = self.tree_class()(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                sliding_window_size=WINDOW,
                chunked_prefill_size=CHUNK,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )
        self.layout = main_layout(64)
        slots = unit * (REQUESTS * (TOP_K + 2) + CHUNK // 4)
        shape = TierShape(LAYERS, (PAGES + 1) * 64, slots, unit, self.layout, TOP_K, REQUESTS, CHUNK)
        self.tier = TieredCache(shape, "cpu", checks=True, copy_timeout_s=30, copy_delay_s=0.0001)
        self.watch_frees()
        generator = torch.Generator().manual_seed(seed)
        self.canaries = torch.randint(0, 256, (CANARIES, 584), dtype=torch.uint8, generator=generator)
        self.waiting: list = []
        self.chunked = None
        self.running: list = []
        self.conversations: list[tuple[list[int], str | None]] = []
        self.made = 0
        self.hits = self.retractions = self.forks = self.flushes = 0

    def pool_class(self) -> type:
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

        return DeepSeekV4TokenToKVPool

    def tree_class(self) -> type:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        return UnifiedRadixCache

    def watch_frees(self) -> None:
        """What the engine does under --dsv4x-checks step: freed pages are forgotten before their reuse."""
        release = self.allocator.full_attn_allocator._release_page_ids

        def forget_and_release(*page_ids: torch.Tensor) -> None:
            pages = torch.cat([ids.reshape(-1) for ids in page_ids])
            assert 0 not in pages.tolist()
            self.tier.forget((pages[:, None] * 64 + torch.arange(64)).view(-1))
            release(*page_ids)

        self.allocator.full_attn_allocator._release_page_ids = forget_and_release

    # What rows hold

    def digests(self, req) -> list[int]:
        """One number per entry: a function of all tokens up to its end, and of the cache salt."""
        tokens = req.origin_input_ids + req.output_ids
        while len(req.digests) < len(tokens) // 4:
            i = len(req.digests)
            before = req.digests[-1] if i else req.extra_key
            req.digests.append(hash((before, *tokens[4 * i : 4 * i + 4])))
        return req.digests

    def content(self, layer: int, digests: list[int]) -> torch.Tensor:
        numbers = torch.tensor(digests, dtype=torch.int64)
        rows = self.canaries.index_select(0, numbers % CANARIES)
        rows.view(torch.int64)[:, 0] = numbers + layer
        return rows

    def entry(self, req, positions: torch.Tensor) -> torch.Tensor:
        return self.req_pool.req_to_token[req.req_pool_idx, positions * 4].long() // 4

    # One forward step

    def forward(self, steps: list[tuple[object, int, torch.Tensor]], decode: bool) -> None:
        """steps: (request, first new position, locations of its new tokens)."""
        written, again, digests = [], [], []
        for req, start, locations in steps:
            ends = torch.arange(start + 1, start + 1 + len(locations))
            completes = ends % 4 == 0
            written.append(torch.where(completes, locations // 4, 0))
            again.append(ends // 4 > (start + len(locations)) // 4 - TOP_K)
            digests += [self.digests(req)[end // 4 - 1] if end % 4 == 0 else 0 for end in ends.tolist()]
        entries = torch.cat(written)
        self.tier.begin_step(entries, None if decode else torch.cat(again))
        real = entries >= 64
        for layer in range(LAYERS):
            rows = self.content(layer, digests)
            self.tier.write(layer, entries, rows)
            scatter_rows(self.pool.c4_kv_pool.kv_buffer[layer], self.layout, entries[real], rows[real])
            lengths = [(start + len(locations)) // 4 for _, start, locations in steps]
            reqs = [req for req, _, _ in steps]
            if decode:
                self.read_selected(layer, reqs, lengths)
            else:
                self.read_history(layer, reqs[0], lengths[0])

    def check_rows(self, layer: int, entries: torch.Tensor, rows: torch.Tensor, digests: list[int]) -> None:
        assert torch.equal(rows, self.content(layer, digests))
        assert torch.equal(rows, gather_rows(self.pool.c4_kv_pool.kv_buffer[layer], self.layout, entries))
        self.tier.verify_read(layer, entries, rows)

    def read_history(self, layer: int, req, length: int) -> None:
        entries = self.entry(req, torch.arange(length))
        self.check_rows(layer, entries, self.tier.gather(layer, entries), self.digests(req)[:length])

    def read_selected(self, layer: int, reqs: list, lengths: list[int]) -> None:
        entries = torch.full((len(reqs), TOP_K), -1, dtype=torch.int32)
        positions = torch.zeros_like(entries)
        digests = []
        for row, (req, length) in enumerate(zip(reqs, lengths, strict=True)):
            count = min(TOP_K, length)
            chosen = torch.tensor(self.random.sample(range(length), count), dtype=torch.int64)
            positions[row, :count] = chosen
            entries[row, :count] = self.entry(req, chosen)
            digests += [self.digests(req)[position] for position in chosen.tolist()]
        slots = self.tier.resolve(layer, entries, positions, torch.tensor(lengths, dtype=torch.int32))
        self.tier.join(layer)
        selected = entries >= 0
        assert torch.equal(slots >= 0, selected)
        rows = gather_rows(self.tier.device_pages(layer), self.layout, slots[selected].long())
        self.check_rows(layer, entries[selected].long(), rows, digests)

    def admitted(self, req, start: int) -> None:
        """Called with a new request whose first `start` tokens are a hit."""

    # Operations

    def start(self) -> None:
        """A new prompt: fresh, or continuing (somewhere in) an earlier or running conversation."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        if len(self.waiting) >= 3:
            return
        tokens, salt = [], self.random.choice([None, None, "salt"])
        known = self.conversations + [
            (list(req.origin_input_ids + req.output_ids), req.extra_key) for req in self.running
        ]
        if known and self.random.random() < 0.7:
            tokens, salt = self.random.choice(known)
            tokens = tokens[: self.random.randint(1, len(tokens))]
            self.forks += 1
        fresh = self.random.randint(1, 500)
        tokens = (tokens + [self.random.randrange(1000) for _ in range(fresh)])[: CONTEXT - 300]
        req = Req(str(self.made), "", array("q", tokens), SamplingParams(max_new_tokens=256), extra_key=salt)
        req.digests = []
        self.made += 1
        self.waiting.append(req)

    def lock(self, req) -> None:
        lock = self.tree.inc_lock_ref(req.last_node)
        req.swa_uuid_for_lock, req.skip_lock_node_ids = lock.swa_uuid_for_lock, lock.skip_lock_node_ids
        self.admission = lock.to_dec_params()

    def extend(self) -> None:
        """One chunk: of the request that is being chunked, or of the next one waiting."""
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.common import evict_from_tree_cache, maybe_cache_unfinished_req

        req = self.chunked
        if req is None:
            if not self.waiting or len(self.running) == REQUESTS:
                return
            req = self.waiting[0]
            req.init_next_round_input(self.tree)
            self.lock(req)
        else:
            req.init_next_round_input()
        start = len(req.prefix_indices)
        end = min(start + CHUNK, len(req.full_untruncated_fill_ids))
        evict_from_tree_cache(self.tree, end - start + PAGE)
        before, after = torch.tensor([start]), torch.tensor([end])
        last = req.prefix_indices[-1:].long() if start else torch.tensor([-1])
        locations = self.allocator.alloc_extend(before, before, after, after, last, end - start)
        if locations is None:
            if req is not self.chunked:
                self.tree.dec_lock_ref(req.last_node, self.admission)
            return
        if req is not self.chunked:
            self.waiting.pop(0)
            self.hits += start
            self.req_pool.alloc([req])
            self.req_pool.write((req.req_pool_idx, slice(0, start)), req.prefix_indices.int())
            self.admitted(req, start)
        self.req_pool.write((req.req_pool_idx, slice(start, end)), locations.int())
        req.set_extend_range(start, end)
        req.kv = req.kv or ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
        req.kv.kv_allocated_len = req.kv_committed_len = end
        self.forward([(req, start, locations)], decode=False)
        whole = end == len(req.full_untruncated_fill_ids)
        self.chunked = None if whole else req
        if not whole:
            req.inflight_middle_chunks = 1
            maybe_cache_unfinished_req(req, self.tree, chunked=True)
            return
        req.inflight_middle_chunks = 0
        req.output_ids.append(self.random.randrange(1000))
        if self.random.random() < 0.1:  # finished by its first token
            self.release(req)
        else:
            maybe_cache_unfinished_req(req, self.tree)
            self.running.append(req)

    def decode(self) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache, free_swa_out_of_window_slots

        for req in self.running:
            if req.decode_batch_idx >= 1:
                free_swa_out_of_window_slots(
                    req,
                    req.seqlen - 1,
                    sliding_window_size=WINDOW,
                    page_size=PAGE,
                    req_to_token_pool=self.req_pool,
                    token_to_kv_pool_allocator=self.allocator,
                )
        while self.running:
            new_pages = sum(req.kv_committed_len % PAGE == 0 for req in self.running)
            evict_from_tree_cache(self.tree, new_pages * PAGE)
            if self.allocator.new_pages_available(new_pages, new_pages):
                break
            self.retract()
        if not self.running:
            return
        indices = torch.tensor([req.req_pool_idx for req in self.running])
        lengths = torch.tensor([req.kv_committed_len for req in self.running])
        last = self.req_pool.req_to_token[indices, lengths - 1].long()
        locations = self.allocator.alloc_decode(lengths + 1, lengths + 1, last)
        assert locations is not None
        self.req_pool.write((indices, lengths), locations.int())
        for req in self.running:
            req.kv.kv_allocated_len += 1
            req.kv_committed_len += 1
            req.decode_batch_idx += 1
        self.forward(
            [
                (req, length, location.view(1))
                for req, length, location in zip(self.running, lengths.tolist(), locations, strict=True)
            ],
            decode=True,
        )
        for req in list(self.running):
            req.output_ids.append(self.random.randrange(1000))
            if len(req.output_ids) >= 256 or req.seqlen >= CONTEXT:
                self.running.remove(req)
                self.release(req)

    def decode_many(self) -> None:
        """Past a boundary of four tokens, so that entries are completed."""
        for _ in range(4):
            self.decode()

    def release(self, req) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.tree)
        self.conversations.append((list(req.origin_input_ids + req.output_ids), req.extra_key))
        del self.conversations[:-6]

    def finish(self) -> None:
        if self.running:
            self.release(self.running.pop(self.random.randrange(len(self.running))))

    def abort(self) -> None:
        """Mid-chunk if there is such a request, else one that has not begun."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if self.chunked is not None:
            release_kv_cache(self.chunked, self.tree, is_insert=False)
            self.chunked = None
        elif self.waiting:
            self.waiting.pop(self.random.randrange(len(self.waiting)))

    def retract(self) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        if self.running:
            req = self.running.pop()
            release_kv_cache(req, self.tree, is_insert=False)
            req.reset_for_retract()
            self.waiting.append(req)
            self.retractions += 1

    def evict(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(
            EvictParams(
                num_tokens=self.random.randrange(4) * PAGE, swa_num_tokens=self.random.randrange(4) * PAGE
            )
        )

    def flush(self) -> None:
        """As Scheduler.flush_cache: only when idle."""
        if self.random.random() < 0.3:
            while self.running:
                self.finish()
            if self.chunked is not None:
                self.abort()
            self.tree.sanity_check()
            self.tree.reset()
            self.req_pool.clear()
            self.allocator.clear()
            self.tier.reset()
            self.flushes += 1

    # Invariants

    def check(self) -> None:
        """free + used = total in both pools (SGLang's leak check) and the tier; bytes where they belong."""
        holding = self.running + ([self.chunked] if self.chunked is not None else [])
        full = swa = 0
        for req in holding:
            allocated = -(-req.kv.kv_allocated_len // PAGE) * PAGE
            full += allocated - req.cache_protected_len
            swa += allocated - max(req.cache_protected_len, req.kv.swa_evicted_seqlen)
        tree, allocator = self.tree, self.allocator
        assert (
            allocator.full_available_size() + tree.full_evictable_size() + tree.full_protected_size() + full
            == PAGES * PAGE
        )
        assert (
            allocator.swa_available_size() + tree.swa_evictable_size() + tree.swa_protected_size() + swa
            == SWA_PAGES * PAGE
        )
        assert self.req_pool.available_size() + len(holding) == REQUESTS
        self.tier.check_integrity()
        free = allocator.full_attn_allocator.free_pages
        assert not self.tier._shadow.written.view(LAYERS, -1, 64)[:, free].any()
