"""The byte model equals the tensors that our pools allocate, and gives the published totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_dsv4x import configs
from sglang_dsv4x.capacity.byte_model import PAGE, Settings, Sizes, objects, payload_bytes, tier_shape
from sglang_dsv4x.capacity.errors import PlanError
from sglang_dsv4x.capacity.shape import CacheShape
from sglang_dsv4x.config import CONFIG_VARIABLE, Dsv4xConfig

GIB = 1 << 30

Allocate = Callable[[CacheShape, list[int], Settings, Sizes], dict[str, int]]


def v4(ratios: list[int], top_k: int = 64) -> dict[str, Any]:
    """`tiny` with other layers, and an MTP block's ratio at the end, as released configurations have it."""
    return {
        **configs.load("tiny"),
        "num_hidden_layers": len(ratios),
        "compress_ratios": [*ratios, 0],
        "index_topk": top_k,
    }


@pytest.fixture(scope="module")
def allocate() -> Iterator[Allocate]:
    """Bytes of the buffers of our real pool, SGLang's allocator and its request table on the CPU, by object."""
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.runtime_context import publish, reset_context
    from sglang.srt.server_args import ServerArgs

    from sglang_dsv4x.engine import pool as pool_module
    from sglang_dsv4x.engine.allocated import allocated_bytes

    def run(shape: CacheShape, ratios: list[int], chosen: Settings, sizes: Sizes) -> dict[str, int]:
        config = Dsv4xConfig(
            enable=True,
            tier="on" if chosen.tier else "off",
            index_dtype=chosen.index_dtype,
            storage=chosen.storage,
            fetch_unit=chosen.fetch_unit,
            hot_entries=chosen.hot_entries,
            checks="step" if chosen.checks else "off",
            resume_memory_gb=chosen.resume_memory / GIB,
        )
        model = SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=shape.top_k))
        arguments = SimpleNamespace(
            disable_radix_cache=False,
            chunked_prefill_size=chosen.chunk_tokens,
            get_model_config=lambda: model,
        )
        state = torch.float32 if chosen.state_bytes == 4 else torch.bfloat16
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CONFIG_VARIABLE, config.to_json())
            patch.setattr(pool_module, "get_server_args", lambda: arguments)
            table = ReqToTokenPool(sizes.requests, chosen.context_tokens + 4, "cpu", False)
            pool = pool_module.Dsv4xTokenToKVPool(
                max_num_reqs=sizes.requests,
                swa_size=sizes.window_tokens,
                c4_size=sizes.tokens // 4,
                c128_size=sizes.tokens // 128,
                c4_state_pool_size=sizes.window_tokens // PAGE * 8,
                c128_state_pool_size=(sizes.requests + 1) * 128,
                page_size=PAGE,
                swa_page_size=PAGE,
                dtype=torch.float8_e4m3fn,
                c4_state_dtype=state,
                c128_state_dtype=state,
                qk_nope_head_dim=448,
                qk_rope_head_dim=64,
                indexer_head_dim=128,
                layer_num=shape.layers,
                device="cpu",
                enable_memory_saver=False,
                compression_ratios=[*ratios, 0],
                start_layer=0,
                end_layer=shape.layers,
                num_req_slots=table.req_to_token.shape[0],
            )
            allocator = SWATokenToKVPoolAllocator(
                sizes.tokens, sizes.window_tokens, PAGE, torch.float8_e4m3fn, "cpu", pool, False
            )
            return allocated_bytes(pool, allocator, table)

    publish(ServerArgs(model_path="none", device="cpu", page_size=PAGE), role="scheduler")
    yield run
    reset_context()


