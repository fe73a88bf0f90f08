"""What is refused: each setting by itself, and all of them at once."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from sglang_dsv4x.config import ConfigError, Dsv4xConfig, apply_process_environment
from sglang_dsv4x.engine import refusals
from sglang_dsv4x.engine.refusals import GIVEN, RefusedError, refuse_given, refuse_resolved

ON = Dsv4xConfig(enable=True)
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("--enable-hisparse", {"enable_hisparse": True}),
    ("--enable-deepseek-v4-fp4-indexer", {"enable_deepseek_v4_fp4_indexer": True}),
    ("--disaggregation-mode", {"disaggregation_mode": "prefill"}),
    ("--speculative-algorithm", {"speculative_algorithm": "EAGLE"}),
    ("--tp-size", {"tp_size": 2}),
    ("--pp-size", {"pp_size": 2}),
    ("--dp-size", {"dp_size": 2}),
    ("--enable-dp-attention", {"enable_dp_attention": True}),
    ("--attn-cp-size", {"attn_cp_size": 2}),
    ("--enable-prefill-cp", {"enable_prefill_cp": True}),
    ("--enable-prefill-cp", {"enable_prefill_context_parallel": True}),
    ("--enable-prefill-cp", {"enable_dsa_prefill_context_parallel": True}),
    ("--dcp-size", {"dcp_size": 2}),
    ("--enable-hierarchical-cache", {"enable_hierarchical_cache": True}),
    ("--enable-lmcache", {"enable_lmcache": True}),
    ("--enable-flexkv", {"enable_flexkv": True}),
    ("--enable-unified-memory", {"enable_unified_memory": True}),
    ("--enable-page-major-kv-layout", {"enable_page_major_kv_layout": True}),
    ("--radix-cache-backend", {"radix_cache_backend": "other"}),
    ("--use-ray", {"use_ray": True}),
    ("--tokenizer-worker-num", {"tokenizer_worker_num": 2}),
    ("--nnodes", {"nnodes": 2}),
    ("--enable-mixed-chunk", {"enable_mixed_chunk": True}),
    ("--enable-memory-saver", {"enable_memory_saver": True}),
    ("--enable-two-batch-overlap", {"enable_two_batch_overlap": True}),
    ("--enable-pdmux", {"enable_pdmux": True}),
    ("--chunked-prefill-size -1", {"chunked_prefill_size": -1}),
    ("--kv-cache-dtype", {"kv_cache_dtype": "bfloat16"}),
    ("--device", {"device": "npu"}),
    ("--device", {"device": "xpu"}),
    ("--dtype float32", {"dtype": "float32"}),
]


def arguments(**settings: Any) -> ServerArgs:
    """SGLang's arguments before they resolve themselves (this model path stops that), as the hook gets them."""
    args = ServerArgs(model_path="dummy")
    for name, value in settings.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    if torch.cuda.is_available():
        args.disable_cuda_graph = True
    return args


@pytest.mark.parametrize(("flag", "settings"), SETTINGS)
def test_a_setting_is_refused_by_its_flag_with_a_reason(flag: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as error:
        refuse_given(arguments(**settings), ON)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 1 and lines[0].startswith(f"  {flag}: ")
    assert len(lines[0]) > len(flag) + 20


def test_sparse_prefill_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "0")
    with pytest.raises(RefusedError, match=r"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0: .*unset it"):
        refuse_given(arguments(), ON)


def test_debug_storage_needs_a_float32_model() -> None:
    storage = Dsv4xConfig(enable=True, storage="float32")
    with pytest.raises(RefusedError, match=r"--dsv4x-storage float32: .*--dtype float32"):
        refuse_given(arguments(), storage)
    refuse_given(arguments(dtype="float32"), storage)


def test_every_refusal_of_the_table_is_tested_here() -> None:
    """One that is added to the table but never seen to refuse could be written so that it never applies."""
    elsewhere = {"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0", "--dsv4x-storage float32"}
    gpu_only = {"CUDA graphs"}
    assert {refusal.flag for refusal in GIVEN} == {flag for flag, _ in SETTINGS} | elsewhere | gpu_only


def test_ordinary_settings_are_not_refused() -> None:
    refuse_given(
        arguments(
            disable_radix_cache=True, chunked_prefill_size=256, kv_cache_dtype="fp8_e4m3", device="cpu"
        ),
        ON,
    )


def test_all_refused_settings_are_listed_at_once() -> None:
    with pytest.raises(RefusedError) as error:
        refuse_given(arguments(tp_size=2, enable_hisparse=True, enable_mixed_chunk=True), ON)
    flags = [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]]
    assert flags == ["--enable-hisparse", "--tp-size", "--enable-mixed-chunk"]


def resolved(architecture: str = refusals.ARCHITECTURE, *, top_k: int = 512, **settings: Any) -> Any:
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=SimpleNamespace(index_topk=top_k),
    )
    return SimpleNamespace(
        **{"page_size": 256, "chunked_prefill_size": 8192, "model_path": "some/model", **settings},
        get_model_config=lambda: config,
    )


def test_a_deepseek_v4_model_is_served() -> None:
    refuse_resolved(resolved(), ON)


def test_another_architecture_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"some/model is LlamaForCausalLM, not DeepseekV4ForCausalLM"):
        refuse_resolved(resolved("LlamaForCausalLM"), ON)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--page-size", {"page_size": 64}),
        ("--chunked-prefill-size", {"chunked_prefill_size": -1}),
        ("index_topk of the model", {"top_k": 100}),
    ],
)
def test_resolved_settings_are_refused_by_name(flag: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=f"  {flag}: "):
        refuse_resolved(resolved(**settings), ON)


def test_a_switch_that_torch_kernels_cannot_work_with_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_FP8_WO_A_GEMM", "true")
    with pytest.raises(ConfigError, match=r"SGLANG_OPT_FP8_WO_A_GEMM=true.*unset it"):
        apply_process_environment(torch_kernels=True, cuda=False)


def test_every_refused_flag_is_named_in_the_banner_line() -> None:
    assert all(refusal.flag in refusals.describe() for refusal in GIVEN)


def test_the_refused_flags_exist_in_sglang() -> None:
    """A refusal must name the flag as SGLang spells it, or the reader cannot find it."""
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    named = {refusal.flag.split()[0] for refusal in GIVEN if refusal.flag.startswith("--")}
    assert {flag for flag in named if not flag.startswith("--dsv4x")} <= known
