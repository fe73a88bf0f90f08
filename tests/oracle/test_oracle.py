"""The oracle agrees with itself in any split, tells near-ties from faults, and rotates as DeepSeek's reference does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from oracle import Oracle, Run, UnexplainedDifference, margin_report, round_rows_to_fp8
from safetensors.torch import load_file, save_file

from sglang_dsv4x import configs
from sglang_dsv4x.make_model import make_model

TOKENS = 640
"""160 C4 entries, of which top-k 64 selects; five C128 entries."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oracle") / "tiny"
    make_model(configs.load("tiny"), folder, seed=7)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(15, 512, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def plain(oracle: Oracle, ids: Sequence[int]) -> Run:
    return oracle.run(ids)


DECODE = [TOKENS - 6, *[1] * 6]
"""A prefill, and tokens one at a time up to a boundary of C4 and C128 blocks."""


@pytest.mark.parametrize("chunk", [None, 300, 129, DECODE])
def test_any_split_gives_the_same_log_probabilities_up_to_near_ties(
    chunk: int | list[int] | None, oracle: Oracle, ids: Sequence[int]
) -> None:
    observed = oracle.run(ids, chunk=chunk).log_probabilities
    explanation = oracle.explain(ids, observed)
    assert explanation.worst < 1e-5
    assert all(flip.gap < 1e-5 for flip in explanation.flips)


@pytest.mark.parametrize("kind", ["index", "router"])
def test_a_tie_decided_otherwise_is_found_and_explains_everything_after_it(
    kind: str, oracle: Oracle, ids: Sequence[int], plain: Run
) -> None:
    """The smallest margin of this prompt stands in for a near-tie: forcing it changes all that follows, and `explain`
    has to name exactly that choice."""
    gaps = plain.index_gaps if kind == "index" else plain.router_gaps
    smallest = min(float(gap[300:].min()) for gap in gaps.values())
    tie = min(
        (tie for tie in plain.ties(2 * smallest) if tie.kind == kind and tie.position >= 300),
        key=lambda tie: tie.gap,
    )
    forced = oracle.run(ids, forced=[tie]).log_probabilities
    changed = (forced - plain.log_probabilities).abs()
    assert (changed[: tie.position] < 1e-5).all()
    assert (changed[tie.position :] > 1e-3).sum() > 5
    with pytest.raises(UnexplainedDifference):
        oracle.explain(ids, forced, tie=smallest / 2)
    explanation = oracle.explain(ids, forced, tie=2 * smallest)
    assert [flip[:5] for flip in explanation.flips] == [tie[:5]]
    assert explanation.worst < 1e-6


def test_a_fault_is_not_explained_away(oracle: Oracle, ids: Sequence[int], plain: Run) -> None:
    observed = plain.log_probabilities.clone()
    observed[500] *= 1 + 3e-4
    with pytest.raises(UnexplainedDifference, match="position 500"):
        oracle.explain(ids, observed)


def test_a_missing_history_is_not_explained_away(oracle: Oracle, ids: Sequence[int]) -> None:
    """What a cache that serves another's page shows: only the first 256 tokens are wrong, beyond every window."""
    other = [*ids[256:512], *ids[256:]]
    observed = oracle.run(other).log_probabilities
    observed[:511] = math.nan
    with pytest.raises(UnexplainedDifference):
        oracle.explain(ids, observed)


def test_unknown_positions_are_skipped(oracle: Oracle, ids: Sequence[int], plain: Run) -> None:
    observed = plain.log_probabilities.clone()
    observed[:500] = math.nan
    observed[600] += 0.5e-4
    explanation = oracle.explain(ids, observed)
    assert explanation.worst_position == 600
    assert 0 < explanation.worst < 1e-4


def test_margins_start_where_there_is_a_choice(plain: Run) -> None:
    run = plain
    assert sorted(run.index_gaps) == [2, 4, 6]
    assert sorted(run.router_gaps) == [2, 3, 4, 5, 6], "the two hash layers choose by token id"
    for gaps in run.index_gaps.values():
        assert gaps.shape == (TOKENS,)
        assert gaps[: 65 * 4 - 1].isinf().all(), "64 entries or fewer: all are taken"
        assert gaps[65 * 4 - 1 :].isfinite().all()
    for gaps in run.router_gaps.values():
        assert gaps.isfinite().all()
    assert "layer" in margin_report(run, [TOKENS - 1])


def test_with_every_expert_active_no_router_has_a_choice(tmp_path: Path, ids: Sequence[int]) -> None:
    make_model(configs.load("tiny-dense-moe"), tmp_path / "dense")
    run = Oracle(tmp_path / "dense").run(ids[:8])
    assert all(gaps.isinf().all() for gaps in run.router_gaps.values())


def test_fp8_rows_change_the_result_by_quantisation_noise_only(
    checkpoint: Path, oracle: Oracle, ids: Sequence[int]
) -> None:
    short = ids[:200]
    exact = oracle.run(short).log_probabilities
    rounded = Oracle(checkpoint, fp8_rows=True).run(short).log_probabilities
    error = (exact - rounded).abs().median()
    assert 1e-3 < error < 0.3
    assert torch.equal(oracle.run(short).log_probabilities, exact), "the exact oracle is untouched"


def test_fp8_rows_have_the_stored_precision() -> None:
    rows = torch.randn(50, 512, generator=torch.Generator().manual_seed(0)) * 3
    rows[0, :64] = 0.0
    rounded = round_rows_to_fp8(rows)
    assert torch.equal(rounded, round_rows_to_fp8(rounded)), "a stored row comes back unchanged"
    assert torch.equal(rounded[:, 448:], rows[:, 448:].bfloat16().float())
    assert torch.equal(rounded[0, :64], torch.zeros(64))
    # e4m3 has 3 fraction bits; the scale leaves the largest of a group above 224, far from subnormals.
    large = rows[:, :448].abs() > 0.1
    relative = ((rounded - rows)[:, :448].abs() / rows[:, :448].abs())[large]
    assert 0.03 < relative.max() <= 2**-4


def test_a_checkpoint_with_a_missing_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["layers.2.attn.indexer.compressor.ape"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="indexer"):
        Oracle(tmp_path)


def reference_frequencies(base: float, yarn: bool) -> torch.Tensor:
    """DeepSeek's reference `precompute_freqs_cis`, written from its formula: 32 frequencies; YaRN without mscale."""
    exponents = torch.arange(0, 64, 2, dtype=torch.float64) / 64
    frequencies = base**-exponents
    if not yarn:
        return frequencies

    def dimension(rotations: float) -> float:
        return 64 * math.log(65536 / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(dimension(32)), math.ceil(dimension(1))
    ramp = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequencies / 16 * ramp + frequencies * (1 - ramp)


def test_yarn_is_applied_to_compressed_layers_only_and_without_mscale(oracle: Oracle) -> None:
    rotary = oracle.model.model.rotary_emb
    for label, base, yarn in (("main", 10000.0, False), ("compress", 160000.0, True)):
        expected = reference_frequencies(base, yarn)
        found = getattr(rotary, f"{label}_inv_freq").double()
        assert torch.allclose(found, expected, rtol=1e-6, atol=0), label
        assert getattr(rotary, f"{label}_attention_scaling") == 1.0
    labels = [layer.self_attn.rope_layer_type for layer in oracle.model.model.layers]
    assert labels == ["main", "main"] + ["compress"] * 5
