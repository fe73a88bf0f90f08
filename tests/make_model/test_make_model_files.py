"""A checkpoint is written whole or not at all, and the same seed gives the same bytes."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dsv4x import configs
from sglang_dsv4x.make_model import MakeModelError, add_arguments, checkpoint, fill, make_model, run
from sglang_dsv4x.make_model import safetensors_writer as writer
from sglang_dsv4x.make_model.tensors import Normal, TensorSpec

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def config() -> dict[str, Any]:
    """`tiny`, with one layer of each kind."""
    return {**configs.load("tiny"), "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    config: dict[str, Any], tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(config, tmp_path / name, seed=seed)
    first, again, other = (digests(tmp_path / name) for name in "abc")
    assert set(first) == FILES
    assert first == again
    assert {name for name in FILES if first[name] != other[name]} == {"model.safetensors"}


def test_shards_hold_the_same_values_as_one_file(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(config, tmp_path / "whole")
    monkeypatch.setattr(writer, "SHARD_BYTES", 2 << 20)
    make_model(config, tmp_path / "shards")
    index = json.loads((tmp_path / "shards" / writer.INDEX_NAME).read_text())
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "shards" / shard)[name], whole[name]), name


def test_transformers_loads_a_sharded_checkpoint(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DeepseekV4ForCausalLM

    monkeypatch.setattr(writer, "SHARD_BYTES", 2 << 20)
    make_model(config, tmp_path / "shards")
    _, loading = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "shards", output_loading_info=True)
    assert not any(loading.values()), loading


def test_a_large_tensor_is_made_in_slices_of_bounded_size() -> None:
    spec = TensorSpec("big", (3, fill.SLICE_ELEMENTS), torch.bfloat16, Normal(2.0, 1.0))
    sizes, total, squares = [], 0.0, 0.0
    for values in fill.slices(spec, seed=0):
        sizes.append(values.numel())
        total += float(values.float().sum())
        squares += float(values.float().square().sum())
    assert sizes == [fill.SLICE_ELEMENTS] * 3
    mean = total / sum(sizes)
    assert mean == pytest.approx(1.0, abs=0.01)
    assert squares / sum(sizes) - mean**2 == pytest.approx(4.0, rel=0.01)


def test_the_config_says_what_was_written(tmp_path: Path) -> None:
    """Quantisation and MTP blocks of a released configuration are not made, and so must not be promised."""
    released = {
        **configs.load("flash"),
        **{key: configs.load("tiny")[key] for key in ("hidden_size", "vocab_size")},
    }
    released |= {"num_hidden_layers": 2, "n_routed_experts": 6, "q_lora_rank": 64, "o_lora_rank": 16}
    released |= {"num_attention_heads": 8, "index_n_heads": 4, "moe_intermediate_size": 32}
    make_model(released, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert "expert_dtype" not in written
    assert written["num_nextn_predict_layers"] == 0
    assert written["compress_ratios"] == [0, 0]
    assert written["torch_dtype"] == "bfloat16"
    assert written["rope_scaling"] == released["rope_scaling"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing_behind(
    error: type[BaseException], config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(spec: TensorSpec, seed: int) -> Any:
        if spec.name == "layers.1.attn.wq_b.weight":
            raise error
        return fill.slices(spec, seed)

    monkeypatch.setattr(checkpoint, "slices", stop)
    with pytest.raises(error):
        make_model(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_replacement_keeps_the_old_checkpoint(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(config, tmp_path / "out", seed=1)
    before = digests(tmp_path / "out")

    def stop(spec: TensorSpec, seed: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "slices", stop)
    with pytest.raises(KeyboardInterrupt):
        make_model(config, tmp_path / "out", seed=2, force=True)
    assert digests(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_in_use_is_kept_unless_forced(config: dict[str, Any], tmp_path: Path) -> None:
    make_model(config, tmp_path / "out", seed=1)
    before = digests(tmp_path / "out")
    with pytest.raises(MakeModelError, match=r"not empty.*--force"):
        make_model(config, tmp_path / "out", seed=2)
    assert digests(tmp_path / "out") == before
    make_model(config, tmp_path / "out", seed=2, force=True)
    assert digests(tmp_path / "out") != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_leaves_no_shard_of_an_older_checkpoint(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr(writer, "SHARD_BYTES", 2 << 20)
        make_model(config, tmp_path / "out")
    make_model(config, tmp_path / "out", force=True)
    assert set(digests(tmp_path / "out")) == FILES


def test_force_does_not_delete_what_is_not_a_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(MakeModelError, match=r"thesis\.tex"):
        make_model(config, tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_used_without_force(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make_model(config, tmp_path / "out")
    assert set(digests(tmp_path / "out")) == FILES


def test_too_little_disk_is_refused_with_the_bytes_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=10**11))
    assert command("flash", str(tmp_path / "out")) == 1
    message = capsys.readouterr().err
    assert "100,000,000,000 free" in message
    needed = int(message.split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert 560e9 < needed < 580e9, "284 B parameters of two bytes"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"compress_ratios": [0, 4]}, "compress_ratios"),
        ({"compress_ratios": [0, 4, 2]}, "compress_ratios holds 2"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hash_layers": -1}, "num_hash_layers is -1"),
        ({"o_groups": 3}, "not a multiple of o_groups"),
        ({"num_experts_per_tok": 9}, "exceeds n_routed_experts"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"vocab_size": 256}, "vocab_size is 256"),
    ],
)
def test_an_impossible_config_is_refused_by_key(
    change: dict[str, Any], message: str, config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(MakeModelError, match=message):
        make_model({**config, **change}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_named_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("tiny", str(tmp_path / "deep" / "out"), "--seed", "5") == 0
    assert set(digests(tmp_path / "deep" / "out")) == FILES
    assert "seed 5" in capsys.readouterr().out


def test_the_command_explains_an_unknown_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("tinny", str(tmp_path / "out")) == 1
    assert "tiny" in capsys.readouterr().err
