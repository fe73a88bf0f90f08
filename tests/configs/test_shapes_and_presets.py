"""Shapes are those of the released models, and launch presets hold flags that the server knows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from sglang_dsv4x import configs
from sglang_dsv4x.config import Dsv4xConfig, flag_name

RELEASED = {
    "flash": {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "index_topk": 512,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "layers": {0: 2, 4: 21, 128: 20},
    },
    "pro": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "layers": {4: 30, 128: 31},
    },
}
SAME_IN_ALL = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": 1,
    "sliding_window": 128,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_released_shapes_have_the_documented_sizes(name: str) -> None:
    config, expected = configs.load(name), dict(RELEASED[name])
    layers = expected.pop("layers")
    assert {key: config[key] for key in expected} == expected
    decoder = config["compress_ratios"][: config["num_hidden_layers"]]
    assert dict(Counter(decoder)) == layers
    assert config["compress_ratios"][len(decoder) :] == [0], "one window-only MTP block"
    assert (config["vocab_size"], config["max_position_embeddings"]) == (129280, 1048576)
    assert (config["index_n_heads"], config["o_lora_rank"], config["num_experts_per_tok"]) == (64, 1024, 6)
    assert (config["num_hash_layers"], config["num_nextn_predict_layers"]) == (3, 1)
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("name", configs.available())
def test_every_shape_keeps_the_attention_geometry_and_rope_of_the_release(name: str) -> None:
    config = configs.load(name)
    assert {key: config[key] for key in SAME_IN_ALL} == SAME_IN_ALL


@pytest.mark.parametrize("name", ["tiny", "tiny-dense-moe"])
def test_tiny_shapes_exercise_every_kind_of_layer(name: str) -> None:
    config = configs.load(name)
    assert Counter(config["compress_ratios"]) == {0: 2, 4: 3, 128: 2}
    assert 0 < config["num_hash_layers"] < config["num_hidden_layers"]
    assert config["index_topk"] == 64
    assert config["vocab_size"] % 64 == 0
    assert (config["n_routed_experts"] == config["num_experts_per_tok"]) == (name == "tiny-dense-moe")


@pytest.mark.parametrize("name", configs.available())
def test_transformers_reads_every_shape_as_meant(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = configs.load(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(tmp_path)
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    assert read.layer_types == [kinds[ratio] for ratio in ratios]
    assert read.mlp_layer_types.count("hash_moe") == config["num_hash_layers"]
    assert read.moe_intermediate_size == config["moe_intermediate_size"], (
        "intermediate_size would override it"
    )


def test_a_shape_loads_from_a_file_and_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert configs.load(tmp_path) == configs.load(tmp_path / "config.json") == {"hidden_size": 3}


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(configs.UnknownConfigError, match=r"'flahs'.*flash.*pro.*tiny"):
        configs.load("flahs")


@pytest.mark.parametrize(("text", "reason"), [("{", "not JSON"), ("[1]", "a list, not a JSON object")])
def test_a_file_that_is_no_configuration_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(configs.UnknownConfigError, match=reason):
        configs.load(path)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(configs.UnknownConfigError, match="launch-tiny-cpu"):
        configs.preset("launch-huge")


@pytest.mark.parametrize("name", configs.presets())
def test_presets_hold_flags_of_the_server(name: str) -> None:
    """Keys that are neither SGLang's nor ours would end the server at start."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    settings = yaml.safe_load(configs.preset(name).read_text())
    ours = {flag_name(field).removeprefix("--") for field in Dsv4xConfig.__dataclass_fields__}
    theirs = {field.replace("_", "-") for field in server_args.ServerArgs.__dataclass_fields__}
    assert set(settings) <= ours | theirs
    mine = {
        key.removeprefix("dsv4x-").replace("-", "_"): value for key, value in settings.items() if key in ours
    }
    mine["enable"] = mine.pop("enable_dsv4x")
    assert Dsv4xConfig(**mine).enable
