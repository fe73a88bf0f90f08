"""The random weights load in transformers, and behave like a model's: finite, spread, selective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from sglang_dsv4x import configs
from sglang_dsv4x.make_model import make_model
from sglang_dsv4x.make_model.shape import ModelShape
from sglang_dsv4x.make_model.tensors import checkpoint_tensors

PROMPT_TOKENS = 640


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(configs.load("tiny"), folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DeepseekV4ForCausalLM:
    model, loading = DeepseekV4ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(15, 512, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def outputs(model: DeepseekV4ForCausalLM, prompt: torch.Tensor) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Everything that modules put out during one forward pass, by module name."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: torch.nn.Module, args: object, output: object, name: str = name) -> None:
            values = output if isinstance(output, tuple) else (output,)
            seen[name] = [value for value in values if isinstance(value, torch.Tensor)]

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=DynamicCache(config=model.config), use_cache=True)
    for handle in handles:
        handle.remove()
    yield seen


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def in_released_names(model: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """What transformers holds, by the released names. Written out here, since it does not write them itself: 5.12 saves
    most tensors under its own."""
    base = model.model
    named = {
        "embed.weight": base.embed_tokens.weight,
        "head.weight": model.lm_head.weight,
        "norm.weight": base.norm.weight,
        "hc_head_fn": base.hc_head.hc_fn,
        "hc_head_base": base.hc_head.hc_base,
        "hc_head_scale": base.hc_head.hc_scale,
    }
    for number, layer in enumerate(base.layers):
        attention, experts, router = layer.self_attn, layer.mlp.experts, layer.mlp.gate
        named |= {
            f"layers.{number}.{name}": tensor
            for name, tensor in {
                "attn_norm.weight": layer.input_layernorm.weight,
                "ffn_norm.weight": layer.post_attention_layernorm.weight,
                **{f"hc_attn_{part}": getattr(layer.attn_hc, part) for part in ("fn", "base", "scale")},
                **{f"hc_ffn_{part}": getattr(layer.ffn_hc, part) for part in ("fn", "base", "scale")},
                "attn.wq_a.weight": attention.q_a_proj.weight,
                "attn.q_norm.weight": attention.q_a_norm.weight,
                "attn.wq_b.weight": attention.q_b_proj.weight,
                "attn.wkv.weight": attention.kv_proj.weight,
                "attn.kv_norm.weight": attention.kv_norm.weight,
                "attn.wo_a.weight": attention.o_a_proj.weight,
                "attn.wo_b.weight": attention.o_b_proj.weight,
                "attn.attn_sink": attention.sinks,
                "ffn.gate.weight": router.weight,
                "ffn.shared_experts.w1.weight": layer.mlp.shared_experts.gate_proj.weight,
                "ffn.shared_experts.w2.weight": layer.mlp.shared_experts.down_proj.weight,
                "ffn.shared_experts.w3.weight": layer.mlp.shared_experts.up_proj.weight,
            }.items()
        }
        if layer.mlp.is_hash:
            named[f"layers.{number}.ffn.gate.tid2eid"] = router.tid2eid
        else:
            named[f"layers.{number}.ffn.gate.bias"] = router.e_score_correction_bias
        for expert in range(experts.num_experts):
            gate, up = experts.gate_up_proj[expert].chunk(2)
            for name, tensor in (("w1", gate), ("w2", experts.down_proj[expert]), ("w3", up)):
                named[f"layers.{number}.ffn.experts.{expert}.{name}.weight"] = tensor
        if attention.compressor is not None:
            compressors = {"compressor": attention.compressor}
            if hasattr(attention.compressor, "indexer"):
                indexer = attention.compressor.indexer
                compressors["indexer.compressor"] = indexer
                named[f"layers.{number}.attn.indexer.wq_b.weight"] = indexer.q_b_proj.weight
                named[f"layers.{number}.attn.indexer.weights_proj.weight"] = (
                    indexer.scorer.weights_proj.weight
                )
            for name, compressor in compressors.items():
                named |= {
                    f"layers.{number}.attn.{name}.wkv.weight": compressor.kv_proj.weight,
                    f"layers.{number}.attn.{name}.wgate.weight": compressor.gate_proj.weight,
                    f"layers.{number}.attn.{name}.ape": compressor.position_bias,
                    f"layers.{number}.attn.{name}.norm.weight": compressor.kv_norm.weight,
                }
    return named


def test_every_tensor_lands_where_its_released_name_says(
    checkpoint: Path, model: DeepseekV4ForCausalLM
) -> None:
    """Loading without a missing or unexpected key is not enough: gate and up, or Wkv and Wgate, could be swapped."""
    ours, theirs = stored(checkpoint), in_released_names(model)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor.to(theirs[name].dtype), theirs[name]), name


def test_dtypes_are_those_of_the_release(checkpoint: Path) -> None:
    float32 = (".ape", ".attn_sink", ".gate.bias")
    for name, tensor in stored(checkpoint).items():
        if name.endswith(".tid2eid"):
            assert tensor.dtype == torch.int64, name
        elif name.endswith(float32) or ".hc_" in name or name.startswith("hc_"):
            assert tensor.dtype == torch.float32, name
        else:
            assert tensor.dtype == torch.bfloat16, name


def test_experts_of_a_token_are_distinct(checkpoint: Path) -> None:
    tables = [tensor for name, tensor in stored(checkpoint).items() if name.endswith(".tid2eid")]
    assert len(tables) == 2
    for table in tables:
        assert (table[:, 0] != table[:, 1]).all()
        assert len(table.unique()) == 8


def test_activations_neither_vanish_nor_explode(outputs: dict[str, list[torch.Tensor]]) -> None:
    for layer in range(7):
        for block in ("self_attn", "mlp"):
            values = outputs[f"model.layers.{layer}.{block}"][0]
            assert values.isfinite().all()
            assert 0.2 < values.std() < 2.0, (layer, block)
        streams = outputs[f"model.layers.{layer}"][0]
        assert 0.5 < streams.std() < 8.0, layer
        spread = (streams - streams.mean(2, keepdim=True)).std()
        assert spread > 0.1 * streams.std(), "the residual streams must stay distinct"


def test_logits_spread_over_a_few_nats(outputs: dict[str, list[torch.Tensor]]) -> None:
    logits = outputs["lm_head"][0][0]
    assert logits.isfinite().all()
    assert 1.0 < logits.std() < 4.0
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * logits.log_softmax(-1)).sum(-1).mean()
    assert 1.0 < entropy < math.log(512) - 1.0
    assert logits.argmax(-1).unique().numel() > 50, "outputs depend on the input"


def test_swiglu_stays_inside_its_limit(
    model: DeepseekV4ForCausalLM, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's native MoE path does not clamp routed experts and transformers does, so both agree only inside it."""
    largest = 0.0
    gate = modeling.DeepseekV4Experts._apply_gate

    def watch(self: modeling.DeepseekV4Experts, gate_up: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, float(gate_up.abs().max()))
        return gate(self, gate_up)

    monkeypatch.setattr(modeling.DeepseekV4Experts, "_apply_gate", watch)
    with torch.no_grad():
        model(input_ids=prompt)
    assert 1.0 < largest < 0.8 * model.config.swiglu_limit


