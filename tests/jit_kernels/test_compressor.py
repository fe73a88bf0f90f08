"""The compressor on paged, shuffled locations: every phase, every split, prefix hits, against a loop over entries."""

from __future__ import annotations

import pytest
import torch
from sglang_dsv4x.jit_kernels.compressor import compress, plan_compression, write_state

PAGE = 256
RINGS = {4: 8, 128: 128}
EPS = 1e-6


def _table(length: int = 4096) -> torch.Tensor:
    angle = torch.outer(torch.arange(length).double(), 160000.0 ** (-torch.arange(32).double() / 32))
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


FREQS = _table()


class _Server:
    """Pages handed out in shuffled order, full and SWA apart; state rows start as NaN, so a stray read shows."""

    def __init__(self, ratio: int, dim: int, slots: int = 4, pages: int = 12, dtype=torch.float32) -> None:
        self.ratio, self.dim, self.ring = ratio, dim, RINGS[ratio]
        self.overlap = 2 if ratio == 4 else 1
        width = 2 * self.overlap * dim
        self.free = torch.randperm(pages).tolist()
        swa = torch.randperm(pages)
        self.full_to_swa = (swa[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.req_to_token = torch.full((slots, 2048), -(1 << 40), dtype=torch.int64)
        self.state = torch.full(
            ((pages if ratio == 4 else slots) * self.ring, width), float("nan"), dtype=dtype
        )
        self.ape = torch.randn(self.overlap * ratio, dim)
        self.norm = torch.rand(dim) + 0.5
        self.length = [0] * slots

    def _extend(self, slot: int, count: int) -> None:
        for position in range(self.length[slot], self.length[slot] + count):
            if position % PAGE == 0:
                page = torch.arange(PAGE) + self.free.pop() * PAGE
                self.req_to_token[slot, position : position + PAGE] = page
        self.length[slot] += count

    def hit(self, slot: int, other: int, length: int) -> None:
        """`slot` starts with the first `length` tokens of `other`, whole pages."""
        self.req_to_token[slot, :length] = self.req_to_token[other, :length]
        self.length[slot] = length

    def plan(self, slots: list[int], counts: list[int]):
        for slot, count in zip(slots, counts, strict=True):
            self._extend(slot, count)
        return plan_compression(
            ratio=self.ratio,
            seq_lens=torch.tensor([self.length[s] for s in slots]),
            extend_lens=torch.tensor(counts),
            req_pool_indices=torch.tensor(slots),
            req_to_token=self.req_to_token,
            full_to_swa=self.full_to_swa,
            swa_page_size=PAGE,
            ring_size=self.ring,
        )

    def step(self, slots: list[int], chunks: list[torch.Tensor]) -> list[torch.Tensor]:
        """One forward; returns the entries of each request."""
        plan = self.plan(slots, [len(c) for c in chunks])
        assert len(plan.write_rows.unique()) == len(plan.write_rows), "two writes to one state row"
        kv_score = torch.cat(chunks)
        made = compress(kv_score, self.state, self.ape, self.norm, EPS, FREQS, plan)
        write_state(self.state, kv_score, plan)
        ends = torch.tensor([len(c) for c in chunks]).cumsum(0)
        owner = torch.searchsorted(ends, made.tokens, right=True)
        for slot, end, count in zip(slots, ends.tolist(), (len(c) for c in chunks), strict=True):
            mine = made.tokens[owner == slots.index(slot)]
            position = mine - (end - count) + self.length[slot] - count
            assert ((position + 1) % self.ratio == 0).all()
        return [made.entries[owner == i] for i in range(len(slots))]

    def run(self, slot: int, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.cat([self.step([slot], [c])[0] for c in tokens.split(sizes)])

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randn(count, 2 * self.overlap * self.dim)

    def naive(self, tokens: torch.Tensor) -> torch.Tensor:
        """Entries of a whole sequence, one at a time, from the definition."""
        d, entries = self.dim, []
        kv, score = tokens.double().chunk(2, 1)
        for i in range(len(tokens) // self.ratio):
            own = range(self.ratio * i, self.ratio * (i + 1))
            if self.ratio == 128:
                rows = [(kv[t], score[t] + self.ape[t % 128]) for t in own]
            else:
                before = range(max(0, 4 * i - 4), 4 * i)
                rows = [(kv[t, :d], score[t, :d] + self.ape[t % 4]) for t in before]
                rows += [(kv[t, d:], score[t, d:] + self.ape[4 + t % 4]) for t in own]
            values, scores = (torch.stack(x) for x in zip(*rows, strict=True))
            e = (scores.softmax(0) * values).sum(0)
            e = e * (e.square().mean() + EPS).rsqrt() * self.norm.double()
            turn = FREQS[self.ratio * i].to(torch.complex128)
            e[-64:] = torch.view_as_real(torch.complex(e[-64::2].clone(), e[-63::2].clone()) * turn).flatten()
            entries.append(e)
        return torch.stack(entries) if entries else torch.empty(0, d, dtype=torch.float64)


def _pieces(total: int, size: int, first: int | None = None) -> list[int]:
    sizes = [first] if first else []
    while sum(sizes) < total:
        sizes.append(min(size, total - sum(sizes)))
    return sizes


@pytest.mark.parametrize(("ratio", "dim"), [(4, 512), (4, 128), (128, 512)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 131, 516])
def test_entries_equal_the_definition(ratio, dim, length) -> None:
    server = _Server(ratio, dim)
    tokens = server.tokens(length)
    got = server.run(0, tokens, [length])
    assert got.shape == (length // ratio, dim) and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), server.naive(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 530,
        *([phase, *_pieces(530 - phase, 64)] for phase in (1, 2, 3, 4, 5, 6, 7)),
        _pieces(530, 3),
        _pieces(530, 100),
        _pieces(530, 128),
        _pieces(530, 256),
        _pieces(530, 257),
        [250, *[1] * 20, 260],
        [*_pieces(512, 512), *[1] * 18],
    ],
    ids=lambda s: f"{len(s)} steps of {s[0]},{s[1]}",
)
def test_c4_entries_have_the_same_bits_for_every_split(sizes) -> None:
    whole = _Server(4, 128)
    tokens = whole.tokens(530)
    want = whole.run(0, tokens, [530])
    whole.free, whole.length = torch.randperm(12).tolist(), [0] * 4
    whole.state.fill_(float("nan"))
    assert torch.equal(whole.run(0, tokens, sizes), want)


@pytest.mark.parametrize("first", [1, 2, 5, 63, 64, 65, 126, 127, 128, 129, 130, 200, 255, 256])
@pytest.mark.parametrize("size", [128, 77])
def test_c128_entries_have_the_same_bits_for_every_split(first, size) -> None:
    whole = _Server(128, 128)
    tokens = whole.tokens(530)
    want = whole.run(0, tokens, [530])
    whole.length = [0] * 4
    whole.free = torch.randperm(12).tolist()
    whole.state.fill_(float("nan"))
    sizes = [first, *[1] * 4, *_pieces(526 - first, size)]
    assert torch.equal(whole.run(0, tokens, sizes), want)


@pytest.mark.parametrize("phase", range(128))
def test_c128_entries_do_not_depend_on_the_phase_of_a_decoded_token(phase) -> None:
    server = _Server(128, 64)
    tokens = server.tokens(257)
    want = server.run(0, tokens, [257])
    server.length, server.free = [0] * 4, torch.randperm(12).tolist()
    server.state.fill_(float("nan"))
    sizes = [phase, 1, 127, 1, 128 - phase]
    assert torch.equal(server.run(0, tokens, [n for n in sizes if n]), want)


@pytest.mark.parametrize("ratio", [4, 128])
def test_requests_of_one_batch_do_not_mix(ratio) -> None:
    alone = _Server(ratio, 64)
    sequences = [alone.tokens(n) for n in (300, 411, 263)]
    wants = [alone.run(slot, tokens, [len(tokens)]) for slot, tokens in enumerate(sequences)]
    server = _Server(ratio, 64)
    server.ape, server.norm = alone.ape, alone.norm
    got: list[list[torch.Tensor]] = [[], [], []]
    at = [0, 0, 0]
    generator = torch.Generator().manual_seed(1)
    while any(a < len(s) for a, s in zip(at, sequences, strict=True)):
        slots = [
            i for i in range(3) if at[i] < len(sequences[i]) and torch.rand(1, generator=generator) < 0.8
        ]
        if not slots:
            continue
        decode = bool(torch.rand(1, generator=generator) < 0.5)
        sizes = [1 if decode else int(torch.randint(1, 70, (1,), generator=generator)) for _ in slots]
        chunks = [sequences[i][at[i] : at[i] + n] for i, n in zip(slots, sizes, strict=True)]
        for i, chunk, entries in zip(slots, chunks, server.step(slots, chunks), strict=True):
            at[i] += len(chunk)
            got[i].append(entries)
    for entries, want in zip(got, wants, strict=True):
        assert torch.equal(torch.cat(entries), want)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("cut", [256, 512])
@pytest.mark.parametrize(
    "sizes", [[600], [100] * 6, [255, 2, 343], [*[200], *[1] * 400]], ids=lambda s: str(s[0])
)
def test_a_prefix_hit_at_a_page_end_resumes_with_the_same_bits(ratio, cut, sizes) -> None:
    server = _Server(ratio, 64)
    first, second = server.tokens(600), server.tokens(300)
    server.run(0, first, sizes)
    server.hit(1, 0, cut)
    resumed = torch.cat([server.step([1], [c])[0] for c in second.split([1, 1, 98, 200])])
    together = torch.cat([first[:cut], second])
    want = server.run(2, together, [len(together)])
    assert torch.equal(resumed, want[cut // ratio :])


def test_state_may_be_bf16() -> None:
    server = _Server(4, 64, dtype=torch.bfloat16)
    tokens = server.tokens(64)
    got = server.run(0, tokens, [3] * 21 + [1])
    torch.testing.assert_close(got.double(), server.naive(tokens), rtol=0.05, atol=0.1)
    assert server.state.dtype == torch.bfloat16


def test_c4_state_holds_the_ring_and_the_end_of_every_page() -> None:
    server = _Server(4, 64)
    server.run(0, server.tokens(600), [600])
    plan = server.plan([1], [600])
    kept = set(plan.write_tokens.tolist())
    assert kept == {*range(248, 256), *range(504, 512), *range(592, 600)}
    assert len(set(plan.write_rows.tolist())) == 24


def test_c128_state_holds_the_unfinished_block() -> None:
    server = _Server(128, 64)
    assert server.plan([0], [300]).write_tokens.tolist() == list(range(256, 300))
    assert server.plan([0], [1]).write_rows.tolist() == [300 - 256]
    assert server.plan([1], [255]).write_tokens.tolist() == list(range(128, 255))
    assert server.plan([1], [1]).write_rows.tolist() == [128 + 127], (
        "a decoded token is kept even at a block end"
    )


def test_a_step_without_a_block_end_makes_no_entry() -> None:
    server = _Server(4, 64)
    assert server.run(0, server.tokens(3), [3]).shape == (0, 64)


@pytest.mark.parametrize(("ratio", "ring"), [(4, 4), (4, 12), (128, 64), (2, 8)])
def test_impossible_shapes_are_refused(ratio, ring) -> None:
    one = torch.tensor([1])
    with pytest.raises(ValueError, match=r"ring of at least|not 4 or 128"):
        plan_compression(
            ratio=ratio,
            seq_lens=one,
            extend_lens=one,
            req_pool_indices=one,
            req_to_token=torch.zeros(2, 8, dtype=torch.int32),
            full_to_swa=torch.zeros(8, dtype=torch.int64),
            swa_page_size=PAGE,
            ring_size=ring,
        )


def test_ape_of_another_ratio_is_refused() -> None:
    server = _Server(4, 64)
    plan = server.plan([0], [4])
    with pytest.raises(ValueError, match="C4 takes ape"):
        compress(server.tokens(4), server.state, torch.zeros(4, 128), server.norm, EPS, FREQS, plan)
