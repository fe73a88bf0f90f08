"""Settings for all tests, made before anything imports torch, and the rule for GPU tests."""

from __future__ import annotations

import os

# Before torch: its thread pool and Hugging Face's network use are decided at import. One thread makes CPU sums
# the same from run to run, which the bit-identity tests rest on.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device (torch.cuda.is_available() is False)")
            )
