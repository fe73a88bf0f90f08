"""The CPU platform's allocators choose the pages that SGLang's Triton kernels would choose.

The oracle is the very source of those kernels, run one program after the other by Triton's interpreter in a process
of its own, since the interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("sglang")
pytest.importorskip("dsv4x_cpu_platform", reason="the CPU platform is installed only where CUDA is absent")

PAGE_SIZES = (2, 16, 256)
CASES_PER_PAGE_SIZE = 20

ORACLE = """
import sys, torch
from sglang.kernels.ops.memory.allocator import alloc_decode_kernel, alloc_extend_kernel

answers = []
for c in torch.load(sys.argv[1]):
    upper = 1 << (len(c["seq"]) - 1).bit_length()
    extended = torch.full((int((c["seq"] - c["prefix"]).sum()),), -7)
    alloc_extend_kernel[(len(c["seq"]),)](
        c["prefix"], c["seq"], c["last"], c["free"], extended, upper, c["page"])
    decoded = torch.full((len(c["seq"]),), -7)
    alloc_decode_kernel[(len(c["seq"]),)](c["decode_seq"], c["decode_last"], c["free"], decoded, upper, c["page"])
    answers.append((extended, decoded))
torch.save(answers, sys.argv[2])
"""


class Case(NamedTuple):
    """Requests of one batch: prefixes to extend, and lengths to decode at; [requests] int64 each."""

    page: int
    prefix: torch.Tensor
    seq: torch.Tensor
    last: torch.Tensor
    decode_seq: torch.Tensor
    decode_last: torch.Tensor
    free: torch.Tensor


def random_case(page: int, rng: random.Random) -> Case:
    """Lengths around page borders more often than elsewhere; free pages in no order."""
    requests = rng.randint(1, 9)
    pages = list(range(1, 400))
    rng.shuffle(pages)

    def length(low: int) -> int:
        border = rng.randint(0, 5) * page
        return max(low, rng.choice([border - 1, border, border + 1, rng.randint(0, 5 * page)]))

    def last(tokens: int) -> int:
        return pages.pop() * page + (tokens - 1) % page if tokens else -1

    prefix = [length(0) for _ in range(requests)]
    seq = [length(p) for p in prefix]
    decode_seq = [length(2) for _ in range(requests)]
    return Case(
        page,
        torch.tensor(prefix),
        torch.tensor(seq),
        torch.tensor([last(tokens) for tokens in prefix]),
        torch.tensor(decode_seq),
        torch.tensor([last(tokens - 1) for tokens in decode_seq]),
        torch.tensor(pages),
    )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(20)
    return [random_case(page, rng) for page in PAGE_SIZES for _ in range(CASES_PER_PAGE_SIZE)]


@pytest.fixture(scope="module")
def kernel_answers(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """(extend, decode) locations of each case from SGLang's kernels."""
    folder: Path = tmp_path_factory.mktemp("kernels")
    torch.save([case._asdict() for case in cases], folder / "cases.pt")
    subprocess.run(
        [sys.executable, "-c", ORACLE, str(folder / "cases.pt"), str(folder / "answers.pt")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=300,
    )
    answers: list[Any] = torch.load(folder / "answers.pt")
    return answers


@pytest.fixture(scope="module")
def server_args() -> Iterator[None]:
    """SGLang's process-wide settings, which its pools read."""
    from sglang.srt.runtime_context import publish, reset_context
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="none", device="cpu", page_size=16), role="scheduler")
    yield
    reset_context()


def paged(case: Case) -> Any:
    from dsv4x_cpu_platform.allocators import TorchPagedAllocator

    allocator = TorchPagedAllocator(400 * case.page, case.page, torch.bfloat16, "cpu", None, False)
    allocator.free_pages = case.free.clone()
    return allocator


def test_extend_takes_the_pages_that_sglangs_kernel_takes(
    cases: list[Case], kernel_answers: list[Any]
) -> None:
    from sglang.srt.utils.common import get_num_new_pages

    for case, (expected, _) in zip(cases, kernel_answers, strict=True):
        allocator = paged(case)
        got = allocator.alloc_extend(
            case.prefix, case.prefix, case.seq, case.seq, case.last, int((case.seq - case.prefix).sum())
        )
        assert got.dtype == torch.int64
        assert torch.equal(got, expected), case
        taken = get_num_new_pages(seq_lens=case.seq, page_size=case.page, prefix_lens=case.prefix)
        assert torch.equal(allocator.free_pages, case.free[taken:]), case


def test_decode_takes_the_pages_that_sglangs_kernel_takes(
    cases: list[Case], kernel_answers: list[Any]
) -> None:
    for case, (_, expected) in zip(cases, kernel_answers, strict=True):
        allocator = paged(case)
        got = allocator.alloc_decode(case.decode_seq, case.decode_seq, case.decode_last)
        assert got.dtype == torch.int64
        assert torch.equal(got, expected), case
        taken = int(((case.decode_seq - 1) % case.page == 0).sum())
        assert torch.equal(allocator.free_pages, case.free[taken:]), case


