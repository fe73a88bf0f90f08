"""CUDA backend of `index_scores` for MXFP4 keys on Hopper (`csrc/index_score_sm90.cu`), which SGLang and DeepGEMM lack.

Products run on the FP8 tensor cores. The query is folded to e4m3 (`fold_index_query`) and a key row to e4m3 times one
power of two: both exact unless the group scales of one row are more than 14 powers of two apart, and then to within
2^-17 of the row's largest value. What remains is the tensor cores' own FP8 sum, which keeps about 13 bits of the
largest term, as in DeepGEMM's FP8 kernel: scores differ from the torch backend's by about 1e-4 of sum_h |w_h q_h . k|.
A score's bits depend on the query, its weights and the key's row alone: not on the batch, the page or the length.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from . import index_score
from .layouts import INDEX_HEAD_DIM, IndexDtype, PageLayout, Storage
from .nvcc import load
from .registry import register

HEADS = 64
"""The most heads that the kernel has room for; with fewer the rest are zeros."""

_SOURCE = "index_score_sm90"


class _Params(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "weights", "pages", "page_table", "query_request", "lens", "out")
        ),
        *((name, ctypes.c_int64) for name in ("out_stride", "table_stride")),
        *((name, ctypes.c_int) for name in ("queries", "heads", "width", "page_count", "clean")),
    )


@register("index_scores", "cuda", capability=(9, 0))
def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_pages: torch.Tensor,
    layout: PageLayout,
    dtype: IndexDtype,
    storage: Storage,
    page_table: torch.Tensor,
    query_request: torch.Tensor,
    lens: torch.Tensor,
    width: int | None = None,
    clean: bool = True,
) -> torch.Tensor:
    """`index_score.index_scores`. FP8 and fp32 keys, and more than 64 heads, go to the torch backend.

    With as many requests as queries (decode) the pages are shared out evenly over the GPU; with more queries than
    requests (prefill, speculation) neighbouring queries of a request share the unpacked keys. With `width` there
    is no host synchronisation. A page number outside the pool is clamped into it, as by the torch backend.

    Raises: ValueError for a tensor of another dtype or layout; KernelError without nvcc, at first use.
    """
    queries, heads, _ = q.shape
    if dtype != "fp4" or storage != "released" or heads > HEADS:
        return index_score.index_scores(
            q,
            weights,
            index_pages,
            layout,
            dtype,
            storage,
            page_table,
            query_request,
            lens,
            width,
            clean,
        )
    _expect(weights, "weights", torch.float32, (queries, heads))
    _expect(index_pages, "index_pages", torch.uint8, (index_pages.shape[0], layout.page_bytes))
    _expect(query_request, "query_request", torch.int64, (queries,))
    _expect(lens, "lens", torch.int32, (queries,))
    if page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.stride(1) != 1:
        raise ValueError(f"page_table must be int32 with adjacent columns, not {_describe(page_table)}")
    if width is None:
        width = int(lens.max()) if queries else 0
    scores = torch.empty(queries, width, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    if q.dtype == torch.float32:
        q, weights = _fold(q.contiguous(), weights)
    _expect(q, "q", torch.float8_e4m3fn, (queries, heads, INDEX_HEAD_DIM))
    params = _Params(
        q.data_ptr(),
        weights.data_ptr(),
        index_pages.data_ptr(),
        page_table.data_ptr(),
        query_request.data_ptr(),
        lens.data_ptr(),
        scores.data_ptr(),
        scores.stride(0),
        page_table.stride(0),
        queries,
        heads,
        width,
        index_pages.shape[0],
        clean,
    )
    library = load(_SOURCE)
    launch = library.index_score_blocks if queries > page_table.shape[0] else library.index_score_each
    _check(launch(ctypes.byref(params), _multiprocessors(q.device), _stream(q.device)), "index_scores")
    return scores


def _fold(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A query that is on the grid already, fp32 [T, H, 128], to e4m3 and the weights that go with it."""
    folded = torch.empty_like(q, dtype=torch.float8_e4m3fn)
    scaled = torch.empty_like(weights)
    error = load(_SOURCE).index_score_fold_query(
        *(ctypes.c_void_p(x.data_ptr()) for x in (q, weights, folded, scaled)),
        q.shape[0] * q.shape[1],
        _stream(q.device),
    )
    _check(error, "fold_query")
    return folded, scaled


def _expect(x: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, not {_describe(x)}")


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {x.stride()}"


def _check(error: int, op: str) -> None:
    if error:
        raise RuntimeError(f"the CUDA kernel of {op} cannot be launched: CUDA error {error}")


def _stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
