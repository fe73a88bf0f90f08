"""Synthetic agents: their shape is the published one, and every format says of them what it can."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sglang_dsv4x import cli
from sglang_dsv4x.replay.blocks import block_array, common_blocks
from sglang_dsv4x.replay.conversation import Agent, Branches, Conversation, Turn, turns
from sglang_dsv4x.replay.formats import LoadOptions, load_trace
from sglang_dsv4x.replay.formats.writing import WRITERS
from sglang_dsv4x.replay.plan import make_plan, planned_turns
from sglang_dsv4x.replay.synthetic_agents import NEW_TOKENS, PAUSE_S, Shape, conversations, quantile

SMALL = Shape(shared_prefix=2000, subagents=0.15, forks=0.5, turns=30, max_context=60_000, begin_every_s=20.0)


def made(count: int, shape: Shape, seed: int = 0) -> list[Conversation]:
    return list(itertools.islice(conversations(seed, shape), count))


def shared(first: Turn, second: Turn) -> int:
    """Tokens in the blocks that both begin with."""
    return 64 * common_blocks(block_array(first.blocks), block_array(second.blocks))


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Turn, Turn]]:
    """Turns that follow each other in the main agents of 250 conversations."""
    found = []
    for conversation in made(250, Shape()):
        own = [step for step in conversation.main.steps if isinstance(step, Turn)]
        found += itertools.pairwise(own)
    return found


def test_new_tokens_and_pauses_have_the_published_quantiles(pairs: list[tuple[Turn, Turn]]):
    new = np.percentile([b.input_tokens - shared(a, b) for a, b in pairs], [10, 50, 90])
    pauses = np.percentile([b.pause_s for _, b in pairs], [10, 50, 90])
    assert new == pytest.approx([230, 705, 4077], rel=0.1)
    assert pauses == pytest.approx([4, 10, 170], rel=0.1)


def test_two_percent_of_the_turns_keep_less_than_half(pairs: list[tuple[Turn, Turn]]):
    less = sum(shared(a, b) < a.input_tokens / 2 for a, b in pairs) / len(pairs)
    assert 0.015 < less < 0.03


def test_turns_per_conversation_have_the_published_median_and_mean():
    counts = [sum(isinstance(s, Turn) for s in c.main.steps) for c in made(600, Shape())]
    assert np.median(counts) == pytest.approx(43, rel=0.15) and np.mean(counts) == pytest.approx(80, rel=0.15)


def test_quantiles_are_met_at_their_points_and_rise_between():
    for points in (NEW_TOKENS, PAUSE_S):
        assert [quantile(points, share) for share, _ in points] == pytest.approx([v for _, v in points])
        values = [quantile(points, i / 500) for i in range(501)]
        assert values == sorted(values)


def test_all_prompts_of_all_conversations_begin_with_the_shared_prefix():
    prompts = [turn for c in made(5, SMALL) for turn in turns(c.main)]
    least = min(shared(prompts[0], turn) for turn in prompts)
    # A prompt that starts over keeps less than half of the one before, and so perhaps not all of it.
    assert least > 0 and np.median([shared(prompts[0], t) for t in prompts]) >= 2000 - 64


def test_the_seed_and_the_shape_decide_and_nothing_else():
    assert made(3, SMALL) == made(3, SMALL) != made(3, SMALL, seed=1)
    assert made(3, SMALL)[:2] == made(2, SMALL)


def test_there_are_subagents_forks_and_agents_beside_each_other():
    steps = [step for c in made(20, SMALL) for step in c.main.steps]
    started = [a for s in steps for a in ((s,) if isinstance(s, Agent) else getattr(s, "agents", ()))]
    kinds = [next(turns(agent)).kind for agent in started]
    assert any(isinstance(s, Branches) for s in steps) and any(isinstance(s, Agent) for s in steps)
    assert 0.3 < kinds.count("fork") / len(kinds) < 0.7
    assert {t.kind for c in made(5, SMALL) for t in turns(c.main)} == {"human", "tool", "fork", "resume"}


def test_contexts_stay_within_the_limit():
    assert max(t.input_tokens for c in made(20, SMALL) for t in turns(c.main)) <= SMALL.max_context


def written(path: Path, name: str, what: list[Conversation]) -> list[Conversation]:
    count = WRITERS[name].write(what, path)
    assert count == sum(1 for c in what for _ in turns(c.main))
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [c for file in files for c in load_trace(file, options=LoadOptions())]


def hits(what: list[Conversation]) -> tuple[int, int]:
    """Prompt tokens, and those that an infinite cache has, in all."""
    plan = make_plan(what, page_size=256)
    every = [t for c in plan for t in planned_turns(c.main)]
    return sum(t.input_tokens for t in every), sum(t.theoretical_cached for t in every)


def test_weka_gives_back_what_was_written(tmp_path: Path):
    what = made(8, SMALL)
    again = written(tmp_path / "weka", "weka", what)
    assert len(again) == 8
    for before, after in zip(what, again, strict=True):
        assert before.name == after.name
        one, two = list(turns(before.main)), list(turns(after.main))
        assert [(t.input_tokens, t.output_tokens, tuple(t.blocks)) for t in one] == [
            (t.input_tokens, t.output_tokens, tuple(t.blocks)) for t in two
        ]
        assert [t.pause_s for t in one] == pytest.approx([t.pause_s for t in two], abs=0.01)
        assert [type(s) for s in before.main.steps] == [type(s) for s in after.main.steps]
    kinds = [[t.kind for c in w for t in turns(c.main)] for w in (what, again)]
    same = sum(a == b for a, b in zip(*kinds, strict=True))
    # A resumed turn after a person's pause reads as a person's.
    assert same > 0.95 * len(kinds[0])


@pytest.mark.parametrize("name", WRITERS)
def test_lengths_and_hits_survive_every_format(tmp_path: Path, name: str):
    what = made(12, SMALL)
    again = written(tmp_path / name, name, what)
    prompt, cached = hits(what)
    prompt_again, cached_again = hits(again)
    assert prompt_again == pytest.approx(prompt, rel=0.01)
    # Deltas have an answer's tokens in them that nobody computed before; whole prompts have not.
    assert cached_again == pytest.approx(cached, rel=0.02)


def test_dag_jsonl_keeps_forks_joins_and_pauses(tmp_path: Path):
    what = made(8, SMALL)
    again = written(tmp_path / "d.jsonl", "dag_jsonl", what)
    assert [c.name for c in again] == [c.name for c in what]
    forks = [sum(t.kind == "fork" for c in w for t in turns(c.main)) for w in (what, again)]
    assert forks[0] == forks[1] > 5
    pauses = [sum(t.pause_s for c in w for t in turns(c.main)) for w in (what, again)]
    assert pauses[0] == pytest.approx(pauses[1])


def test_times_of_beginning_are_in_the_formats_that_have_them(tmp_path: Path):
    what = made(6, SMALL)
    for name in ("mooncake", "mooncake_trace"):
        again = written(tmp_path / f"{name}.jsonl", name, what)
        assert again[0].arrival_s == 0.0
        assert max(c.arrival_s for c in again) >= what[-1].arrival_s - 0.01


def test_the_command_writes_what_replay_reads_and_says_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in WRITERS:
        out = tmp_path / name
        argv = ["synthesize", "--out", str(out), "--format", name, "--total-turns", "60", "--turns", "15"]
        assert cli.main(argv) == 0
        text, said = capsys.readouterr()
        found = re.match(r"wrote (\d+) turns of (\d+) conversations", text)
        assert found and int(found[1]) >= 60 and "not in this format: " in said
        files = sorted(out.iterdir()) if out.is_dir() else [out]
        loaded = [t for file in files for c in load_trace(file) for t in turns(c.main)]
        assert len(loaded) == int(found[1])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "{tmp}/no/file", "--format", "mooncake"], "--out"),
        (["--out", "{tmp}/x", "--max-context", "20000"], "at least twice --shared-prefix"),
        (["--out", "{tmp}/x", "--forks", "2"], "is not between 0 and 1"),
        (["--out", "{tmp}/x", "--turns", "0"], "not a positive integer"),
        (["--out", "{tmp}/x", "--conversations", "2", "--total-turns", "9"], "not allowed with"),
    ],
)
def test_wrong_arguments_end_with_exit_code_2(
    tmp_path: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    try:
        code = cli.main(["synthesize", *(word.format(tmp=tmp_path) for word in argv)])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and words in capsys.readouterr().err


def test_bench_serving_reads_our_agentic_trace_with_its_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The package's __init__ imports all its loaders, one of which needs the 'datasets' library.
    benchmark = importlib.import_module("sglang.benchmark")
    package = ModuleType("sglang.benchmark.datasets")
    package.__path__ = [str(Path(benchmark.__path__[0]) / "datasets")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    loader = importlib.import_module("sglang.benchmark.datasets.agentic_trace").AgenticTraceDataset

    what = made(4, SMALL)
    ours = written(tmp_path / "a.json", "agentic-trace", what)
    theirs = loader(str(tmp_path / "a.json"), 0, None, 0, None).load(None)
    assert [len(row.prompt) for row in theirs] == [len(c.main.steps) for c in ours]
    assert {row.output_len for row in theirs} == {t.output_tokens for c in ours for t in turns(c.main)}
    assert [row.prompt_len for row in theirs] == [next(turns(c.main)).input_tokens for c in ours]
