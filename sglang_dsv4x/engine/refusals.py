"""What cannot be combined with --enable-dsv4x yet, with the flag to drop and the reason.

Every refused setting of a command line is listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..config import Dsv4xConfig, sparse_prefill_switched_off

ARCHITECTURE = "DeepseekV4ForCausalLM"
KV_DTYPES = ("auto", "fp8_e4m3")


class RefusedError(ValueError):
    """Settings that --enable-dsv4x refuses; the message lists each with its reason and remedy."""


class Refusal(NamedTuple):
    flag: str
    applies: Callable[[Any, Dsv4xConfig], bool]
    reason: str


def _non_nvidia(args: Any, config: Dsv4xConfig) -> bool:
    return torch.version.hip is not None or (args.device or "cuda").split(":")[0] not in ("cuda", "cpu")


def _graphs_off(args: Any) -> bool:
    return bool(args.disable_cuda_graph) or (
        args.cuda_graph_backend_decode == "disabled" and args.cuda_graph_backend_prefill == "disabled"
    )


GIVEN = (
    Refusal(
        "--enable-hisparse",
        lambda a, c: a.enable_hisparse,
        "it owns C4 rows per request; --dsv4x-tier replaces it",
    ),
    Refusal(
        "--enable-deepseek-v4-fp4-indexer",
        lambda a, c: a.enable_deepseek_v4_fp4_indexer,
        "its kernels are for Blackwell only; --dsv4x-index-dtype fp4 replaces it",
    ),
    Refusal(
        "--disaggregation-mode",
        lambda a, c: a.disaggregation_mode not in (None, "null"),
        "KV transfer assumes that C4 page i of the device is logical page i",
    ),
    Refusal(
        "--speculative-algorithm",
        lambda a, c: a.speculative_algorithm is not None,
        "rejected drafts would leave rows in the host store; commit and rollback are not there yet",
    ),
    Refusal(
        "--tp-size", lambda a, c: a.tp_size > 1, "sharing the clamp of tokens between ranks is not tested yet"
    ),
    Refusal(
        "--pp-size", lambda a, c: a.pp_size > 1, "sharing the clamp of tokens between ranks is not tested yet"
    ),
    Refusal("--dp-size", lambda a, c: a.dp_size > 1, "the data-parallel controller does not load plug-ins"),
    Refusal(
        "--enable-dp-attention",
        lambda a, c: a.enable_dp_attention,
        "idle ranks and padding are not tested yet",
    ),
    Refusal("--attn-cp-size", lambda a, c: a.attn_cp_size > 1, "context parallelism is not supported yet"),
    Refusal(
        "--enable-prefill-cp",
        lambda a, c: (
            a.enable_prefill_cp or a.enable_prefill_context_parallel or a.enable_dsa_prefill_context_parallel
        ),
        "context parallelism is not supported yet",
    ),
    Refusal("--dcp-size", lambda a, c: a.dcp_size > 1, "context parallelism is not supported yet"),
    Refusal(
        "--enable-hierarchical-cache",
        lambda a, c: a.enable_hierarchical_cache,
        "it copies C4 pages by device page; the tier keeps them on the host already",
    ),
    Refusal("--enable-lmcache", lambda a, c: a.enable_lmcache, "it copies KV by device page"),
    Refusal("--enable-flexkv", lambda a, c: a.enable_flexkv, "it copies KV by device page"),
    Refusal(
        "--enable-unified-memory",
        lambda a, c: a.enable_unified_memory,
        "the C4 pool is not cut from a common one: hot slots are not pages",
    ),
    Refusal(
        "--enable-page-major-kv-layout",
        lambda a, c: a.enable_page_major_kv_layout,
        "DeepSeek-V4's rows have a page layout of their own",
    ),
    Refusal(
        "--radix-cache-backend",
        lambda a, c: a.radix_cache_backend is not None,
        "only SGLang's own unified radix cache is known to own C4 locations as the tier expects",
    ),
    Refusal(
        "--use-ray", lambda a, c: a.use_ray, "schedulers in Ray actors do not load plug-ins before they start"
    ),
    Refusal(
        "--tokenizer-worker-num",
        lambda a, c: a.tokenizer_worker_num > 1,
        "tokenizer worker processes do not load plug-ins; leave it at 1",
    ),
    Refusal("--nnodes", lambda a, c: a.nnodes > 1, "only one rank on one node is supported yet"),
    Refusal("--enable-mixed-chunk", lambda a, c: a.enable_mixed_chunk, "a step is either prefill or decode"),
    Refusal(
        "--enable-memory-saver",
        lambda a, c: a.enable_memory_saver,
        "released device memory would leave tags of hot slots that are gone",
    ),
    Refusal(
        "--enable-two-batch-overlap",
        lambda a, c: a.enable_two_batch_overlap,
        "the tier's steps have one order",
    ),
    Refusal("--enable-pdmux", lambda a, c: a.enable_pdmux, "the tier's steps have one order"),
    Refusal(
        "--chunked-prefill-size -1",
        lambda a, c: a.chunked_prefill_size is not None and a.chunked_prefill_size <= 0,
        "an unbounded chunk makes more new entries than there are hot slots; give a multiple of 256",
    ),
    Refusal(
        "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0",
        lambda a, c: sparse_prefill_switched_off(),
        "prefill through the decode kernel would need a slot for every row that a chunk selects; unset it",
    ),
    Refusal(
        "--kv-cache-dtype",
        lambda a, c: a.kv_cache_dtype not in KV_DTYPES,
        f"rows have DeepSeek-V4's own FP8 layout; use one of {', '.join(KV_DTYPES)}",
    ),
    Refusal("--device", _non_nvidia, "only NVIDIA GPUs and, through torch, CPUs are supported"),
    Refusal(
        "--dsv4x-storage float32",
        lambda a, c: c.storage == "float32" and a.dtype != "float32",
        "it keeps weights in fp32 too: add --dtype float32",
    ),
    Refusal(
        "--dtype float32",
        lambda a, c: a.dtype == "float32" and c.storage != "float32",
        "SGLang keeps some weights in bf16 whatever --dtype says: add --dsv4x-storage float32",
    ),
    Refusal(
        "CUDA graphs",
        lambda a, c: torch.cuda.is_available() and not _graphs_off(a),
        "only torch kernels exist so far, and they cannot be captured: add --disable-cuda-graph",
    ),
)

RESOLVED = (
    Refusal(
        "--page-size",
        lambda a, c: a.page_size != 256,
        "DeepSeek-V4's caches are laid out in pages of 256 tokens; leave it out",
    ),
    Refusal(
        "--chunked-prefill-size",
        lambda a, c: a.chunked_prefill_size is None or a.chunked_prefill_size <= 0,
        "an unbounded chunk makes more new entries than there are hot slots; give a multiple of 256",
    ),
    Refusal(
        "index_topk of the model",
        lambda a, c: int(a.get_model_config().hf_text_config.index_topk) % 64 != 0,
        "attention takes selections in multiples of 64",
    ),
)


def refuse_given(args: Any, config: Dsv4xConfig) -> None:
    """Raises: RefusedError for settings that the user typed. `args`: ServerArgs before it resolves itself."""
    _refuse(GIVEN, args, config)


def refuse_resolved(args: Any, config: Dsv4xConfig) -> None:
    """Raises: RefusedError for the model or for resolved settings. `args`: ServerArgs, resolved and checked."""
    found = list(args.get_model_config().hf_config.architectures or [])
    if ARCHITECTURE not in found:
        raise RefusedError(
            f"--enable-dsv4x serves DeepSeek-V4 only: --model-path {args.model_path} is "
            f"{', '.join(found) or 'unnamed'}, "
            f"not {ARCHITECTURE}. Drop --enable-dsv4x, or give a DeepSeek-V4 checkpoint."
        )
    _refuse(RESOLVED, args, config)


def _refuse(table: Iterable[Refusal], args: Any, config: Dsv4xConfig) -> None:
    hit = [refusal for refusal in table if refusal.applies(args, config)]
    if hit:
        lines = [f"  {refusal.flag}: {refusal.reason}." for refusal in hit]
        raise RefusedError("\n".join(["--enable-dsv4x cannot be combined with:", *lines]))


def describe() -> str:
    """One line for the banner: what is refused."""
    return ", ".join(refusal.flag for refusal in GIVEN)
