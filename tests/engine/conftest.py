"""Model folders and server processes for the tests in this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dsv4x import configs


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V4 configuration without weights: enough for everything before a model is loaded."""
    folder = tmp_path_factory.mktemp("deepseek-v4")
    (folder / "config.json").write_text(json.dumps(configs.load("tiny")))
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of another architecture."""
    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
