"""Resume points under SGLang's real allocator, radix tree and pool, in random interleavings, without a model.

Window rows and compressor states are functions of all tokens before them, as the real ones are. Every hit, and every
decode step, reads what it continues from and compares it: bytes of another request, of a later owner of the page, or
poison, would show. A hit must also be as deep as the tree's own contents allow.
"""

from __future__ import annotations

import functools

import pytest
import torch
from sglang_dsv4x.hicache.resume_points import ResumePoints
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows, scatter_rows
from sglang_memory import CONTEXT, LAYERS, PAGE, WINDOW, Server, sglang  # noqa: F401

from sglang_dsv4x.config import Dsv4xConfig, publish

OPERATIONS = 1500
OVERLAP, RING = 4, 8
MANY = 200


class ResumingServer(Server):
    """The harness with our pool and our tree; keeps window rows and C4 states too."""

    def __init__(self, seed: int, interval: int, capacity: int) -> None:
        self.interval, self.capacity = interval, capacity
        super().__init__(1, seed)
        self.hit_requests = self.restored_hits = 0

    def pool_class(self) -> type:
        from sglang_dsv4x.engine.pool import Dsv4xTokenToKVPool
        from sglang_dsv4x.engine.resume_rows import point_pieces, undefined_pieces

        interval, capacity = self.interval, self.capacity

        class Pool(Dsv4xTokenToKVPool):
            def _make_resume_points(self) -> ResumePoints:
                pieces, rest = point_pieces(self, WINDOW), undefined_pieces(self, WINDOW)
                return ResumePoints(pieces, capacity, poisoned=rest)

        publish(Dsv4xConfig(enable=True, tier="off", checks="step", resume_interval=interval))
        return Pool

    def tree_class(self) -> type:
        from sglang_dsv4x.engine.resume import ResumableRadixCache

        return ResumableRadixCache

    # What window rows and states hold

    def token_digests(self, req) -> list[int]:
        tokens = req.origin_input_ids + req.output_ids
        known = req.__dict__.setdefault("token_digests", [])
        while len(known) < len(tokens):
            known.append(hash((known[-1] if known else req.extra_key, tokens[len(known)])))
        return known

    def states(self, layer: int) -> list[torch.Tensor]:
        pools = (self.pool.compress_state_pools[layer], self.pool.indexer_compress_state_pools[layer])
        return [pool.kv_score_buffer.kv_score for pool in pools]

    def state_content(self, layer: int, digests: list[int], width: int) -> torch.Tensor:
        numbers = torch.tensor(digests, dtype=torch.int64) % (1 << 20)
        return (numbers.float() + layer)[:, None] + torch.arange(width) / 4096

    def swa_locations(self, req, first: int, end: int) -> torch.Tensor:
        full = self.req_pool.req_to_token[req.req_pool_idx, first:end].long()
        return self.allocator.full_to_swa_index_mapping[full]

    def forward(self, steps, decode: bool) -> None:
        for req, start, locations in steps:
            end = start + len(locations)
            if decode:
                self.check_continuation(req, start)
            digests = self.token_digests(req)
            swa = self.swa_locations(req, start, end)
            positions = torch.arange(start, end)
            page_end = torch.clamp((positions // PAGE + 1) * PAGE, max=end)
            kept = positions >= page_end - RING
            for layer in range(LAYERS):
                pages = self.pool.swa_kv_pool.kv_buffer[layer]
                scatter_rows(
                    pages, self.pool.swa_kv_pool.layout, swa, self.content(layer, digests[start:end])
                )
                at = (swa // PAGE * RING + swa % RING)[kept]
                numbers = [digests[i] for i in positions[kept].tolist()]
                for state in self.states(layer):
                    state[at] = self.state_content(layer, numbers, state.shape[1])
        super().forward(steps, decode)

    def check_continuation(self, req, position: int) -> None:
        """What the token at `position` reads of earlier ones: its window, and its C4 group's overlap."""
        digests = self.token_digests(req)
        first = max(0, position - WINDOW + 1)
        swa = self.swa_locations(req, first, position)
        assert (swa >= PAGE).all(), "a position in the window has no SWA page"
        overlap = range(max(0, position // 4 * 4 - OVERLAP), position)
        for layer in range(LAYERS):
            rows = gather_rows(self.pool.swa_kv_pool.kv_buffer[layer], self.pool.swa_kv_pool.layout, swa)
            assert torch.equal(rows, self.content(layer, digests[first:position]))
            at = self.swa_locations(req, position - len(overlap), position)
            at = at // PAGE * RING + at % RING
            for state in self.states(layer):
                expected = self.state_content(layer, [digests[i] for i in overlap], state.shape[1])
                assert torch.equal(state[at], expected)

    # Hits

    def lock(self, req) -> None:
        """As PrefillAdder.add_one_req: load-back under a temporary lock."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        self.check_depth(req)
        node, temporary = req.last_node, self.tree.inc_lock_ref(req.last_node).to_dec_params()
        before = self.pool.resume_points.counters().restored
        if req.needs_host_load_back():
            assert req.swa_host_hit_length == PAGE and req.host_hit_length == 0
            indices, req.last_node = self.tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
                )
            )
            req.prefix_indices = torch.cat([req.prefix_indices, indices])
            req.cache_protected_len = len(req.prefix_indices)
        super().lock(req)
        self.tree.dec_lock_ref(node, temporary)
        self.restored_hits += self.pool.resume_points.counters().restored - before

    def check_depth(self, req) -> None:
        """The hit ends at the deepest resumable node of the request's path, read from the tree itself."""
        tokens = list(req.origin_input_ids + req.output_ids)
        core = self.tree.tree_core
        node, position, deepest, present = core.root_node, 0, 0, 0
        limit = (len(tokens) - 1) // PAGE * PAGE
        while position < limit:
            following = [
                child
                for child in node.children.values()
                if child.key.extra_key == req.extra_key
                and list(child.key.token_ids) == tokens[position : position + len(child.key)]
            ]
            if not following or position + len(following[0].key) > limit:
                break
            (node,) = following
            position += len(node.key)
            present = position
            if node.component_data[1].value is not None or node.id in self.pool.resume_points:
                deepest = position
        assert len(req.prefix_indices) == deepest
        if self.interval == PAGE and self.capacity == MANY:
            assert deepest == present, "with this interval every page is resumable"

    def admitted(self, req, start: int) -> None:
        if start:
            self.hit_requests += 1
            self.check_continuation(req, start)

    # Operations that SGLang's scheduler does through our seam

    def retract(self) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        from sglang_dsv4x.engine.resume import retracting

        if not self.running:
            return
        req = self.running.pop()
        retracting(
            lambda *, req, tree_cache: release_kv_cache(req, tree_cache, is_insert=False),
            req=req,
            tree_cache=self.tree,
        )
        req.reset_for_retract()
        self.waiting.append(req)
        self.retractions += 1

    def check(self) -> None:
        super().check()
        self.tree.sanity_check()
        points = self.pool.resume_points
        known = {node.id for node in self.tree.tree_core._collect_all_nodes()}
        owners = {owner for queue in points._points.values() for owner in queue}
        holding = {req.rid for req in (*self.running, self.chunked) if req is not None}
        lost = [o for o in owners - known if not (isinstance(o, tuple) and o[0] in holding)]
        assert not lost, "a point outlived its node, or its request"


@pytest.mark.parametrize(
    ("interval", "capacity"), [(PAGE, MANY), (2 * PAGE, 6), (CONTEXT * 256, MANY), (PAGE, 1)]
)
def test_every_hit_continues_from_its_own_bytes_and_is_as_deep_as_it_can_be(
    interval: int,
    capacity: int,
    sglang: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.mem_cache import common

    from sglang_dsv4x.engine.resume import leaving_window

    monkeypatch.setenv("SGLANG_DSV4X_CONFIG", "{}")
    monkeypatch.setattr(
        common,
        "free_swa_out_of_window_slots",
        functools.partial(leaving_window, common.free_swa_out_of_window_slots),
    )
    server = ResumingServer(interval + capacity, interval, capacity)
    operations = [
        (server.start, 5),
        (server.extend, 10),
        (server.decode, 5),
        (server.decode_many, 2),
        (server.finish, 4),
        (server.abort, 0.7),
        (server.retract, 0.5),
        (server.evict, 3),
        (server.flush, 0.3),
    ]
    try:
        for _ in range(OPERATIONS):
            server.random.choices([op for op, _ in operations], [weight for _, weight in operations])[0]()
            server.check()
    finally:
        server.tier.close()
    counters = server.pool.resume_points.counters()
    assert server.hit_requests and server.retractions and server.flushes
    assert counters.written and counters.released
    if capacity > 1:
        assert server.restored_hits
    if capacity < MANY:
        assert counters.replaced