def test_attention_prefers_some_entries(model: DeepseekV4ForCausalLM, prompt: torch.Tensor) -> None:
    """Uniform attention would hide an entry that is missing or another's; one-hot attention would hide all others."""
    with torch.no_grad():
        attentions = model(input_ids=prompt, output_attentions=True).attentions
    for weights in attentions:
        last = weights[0, :, -1]
        share = last.sum(-1)
        effective = share.square() / last.square().sum(-1)
        assert (effective > 3).all()
        assert (effective < 0.6 * (last > 0).sum(-1)).all()
        assert (share < 0.999).any(), "a sink takes a visible share"


def test_index_scores_are_distinct(outputs: dict[str, list[torch.Tensor]]) -> None:
    """Too few index heads leave many scores exactly 0, and a top-k among them has no right answer."""
    for layer in (2, 4, 6):
        scores = outputs[f"model.layers.{layer}.self_attn.compressor.indexer.scorer"][0][0, -1]
        assert scores.unique().numel() >= 0.98 * scores.numel()
        assert scores.std() > 0.1


@pytest.mark.parametrize(("name", "parameters"), [("flash", 284e9), ("pro", 1.57e12)])
def test_released_shapes_have_the_published_number_of_parameters(name: str, parameters: float) -> None:
    """284 B and 1.6 T (DeepSeek-V4 technical report): a missing or misshapen group of tensors would show."""
    specs = checkpoint_tensors(ModelShape.of(configs.load(name)), torch.bfloat16)
    total = sum(math.prod(spec.shape) for spec in specs if not spec.name.endswith("tid2eid"))
    assert total == pytest.approx(parameters, rel=0.03)
