"""The whole server in fp32 debug storage against transformers: chunked prefill, a prefix hit, the tier.

Whatever breaks the math anywhere (layout, compressor phase, YaRN, selection, a wrong row) shows as a log-probability
that no near-tie explains. Near-ties in top-k or routing are followed and printed, not hidden.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import requests
import torch
from oracle import Oracle

from sglang_dsv4x import configs
from sglang_dsv4x.launch import Server
from sglang_dsv4x.make_model import make_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TOKENS = 1500
HIT_FROM = 1100
RELATIVE_TOLERANCE = 1e-4


def log_probabilities(url: str, ids: list[int], start: int) -> tuple[torch.Tensor, int]:
    """[T - 1] of ids[1:], NaN before `start`, and the number of cached tokens."""
    reply = requests.post(
        f"{url}/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
        },
        timeout=300,
    )
    reply.raise_for_status()
    meta = reply.json()["meta_info"]
    seen = torch.full((len(ids) - 1,), float("nan"))
    known = meta["input_token_logprobs"]
    for position, (value, token, _) in enumerate(known, start=len(ids) - len(known)):
        assert token == ids[position]
        if value is not None:
            seen[position - 1] = value
    return seen, meta["cached_tokens"]


def test_log_probabilities_equal_transformers_cold_and_after_a_prefix_hit(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(configs.load("tiny-dense-moe"), model, seed=0)
    draw = random.Random(3)
    ids = [draw.randrange(10, 500) for _ in range(TOKENS)]
    argv = [
        *("--model-path", str(model), "--enable-dsv4x", "--skip-server-warmup"),
        *("--dsv4x-storage", "float32", "--dtype", "float32", "--dsv4x-checks", "step"),
        *("--max-total-tokens", "8192", "--swa-full-tokens-ratio", "0.5"),
        *("--max-running-requests", "1", "--chunked-prefill-size", "256"),
    ]
    with Server(argv, tmp_path / "server.log") as server:
        cold, cold_cached = log_probabilities(server.base_url, ids, 0)
        hit, hit_cached = log_probabilities(server.base_url, ids, HIT_FROM)
    assert (cold_cached, hit_cached) == (0, 1024)
    oracle = Oracle(model)
    explained = oracle.explain(ids, cold, tolerance=RELATIVE_TOLERANCE)
    print(f"cold: worst relative error {explained.worst}, near-ties {explained.flips}")
    after_hit = oracle.explain(ids, hit, forced=explained.flips, tolerance=RELATIVE_TOLERANCE)
    print(f"after a prefix hit: worst relative error {after_hit.worst}, near-ties {after_hit.flips}")
