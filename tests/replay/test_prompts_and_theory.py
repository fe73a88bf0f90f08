"""Token ids from hash ids, scaling, and the hits of an infinite prefix cache against a brute-force count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4x.replay.conversation import Agent, Conversation, Turn
from sglang_dsv4x.replay.formats import load_trace, trace_path
from sglang_dsv4x.replay.plan import make_plan, planned_turns
from sglang_dsv4x.replay.tokens import LOWEST_TOKEN, PromptMaker, Scaling, Vocabulary, VocabularyError

LARGE = Vocabulary(129280)


def common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n


def turn_of(blocks: list[int], tokens: int) -> Turn:
    return Turn(tokens, 1, tuple(blocks))


def test_ids_are_in_range_avoid_special_ones_and_depend_on_every_part_of_the_key():
    vocabulary = Vocabulary(300, special={5, 299, 1000})
    draw = vocabulary.draw("key", 20_000)
    assert set(draw.tolist()) == set(range(LOWEST_TOKEN, 300)) - {5, 299}
    assert (vocabulary.draw("key", 64) == draw[:64]).all()
    assert common(LARGE.draw("a", 64), LARGE.draw("b", 64)) == 0


def test_a_vocabulary_that_is_too_small_is_refused_with_the_flag():
    with pytest.raises(VocabularyError, match="--vocab-size"):
        Vocabulary(18)


def test_prompts_are_the_same_for_the_same_seed_and_share_nothing_across_seeds_and_scopes():
    turn, scaling = turn_of([1, 2, 3], 200), Scaling(64, 1.0)
    prompts = [
        PromptMaker(LARGE, scaling, seed, scope).prompt(turn, 1)
        for seed, scope in ((0, "a"), (0, "a"), (1, "a"), (0, "b"))
    ]
    assert (prompts[0] == prompts[1]).all()
    assert common(prompts[0], prompts[2]) == common(prompts[0], prompts[3]) == 0
    assert len(prompts[0]) == 200


@settings(max_examples=150, deadline=None)
@given(
    factor=st.floats(0.01, 1.5),
    shared=st.integers(0, 6),
    own=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    tails=st.tuples(st.integers(0, 63), st.integers(0, 63)),
)
def test_scaled_prompts_share_exactly_the_scaled_shared_blocks(
    factor: float, shared: int, own: tuple[int, int], tails: tuple[int, int]
):
    scaling = Scaling(64, factor)
    maker = PromptMaker(LARGE, scaling, 0, "scope")
    prefix = list(range(shared))
    prompts = []
    for i in (0, 1):
        blocks = prefix + [100 * (i + 1) + j for j in range(own[i])]
        tokens = 64 * len(blocks) + tails[i]
        if tokens == 0:
            return
        prompts.append(maker.prompt(turn_of(blocks, tokens), i))
        assert len(prompts[i]) == scaling.input_tokens(turn_of(blocks, tokens))
    # A prompt of less than one token is one token long.
    assert common(*prompts) == shared * scaling.block


def test_a_prompt_cut_inside_its_last_block_is_a_prefix_of_the_whole_block():
    maker = PromptMaker(LARGE, Scaling(64, 1.0), 0, "s")
    cut, whole = maker.prompt(turn_of([1, 2], 100), 1), maker.prompt(turn_of([1, 2], 128), 2)
    assert (cut == whole[:100]).all()


def brute_force(prompts: list[np.ndarray], page: int) -> list[int]:
    """Longest common prefix with any earlier prompt, token by token, in whole pages, never all of it."""
    cached = []
    for i, prompt in enumerate(prompts):
        longest = max((common(prompt, earlier) for earlier in prompts[:i]), default=0)
        cached.append(min(longest, len(prompt) - 1) // page * page)
    return cached


block_lists = st.lists(st.integers(0, 3), max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(block_lists, st.integers(-63, 63)), min_size=1, max_size=8),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from([1, 16, 256]),
)
def test_theory_equals_a_brute_force_count_over_token_ids(
    shapes: list[tuple[list[int], int]], scale: float, page: int
):
    steps = [
        turn_of(blocks, 64 * len(blocks) + extra) for blocks, extra in shapes if 64 * len(blocks) + extra > 0
    ]
    conversation = Conversation("c", 64, "c", Agent("main", tuple(steps)))
    [planned] = make_plan([conversation], page_size=page, scale=scale)
    maker = PromptMaker(LARGE, planned.scaling, 0, planned.token_scope)
    all_turns = list(planned_turns(planned.main))
    prompts = [maker.prompt(t.turn, t.number) for t in all_turns]
    assert [t.input_tokens for t in all_turns] == [len(p) for p in prompts]
    assert [t.theoretical_cached for t in all_turns] == brute_force(prompts, page)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_theory_of_the_shipped_trace_equals_a_brute_force_count(scale: float):
    [planned] = make_plan(load_trace(trace_path("small"), "weka"), page_size=256, scale=scale)
    maker = PromptMaker(LARGE, planned.scaling, 0, planned.token_scope)
    all_turns = list(planned_turns(planned.main))
    expected = brute_force([maker.prompt(t.turn, t.number) for t in all_turns], 256)
    assert [t.theoretical_cached for t in all_turns] == expected
    assert sum(expected) > 0


def test_copies_have_names_and_tokens_of_their_own_unless_hash_ids_are_global():
    local = Conversation("c", 64, "c", Agent("main", (turn_of([1, 2, 3, 4, 5], 340),)))
    everywhere = Conversation("g", 64, "", Agent("main", (turn_of([1, 2, 3, 4, 5], 340),)))
    plan = make_plan([local, everywhere], page_size=256, copies=2)
    assert [p.name for p in plan] == ["c", "c#2", "g", "g#2"]
    assert [next(planned_turns(p.main)).theoretical_cached for p in plan] == [0, 0, 0, 256]
