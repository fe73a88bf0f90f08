"""The whole server in fp32 debug storage against transformers: chunked prefill, a prefix hit, decode, the tier.

Whatever breaks the math anywhere (layout, compressor phase, YaRN, selection, a wrong row) shows as a log-probability
that no near-tie explains. Near-ties in top-k or routing are followed and printed, not hidden.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

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
OUTPUT_TOKENS = 24
RELATIVE_TOLERANCE = 1e-4


class Seen(NamedTuple):
    """Log-probabilities of a sequence that the server computed."""

    ids: list[int]
    log_probabilities: torch.Tensor
    """[T - 1] of ids[1:], NaN where the server did not say."""
    cached: int


def generate(url: str, prompt: list[int], start: int, output_tokens: int) -> Seen:
    """Log-probabilities from prompt position `start` on, the generated tokens' included."""
    reply = requests.post(
        f"{url}/generate",
        json={
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": start,
        },
        timeout=300,
    )
    reply.raise_for_status()
    body = reply.json()
    meta = body["meta_info"]
    assert len(body["output_ids"]) == output_tokens
    ids = prompt + body["output_ids"]
    known = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    seen = torch.full((len(ids) - 1,), float("nan"))
    for position, (value, token, _) in enumerate(known, start=len(ids) - len(known)):
        assert token == ids[position]
        if value is not None:
            seen[position - 1] = value
    return Seen(ids, seen, meta["cached_tokens"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "model"
    make_model(configs.load("tiny-dense-moe"), out, seed=0)
    return out


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.mark.parametrize("chunk", [256, 768])
def test_log_probabilities_equal_transformers_cold_after_a_prefix_hit_and_in_decode(
    model: Path, oracle: Oracle, tmp_path: Path, chunk: int
) -> None:
    draw = random.Random(3)
    prompt = [draw.randrange(10, 500) for _ in range(TOKENS)]
    slots = (
        1 * (64 + 2) + chunk // 4
    )  # the fewest with one request and a fetch unit of 1, so that decode misses
    argv = [
        *("--model-path", str(model), "--enable-dsv4x", "--skip-server-warmup"),
        *("--dsv4x-storage", "float32", "--dtype", "float32", "--dsv4x-checks", "step"),
        *("--dsv4x-fetch-unit", "1", "--dsv4x-hot-entries", str(slots)),
        *("--max-total-tokens", "8192", "--swa-full-tokens-ratio", "0.5"),
        *("--max-running-requests", "1", "--chunked-prefill-size", str(chunk)),
    ]
    with Server(argv, tmp_path / "server.log") as server:
        cold = generate(server.base_url, prompt, 0, 1)
        hit = generate(server.base_url, prompt, HIT_FROM, 1)
        decode = generate(server.base_url, prompt, TOKENS, OUTPUT_TOKENS)
        state = requests.get(f"{server.base_url}/server_info", timeout=60).json()["internal_states"][0]
    assert state["dsv4x"]["counters"]["misses"] > 0
    assert (cold.cached, hit.cached, decode.cached) == (0, 1024, 1280)
    explained = oracle.explain(cold.ids, cold.log_probabilities, tolerance=RELATIVE_TOLERANCE)
    print(f"cold: worst relative error {explained.worst}, near-ties {explained.flips}")
    for name, seen in (("after a prefix hit", hit), ("decode", decode)):
        later = oracle.explain(
            seen.ids, seen.log_probabilities, forced=explained.flips, tolerance=RELATIVE_TOLERANCE
        )
        print(f"{name}: worst relative error {later.worst}, near-ties {later.flips}")
