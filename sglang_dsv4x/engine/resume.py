"""Seam: the radix cache. SGLang's unified tree, in which a node whose last page has a resume point outlives that page.

In stock SGLang a prefix hit needs a live SWA page at its end, and when the SWA pool needs a leaf's page the whole leaf
goes, and with it the way to everything above. Here the page goes and the node stays: the point (hicache/resume_points)
brings the page back when a request is admitted, in SGLang's own load-back step.

Points are kept at node ends only: the tree is split where one is written, so a later split leaves a point with the
child that holds its boundary. A node with a point is one page long, as SGLang's own SWA leaves are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.swa_component import SWAComponent
from sglang.srt.mem_cache.unified_cache.components.tree_component import EvictLayer
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ..hicache.resume_points import PointKind, ResumePoints
from .hooks import Seam
from .pool import Dsv4xTokenToKVPool

FULL, SWA = ComponentType.FULL, ComponentType.SWA


class ResumableSWAComponent(SWAComponent):
    """SWA data of a node is on the device, or can be brought back from its resume point."""

    _evict_device_cursor: Any

    def __init__(self, cache: UnifiedRadixCache, params: Any) -> None:
        super().__init__(cache, params)
        self.points: ResumePoints = params.token_to_kv_pool_allocator.get_kvcache().resume_points

    def is_live(self, node: Any) -> bool:
        return node.component_data[SWA].value is not None

    def create_match_validator(self, match_device_only: bool = False) -> Callable[[Any], bool]:
        """Stock's, where a point stands for the whole window (a node with one is a page, longer than the window)."""
        stock = super().create_match_validator(match_device_only)

        def validator(node: Any) -> bool:
            live = stock(node)
            return live or node.id in self.points

        return validator

    def finalize_match_result_in_tree_core(
        self, result: MatchResult, params: Any, value_chunks: list[torch.Tensor], best_value_len: int
    ) -> MatchResult:
        """A match that ends at a point is a host hit of one page: the scheduler reserves it and calls load-back."""
        result = super().finalize_match_result_in_tree_core(result, params, value_chunks, best_value_len)
        node = result.best_match_node
        if node is self.tree_core.root_node or self.is_live(node):
            return result
        return result._replace(swa_host_hit_length=max(result.swa_host_hit_length, len(node.key)))

    def _evict_device_next_node(
        self,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
    ) -> int | None:
        """Stock's walk over least recently used SWA pages, but a leaf with a resume point loses only its page."""
        core = self.tree_core
        lru, leaves = core.lru_lists[SWA], core.evictable_device_leaves
        sessions = core.enable_session_radix_cache
        if self._evict_device_cursor is not None and not lru.in_list(self._evict_device_cursor):
            self._evict_device_cursor = lru.cursor_next() if sessions else lru.get_lru_no_lock()
        while (
            tracker[SWA] < self._evict_device_request_cnt
            and self._evict_device_cursor is not None
            and lru.in_list(self._evict_device_cursor)
        ):
            node = self._evict_device_cursor
            leaf = node in leaves
            if (
                leaf
                and node.id not in self.points
                and (not sessions or self._can_evict_leaf_atomically(node))
            ):
                self._evict_device_cursor = lru.cursor_next() if sessions else lru.get_prev_no_lock(node)
                return int(node.id)
            following = None if sessions else lru.get_prev_no_lock(node)
            core._evict_component_and_detach_lru(
                node,
                self,
                target=EvictLayer.DEVICE,
                tracker=tracker,
                device_frees=device_frees,
                host_frees=host_frees,
            )
            # A cascade from a leaf takes its KV too: that is what the point is there to prevent.
            if not leaf:
                core._cascade_evict(node, self, tracker, device_frees=device_frees, host_frees=host_frees)
            self._evict_device_cursor = lru.cursor_next() if sessions else following
        return None

    def discard_deleted_session_leaf(self, node: Any) -> None:
        """Called for every node that leaves the tree, with or without sessions: its point goes with it."""
        super().discard_deleted_session_leaf(node)
        self.points.release(node.id)


class ResumableRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache with resume points: writes them as prefixes are inserted, restores them on a hit."""

    def __init__(self, params: Any) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.resumes = isinstance(pool, Dsv4xTokenToKVPool) and pool.resume_points.capacity > 0
        if self.resumes:
            self.points: ResumePoints = pool.resume_points
            self.interval: int = pool.config.resume_interval
            self.forks: dict[str, int] = {}
            self.kept_on_release: set[str] = set()
            params.component_registry_override = {
                **(params.component_registry_override or {}),
                SWA: ResumableSWAComponent,
            }
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        if self.resumes:
            self.points.reset()
            self.forks.clear()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Stock's. Where more of the prefix is in the tree than can be used, the request will pass a place at which
        others fork as well: remembered until its chunks have got there."""
        result = super().match_prefix(params)
        if self.resumes and params.req is not None:
            if result.full_kv_hit_length > len(result.device_indices):
                self.forks[params.req.rid] = result.full_kv_hit_length
            if result.swa_host_hit_length > 0:
                self.points.touch(result.best_match_node)
        return result

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, int]:
        """Restores the point at the end of the request's hit into a new SWA page.

        Modifies the tree (the node has SWA data again) and the SWA pool. Where no page can be had, the request's hit is
        cut to the last node that is live. Returns no further indices, and the node where the hit ends.
        """
        node = self.tree_core.node_by_id(params.best_match_node)
        component = self.components[SWA]
        if not self.resumes or component.is_live(node) or params.req is None:
            return super().init_load_back(params)
        nothing = self.tree_core.empty_match_result.device_indices
        allocator = self.token_to_kv_pool_allocator
        page = self._new_swa_page() if node.id in self.points else None
        if page is None:
            while node is not self.tree_core.root_node and not component.is_live(node):
                params.req.prefix_indices = params.req.prefix_indices[: -len(node.key)]
                node = node.parent
            return nothing, int(node.id)
        self.points.restore(node.id, page[:1] // self.page_size)
        allocator.set_full_to_swa_mapping(node.component_data[FULL].value, page)
        self.tree_core.set_component_device_value(node.id, SWA, page)
        return nothing, int(node.id)

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        super().cache_unfinished_req(req, chunked=chunked, **kwargs)
        if self.resumes and not self.disable:
            self._write_points(req, ended=not chunked)

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any
    ) -> None:
        if not self.resumes or self.disable:
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle, **kwargs)
            return
        kept = is_insert or req.rid in self.kept_on_release
        super().cache_finished_req(req, kept, kv_len_to_handle=kv_len_to_handle, **kwargs)
        if kept:
            self._write_points(req, ended=True)
        self._settle_points(req, kv_len_to_handle, kept)
        self.forks.pop(req.rid, None)

    def sanity_check(self) -> None:
        super().sanity_check()
        if self.resumes:
            self.points.check_integrity()

    def _new_swa_page(self) -> torch.Tensor | None:
        """int64 [page_size] SWA locations of one page, or None when all pages are in use."""
        allocator = self.token_to_kv_pool_allocator.swa_attn_allocator
        if allocator.available_size() < self.page_size:
            self.evict(EvictParams(num_tokens=0, swa_num_tokens=self.page_size))
        page = allocator.alloc(self.page_size)
        return None if page is None else page.to(torch.int64)

    def _write_points(self, req: Any, *, ended: bool) -> None:
        """Points at the wanted boundaries among the live nodes that end at the request's last node. Splits nodes."""
        live, end = self._live_tail(req.last_node)
        wanted: dict[int, PointKind] = {}
        start = end - sum(len(node.key) for node in live)
        for boundary in range(start // self.interval * self.interval + self.interval, end + 1, self.interval):
            wanted[boundary] = PointKind.INTERVAL
        fork = self.forks.get(req.rid)
        if fork is not None and start < fork <= end:
            wanted[fork] = PointKind.FORK
        if ended and end > 0:
            wanted[end] = PointKind.END
        node_end = end
        for node in live:
            node_start = node_end - len(node.key)
            rest, rest_end = node, node_end
            for boundary in sorted((b for b in wanted if node_start < b <= node_end), reverse=True):
                page_node = self._page_node(rest, node_start, rest_end, boundary)
                self.points.save(page_node.id, self._page_of(page_node), wanted[boundary])
                # What is left of the node above that page is the page's parent now.
                rest, rest_end = page_node.parent, boundary - self.page_size
            node_end = node_start

    def _settle_points(self, req: Any, length: int, kept: bool) -> None:
        """Points that were written while the request decoded (`leaving_window`) go to their nodes, or go."""
        boundaries = [
            b for b in range(self.interval, length + 1, self.interval) if (req.rid, b) in self.points
        ]
        if not boundaries:
            return
        node, end = self.tree_core.node_by_id(req.last_node), 0
        if kept:
            path = self._path(req.last_node)
            end = sum(len(on_path.key) for on_path in path)
        for boundary in reversed(boundaries):
            if not kept or boundary > end:
                self.points.release((req.rid, boundary))
                continue
            while end - len(node.key) >= boundary:
                end -= len(node.key)
                node = node.parent
            page_node = self._page_node(node, end - len(node.key), end, boundary)
            self.points.move((req.rid, boundary), page_node.id)
            node, end = page_node, boundary

    def _path(self, node_id: int) -> list[Any]:
        """The nodes from `node_id` up to the root, which is left out."""
        node, path = self.tree_core.node_by_id(node_id), []
        while node is not self.tree_core.root_node:
            path.append(node)
            node = node.parent
        return path

    def _page_node(self, node: Any, start: int, end: int, boundary: int) -> Any:
        """The node of the page that ends at `boundary`; splits `node`, which spans (start, end], where it is longer."""
        split = self.tree_core._split_node
        if boundary < end:
            node, action = split(node.key, node, boundary - start)
            assert action is None, "no hierarchical cache, so no write-through is pending"
        if boundary - start > self.page_size:
            _, action = split(node.key, node, boundary - start - self.page_size)
            assert action is None, "no hierarchical cache, so no write-through is pending"
        return node

    def _page_of(self, node: Any) -> torch.Tensor:
        """int64 [1] number of the SWA page that holds a one-page node."""
        return node.component_data[SWA].value[:1].to(torch.int64) // self.page_size

    def _live_tail(self, node_id: int) -> tuple[list[Any], int]:
        """Nodes with live SWA data from `node_id` upwards, and the position where `node_id` ends."""
        component, path = self.components[SWA], self._path(node_id)
        live = list(itertools.takewhile(component.is_live, path))
        return live, sum(len(node.key) for node in path)


def retracting(original: Callable[..., None], *, req: Any, tree_cache: Any, **rest: Any) -> None:
    """SGLang's `release_req`, which forgets a retracted request's KV. Its whole pages go to the tree instead, unlocked
    and with a point at their end: it resumes where memory allows, and recomputes where not."""
    if not isinstance(tree_cache, ResumableRadixCache) or not tree_cache.resumes:
        original(req=req, tree_cache=tree_cache, **rest)
        return
    tree_cache.kept_on_release.add(req.rid)
    try:
        original(req=req, tree_cache=tree_cache, **rest)
    finally:
        tree_cache.kept_on_release.discard(req.rid)


def leaving_window(
    original: Callable[..., None],
    req: Any,
    pre_len: int,
    *,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    **rest: Any,
) -> None:
    """SGLang's step that gives a decoding request's window pages back. One that ends at a multiple of the interval is
    saved first, for the request; it goes to a node when the output goes to the tree."""
    pool = token_to_kv_pool_allocator.get_kvcache()
    points: ResumePoints | None = getattr(pool, "resume_points", None)
    interval = pool.config.resume_interval if points is not None else 0
    known = max(req.kv.swa_evicted_seqlen, req.cache_protected_len) if req.kv is not None else pre_len
    page_size = token_to_kv_pool_allocator.page_size
    pages: dict[int, torch.Tensor] = {}
    if points is not None and points.capacity > 0:
        for boundary in range(known // interval * interval + interval, pre_len - page_size + 1, interval):
            last = req_to_token_pool.req_to_token[req.req_pool_idx, boundary - 1 : boundary]
            pages[boundary] = token_to_kv_pool_allocator.translate_loc_from_full_to_swa(last) // page_size
    original(
        req,
        pre_len,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        **rest,
    )
    for boundary, page in pages.items():
        # Given back just now, and nobody's yet.
        if boundary <= req.kv.swa_evicted_seqlen and points is not None:
            points.save((req.rid, boundary), page.to(torch.int64), PointKind.INTERVAL)


_SWA_COMPONENT = "sglang.srt.mem_cache.unified_cache.components.swa_component.SWAComponent"
_TREE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


def _relied_on(path: str, signature: str, reason: str) -> Seam:
    return Seam(path=path, signature=signature, kind="read", reason=reason)


SEAMS = [
    Seam(
        path=_CACHE,
        signature="class (self, params)",
        kind="replace",
        reason="SGLang's cache factory builds it by name from this module; ours keeps resume points",
        hook=ResumableRadixCache,
    ),
    Seam(
        path="sglang.srt.managers.schedule_batch.release_req",
        signature="(*, req, remaing_req_count, server_args, req_to_token_pool, token_to_kv_pool_allocator, "
        "tree_cache, hisparse_coordinator, offload_kv=...)",
        kind="around",
        reason="a retracted request's prefix stays in the tree, with a resume point",
        hook=retracting,
    ),
    Seam(
        path="sglang.srt.managers.schedule_batch.free_swa_out_of_window_slots",
        signature="(req, pre_len, *, sliding_window_size, page_size, req_to_token_pool, token_to_kv_pool_allocator, "
        "is_chunk_cache=...)",
        kind="around",
        reason="resume points inside an output are written as their pages leave the window",
        hook=leaving_window,
    ),
    _relied_on(f"{_CACHE}.match_prefix", "(self, params)", "overridden: notes forks"),
    _relied_on(
        f"{_CACHE}.init_load_back", "(self, params)", "overridden: restores a point before the prefill"
    ),
    _relied_on(
        f"{_CACHE}.cache_unfinished_req",
        "(self, req, chunked=..., **kwargs)",
        "overridden: writes points at chunk ends",
    ),
    _relied_on(
        f"{_CACHE}.cache_finished_req",
        "(self, req, is_insert=..., *, kv_len_to_handle, **kwargs)",
        "overridden: writes the point at the end of the output",
    ),
    _relied_on(
        f"{_SWA_COMPONENT}.create_match_validator",
        "(self, match_device_only=...)",
        "overridden: a resume point is a valid end of a match",
    ),
    _relied_on(
        f"{_SWA_COMPONENT}.finalize_match_result_in_tree_core",
        "(self, result, params, value_chunks, best_value_len)",
        "overridden: a hit that ends at a point is a host hit",
    ),
    _relied_on(
        f"{_SWA_COMPONENT}._evict_device_next_node",
        "(self, tracker, device_frees, host_frees)",
        "overridden: a leaf with a point loses its page only",
    ),
    _relied_on(
        f"{_SWA_COMPONENT}.discard_deleted_session_leaf",
        "(self, node)",
        "overridden: it is called for every node that leaves the tree",
    ),
    _relied_on(
        f"{_TREE}._split_node", "(self, key, child, split_len)", "called: a point's node is one page long"
    ),
    _relied_on(
        f"{_TREE}._evict_component_and_detach_lru",
        "(self, node, comp, device_frees, host_frees, target=..., tracker=...)",
        "called by our eviction of SWA pages",
    ),
    _relied_on(
        f"{_TREE}.set_component_device_value",
        "(self, node_id, component_type, value)",
        "called when a page is restored",
    ),
]