def test_int32_lengths_give_the_same_locations(cases: list[Case]) -> None:
    """SGLang passes int32 lengths in some paths."""
    from dsv4x_cpu_platform.allocators import decode_locations, extend_locations

    for case in cases:
        total = int((case.seq - case.prefix).sum())
        wide = extend_locations(case.prefix, case.seq, case.last, case.free, total, case.page)
        narrow = extend_locations(
            case.prefix.int(), case.seq.int(), case.last.int(), case.free, total, case.page
        )
        assert torch.equal(wide, narrow)
        wide = decode_locations(case.decode_seq, case.decode_last, case.free, case.page)
        narrow = decode_locations(case.decode_seq.int(), case.decode_last.int(), case.free, case.page)
        assert torch.equal(wide, narrow)


def test_when_too_few_pages_are_free_none_is_taken(cases: list[Case]) -> None:
    case = next(c for c in cases if int(((c.decode_seq - 1) % c.page == 0).sum()) > 1)
    allocator = paged(case)
    allocator.free_pages = case.free[:1].clone()
    assert allocator.alloc_decode(case.decode_seq, case.decode_seq, case.decode_last) is None
    long = case.prefix + 4 * case.page
    assert (
        allocator.alloc_extend(case.prefix, case.prefix, long, long, case.last, 4 * case.page * len(long))
        is None
    )
    assert torch.equal(allocator.free_pages, case.free[:1])


def test_released_pages_are_sorted_back_in_when_the_free_list_runs_short() -> None:
    """need_sort (prefill/decode disaggregation): freed pages wait apart and return in ascending order."""
    from dsv4x_cpu_platform.allocators import TorchPagedAllocator

    allocator = TorchPagedAllocator(8 * 4, 4, torch.bfloat16, "cpu", None, True)
    zero, last = torch.tensor([0]), torch.tensor([-1])
    first = allocator.alloc_extend(zero, zero, torch.tensor([24]), torch.tensor([24]), last, 24)
    allocator.free(first[8:24])
    assert allocator.free_pages.tolist() == [7, 8]
    second = allocator.alloc_extend(zero, zero, torch.tensor([16]), torch.tensor([16]), last, 16)
    assert (second[::4] // 4).tolist() == [3, 4, 5, 6]


def swa_pool(page: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=20 * page,
        size_swa=10 * page,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=8,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
        token_to_kv_pool_class=MHATokenToKVPool,
    )


def test_a_pool_with_window_layers_gets_two_torch_allocators_of_its_own_sizes(server_args: None) -> None:
    from dsv4x_cpu_platform.allocators import TorchPagedAllocator, TorchSWAAllocator, make_allocator

    pool = swa_pool(16)
    allocator = make_allocator(
        320, page_size=16, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
    )
    assert type(allocator) is TorchSWAAllocator
    for inner, tokens, its_pool in (
        (allocator.full_attn_allocator, 320, pool.full_kv_pool),
        (allocator.swa_attn_allocator, 160, pool.swa_kv_pool),
    ):
        assert type(inner) is TorchPagedAllocator
        assert inner.available_size() == tokens
        assert inner.get_kvcache() is its_pool

    zero, last = torch.tensor([0]), torch.tensor([-1])
    length = torch.tensor([33])
    locations = allocator.alloc_extend(zero, zero, length, length, last, 33)
    following = allocator.alloc_decode(length + 1, length + 1, locations[-1:])
    assert following.tolist() == [locations[-1] + 1]
    window = allocator.translate_loc_from_full_to_swa(torch.cat((locations, following)))
    assert torch.equal(window, torch.arange(16, 16 + 34))
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (320 - 48, 160 - 48)
    allocator.free(torch.cat((locations, following)))
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (320, 160)


def test_pools_without_window_layers_get_a_paged_or_a_token_allocator() -> None:
    from dsv4x_cpu_platform.allocators import TorchPagedAllocator, make_allocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    settings: dict[str, Any] = dict(
        dtype=torch.bfloat16, device="cpu", kvcache=SimpleNamespace(), need_sort=False
    )
    assert type(make_allocator(64, page_size=16, **settings)) is TorchPagedAllocator
    assert type(make_allocator(64, page_size=1, **settings)) is TokenToKVPoolAllocator


def test_a_model_with_window_layers_only_is_refused(server_args: None) -> None:
    from dsv4x_cpu_platform.allocators import make_allocator

    with pytest.raises(ValueError, match="every layer is a window layer"):
        make_allocator(
            0, page_size=1, dtype=torch.bfloat16, device="cpu", kvcache=swa_pool(1), need_sort=False
        )