@st.composite
def servers(draw: st.DrawFn) -> tuple[list[int], int, Settings, Sizes]:
    """Layers of any mix, sizes of a few pages, every setting that changes bytes."""
    tier = draw(st.booleans())
    ratios = draw(st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=5))
    if tier and 4 not in ratios:
        ratios.append(4)
    chosen = Settings(
        tier=tier,
        index_dtype=draw(st.sampled_from(("fp4", "fp8"))),
        storage=draw(st.sampled_from(("released", "released", "float32"))),
        fetch_unit=draw(st.sampled_from((1, 2, 4, 8))),
        chunk_tokens=draw(st.integers(1, 2048)),
        context_tokens=draw(st.integers(1, 5000)),
        state_bytes=draw(st.sampled_from((4, 2))),
        checks=draw(st.booleans()),
        resume_memory=draw(st.integers(0, 1 << 24)),
        cuda=False,
    )
    sizes = Sizes(PAGE * draw(st.integers(1, 24)), PAGE * draw(st.integers(1, 12)), draw(st.integers(1, 3)))
    top_k = 64 * draw(st.integers(1, 3))
    if tier and draw(st.booleans()):
        bound = tier_shape(CacheShape.of(v4(ratios, top_k)), chosen, sizes.tokens, sizes.requests).bound
        hot = bound + draw(st.integers(0, 1000))
        chosen = Settings(**{**chosen.__dict__, "hot_entries": hot})
    return ratios, top_k, chosen, sizes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(servers())
@example(
    (
        [0, 0, 4, 128, 4, 128, 4],
        64,
        Settings(chunk_tokens=256, context_tokens=4096, cuda=False),
        Sizes(4096, 2048, 2),
    )
)
def test_every_object_has_the_bytes_of_its_buffers(
    allocate: Allocate, server: tuple[list[int], int, Settings, Sizes]
) -> None:
    """To the byte, page padding and dummies included, on random models, sizes and settings."""
    ratios, top_k, chosen, sizes = server
    shape = CacheShape.of(v4(ratios, top_k))
    predicted = {item.name: item.bytes for item in objects(shape, chosen, sizes) if not item.staging}
    assert allocate(shape, ratios, chosen, sizes) == predicted


@pytest.mark.parametrize(
    ("model", "dtype", "gib"),
    [("flash", "fp4", 3.435), ("pro", "fp4", 4.918), ("flash", "fp8", 3.763), ("pro", "fp8", 5.387)],
)
def test_payload_of_a_million_tokens_is_the_published_figure(model: str, dtype: Any, gib: float) -> None:
    shape = CacheShape.of(configs.load(model))
    assert round(payload_bytes(shape, 1 << 20, dtype) / GIB, 3) == gib


def test_layers_of_the_released_models_leave_the_mtp_blocks_out() -> None:
    flash, pro = CacheShape.of(configs.load("flash")), CacheShape.of(configs.load("pro"))
    assert (flash.layers, flash.c4_layers, flash.c128_layers, flash.top_k) == (43, 21, 20, 512)
    assert (pro.layers, pro.c4_layers, pro.c128_layers, pro.top_k) == (61, 30, 31, 1024)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v41"}, "not a DeepSeek-V4 configuration"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "not a DeepSeek-V4 configuration"),
        ({"head_dim": 256}, "head_dim is 256"),
        ({"index_head_dim": None}, "index_head_dim is None"),
        ({"sliding_window": 256}, "sliding_window is 256"),
        ({"compress_ratios": [0, 4]}, "one ratio for each of the 7 layers"),
        ({"compress_ratios": [0, 0, 2, 128, 4, 128, 4]}, "holds 2"),
        ({"compress_ratios": "all"}, "one ratio for each of the 7 layers"),
        ({"index_topk": "512"}, "index_topk is '512'"),
        ({"index_topk": True}, "index_topk is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_a_configuration_with_other_caches_is_refused_by_its_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        CacheShape.of({**configs.load("tiny"), **change})


def test_fewer_hot_entries_than_a_step_needs_are_refused_with_the_number_that_would_do() -> None:
    shape = CacheShape.of(configs.load("tiny"))
    with pytest.raises(PlanError, match="Give at least 392"):
        objects(shape, Settings(hot_entries=391, chunk_tokens=256), Sizes(4096, 2048, 2))
    assert objects(shape, Settings(hot_entries=392, chunk_tokens=256), Sizes(4096, 2048, 2))
