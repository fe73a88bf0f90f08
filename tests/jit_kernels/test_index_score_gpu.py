"""The MXFP4 score kernel against fp64 sums, on the cases of the benchmark: values, bits, bounds and captured graphs."""

from __future__ import annotations

import pytest
import torch
from sglang_dsv4x.jit_kernels import registry
from sglang_dsv4x.jit_kernels.index_rows import fold_index_query, quantise_index_query, unpack_index_rows
from sglang_dsv4x.jit_kernels.paged_rows import gather_rows

from sglang_dsv4x.bench.ops_index_score import FP4, SMALL, Case

pytestmark = pytest.mark.gpu

# The FP8 tensor cores sum with about 13 bits below the largest term; measured against sum_h |w_h q_h . k|.
TOLERANCE = 3e-4


@pytest.fixture
def index_scores():
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    return registry.select("auto", device).index_scores


class Inputs:
    """Random keys on shuffled pages of `pages`; bytes of no entry, and page numbers of no page, are poison."""

    def __init__(self, case: Case, heads: int = 64, spread: int = 3) -> None:
        self.case = case
        total = case.batch * case.pages + 3
        self.pages = torch.full((total, FP4.page_bytes), 0xFF, dtype=torch.uint8)
        order = torch.randperm(total)[: case.batch * case.pages].view(case.batch, case.pages)
        self.table = torch.randint(-5, 1 << 20, (case.batch, case.pages + 2), dtype=torch.int32)
        self.table[:, : case.pages] = order.int()
        for i, page in enumerate(order.flatten().tolist()):
            count = min(64, case.entries - i % case.pages * 64)
            self.pages[page, : count * 64] = torch.randint(0, 256, (count * 64,), dtype=torch.uint8)
            scales = torch.randint(127 - spread, 128, (count * 4,), dtype=torch.uint8)
            self.pages[page, 4096 : 4096 + count * 4] = scales
        self.lens = case.lens(torch.device("cpu"))
        self.request = torch.arange(case.batch).repeat_interleave(case.queries)
        tokens = case.batch * case.queries
        self.q = quantise_index_query(torch.randn(tokens, heads, 128), "fp4", "released")
        self.weights = torch.randn(tokens, heads)

    def run(self, index_scores, **options) -> torch.Tensor:
        return self.run_on_device(index_scores, **options).cpu()

    def run_on_device(self, index_scores, **options) -> torch.Tensor:
        on = [x.cuda() for x in (self.q, self.weights, self.pages, self.table, self.request, self.lens)]
        return index_scores(*on[:3], FP4, "fp4", "released", *on[3:], **options)

    def exact(self, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 [lens[t]]: scores of query t, and sum_h |w_h q_h . k|."""
        n = int(self.lens[t])
        position = torch.arange(n)
        loc = self.table[self.request[t], position // 64].long() * 64 + position % 64
        keys = unpack_index_rows(gather_rows(self.pages, FP4, loc), "fp4", "released").double()
        dots = self.q[t].double() @ keys.T
        w = self.weights[t].double()
        return w @ dots.relu(), w.abs() @ dots.abs()

    def check(self, got: torch.Tensor, queries: list[int] | None = None) -> None:
        for t in queries if queries is not None else range(len(self.lens)):
            n = int(self.lens[t])
            want, size = self.exact(t)
            assert not got[t, :n].isnan().any(), "a poisoned byte or page was read"
            error = (got[t, :n].double() - want).abs() / size.clamp_min(1e-30)
            assert n == 0 or error.max() < TOLERANCE, (self.case.name, t, float(error.max()))
            assert (got[t, n:] == float("-inf")).all()


@pytest.mark.parametrize("heads", [64, 16, 3])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.batch}x{case.entries}x{case.queries}")
def test_scores_equal_fp64_sums(case, heads, index_scores) -> None:
    inputs = Inputs(case, heads)
    tokens = len(inputs.lens)
    picked = sorted({*range(min(tokens, 40)), tokens // 2, tokens - 1})
    inputs.check(inputs.run(index_scores), picked)


def test_lengths_of_every_kind_in_one_batch(index_scores) -> None:
    inputs = Inputs(Case(9, 400))
    inputs.lens = torch.tensor([0, 1, 63, 64, 65, 128, 399, 400, 0], dtype=torch.int32)
    inputs.check(inputs.run(index_scores))
    inputs.check(inputs.run(index_scores, width=1000))


@pytest.mark.parametrize("case", [Case(4, 900), Case(2, 300, 9)], ids=["decode", "prefill"])
def test_bits_depend_on_the_query_and_the_row_alone(case, index_scores) -> None:
    """Determinism: another run, other pages and other company must not change a bit."""
    inputs = Inputs(case)
    first = inputs.run(index_scores)
    assert torch.equal(first, inputs.run(index_scores))
    move = torch.randperm(len(inputs.pages))
    moved = Inputs(case)
    moved.q, moved.weights = inputs.q, inputs.weights
    moved.pages = torch.empty_like(inputs.pages)
    moved.pages[move] = inputs.pages
    moved.table[:, : case.pages] = move[inputs.table[:, : case.pages].long()].int()
    assert torch.equal(first, moved.run(index_scores))
    # The same rows scored by the other kernel: queries one by one, each with a row of the table of its own.
    alone = Inputs(case)
    alone.pages, alone.q, alone.weights = inputs.pages, inputs.q, inputs.weights
    alone.table = inputs.table[inputs.request]
    alone.request = torch.arange(len(inputs.lens))
    assert torch.equal(first, alone.run(index_scores))
    alone.lens = inputs.lens.clone()
    alone.lens[1:] = 1
    n = int(inputs.lens[0])
    assert torch.equal(first[0, :n], alone.run(index_scores)[0, :n])


@pytest.mark.parametrize("case", [Case(3, 200), Case(1, 200, 6)], ids=["decode", "prefill"])
def test_far_apart_group_scales(case, index_scores) -> None:
    """Beyond 14 powers of two the small groups are rounded, which must stay below the tolerance."""
    inputs = Inputs(case, spread=40)
    inputs.check(inputs.run(index_scores))


@pytest.mark.parametrize("scale", [0, 1, 100, 200])
def test_rows_of_extreme_scale(scale, index_scores) -> None:
    inputs = Inputs(Case(2, 100))
    inputs.pages[:, 4096:] = scale
    inputs.check(inputs.run(index_scores))


def test_a_poisoned_row_scores_nan_and_no_other(index_scores) -> None:
    inputs = Inputs(Case(1, 130))
    page = int(inputs.table[0, 1])
    inputs.pages[page, 4096 + 5 * 4 + 2] = 0xFF
    got = inputs.run(index_scores)
    assert got[0].isnan().nonzero().flatten().tolist() == [69]


def test_a_faulty_query_scores_nan(index_scores) -> None:
    inputs = Inputs(Case(2, 70))
    inputs.q[1, 3, 7] = float("nan")
    got = inputs.run(index_scores)
    assert got[1].isnan().all() and not got[0].isnan().any()


def test_a_folded_query_gives_the_same_bits(index_scores) -> None:
    inputs = Inputs(Case(3, 300))
    want = inputs.run(index_scores)
    q = torch.randn(3, 64, 128)
    inputs.q = quantise_index_query(q, "fp4", "released")
    weights = inputs.weights
    want = inputs.run(index_scores)
    inputs.q, inputs.weights = fold_index_query(q, weights, "fp4")
    assert inputs.q.dtype == torch.float8_e4m3fn
    assert torch.equal(want, inputs.run(index_scores))


def test_without_clean_only_what_is_seen_is_promised(index_scores) -> None:
    inputs = Inputs(Case(3, 300))
    inputs.lens[1] = 7
    want, got = inputs.run(index_scores), inputs.run(index_scores, width=4096, clean=False)
    for t, n in enumerate(inputs.lens.tolist()):
        assert torch.equal(got[t, :n], want[t, :n])


@pytest.mark.parametrize("case", [Case(5, 700), Case(1, 700, 8)], ids=["decode", "prefill"])
def test_a_captured_graph_follows_lengths_tables_and_keys(case, index_scores) -> None:
    inputs = Inputs(case)
    on = [
        x.cuda() for x in (inputs.q, inputs.weights, inputs.pages, inputs.table, inputs.request, inputs.lens)
    ]

    def launch() -> torch.Tensor:
        return index_scores(*on[:3], FP4, "fp4", "released", *on[3:], width=1500)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch()
    for _ in range(3):
        other = Inputs(case)
        other.lens = (other.lens.float() * torch.rand(len(other.lens))).int()
        for to, value in zip(
            on, (other.q, other.weights, other.pages, other.table, other.request, other.lens), strict=True
        ):
            to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        other.check(got.cpu())


def test_tensors_of_another_kind_are_refused_by_name(index_scores) -> None:
    inputs = Inputs(Case(2, 70))
    inputs.lens = inputs.lens.long()
    with pytest.raises(ValueError, match=r"lens must be contiguous torch\.int32"):
        inputs.run(index_scores)
