"""Weka traces: what is read, and what is refused with which words."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4x.replay.conversation import Agent, Branches, Turn, first_turns, turns
from sglang_dsv4x.replay.formats import SHIPPED_TRACES, TraceError, load_trace, trace_path
from sglang_dsv4x.replay.formats.weka import load
from sglang_dsv4x.replay.synthetic import as_text, make_trace


def test_the_shipped_trace_is_what_the_generator_makes():
    assert (SHIPPED_TRACES / "small.json").read_text() == as_text(make_trace(seed=0))


def test_the_shipped_trace_is_a_coding_agents_conversation():
    [conversation] = load_trace(trace_path("small"), "weka")
    all_turns = list(turns(conversation.main))
    subagents = [step for step in conversation.main.steps if isinstance(step, Agent)]
    assert 12 <= len(all_turns) <= 20
    assert max(turn.input_tokens for turn in all_turns) > 9000
    assert len(subagents) == 1
    first, forked = all_turns[0], subagents[0].steps[0]
    assert isinstance(forked, Turn)
    assert forked.blocks[:40] == first.blocks[:40] and forked.blocks[40] != first.blocks[40]
    assert {turn.kind for turn in all_turns} == {"human", "tool", "resume"}


def test_totals_of_the_trace_are_those_of_its_turns():
    trace = make_trace(seed=3)
    [conversation] = load(as_text(trace), "t")
    assert (
        sum(t.input_tokens for t in turns(conversation.main)) == trace["totals"]["combined_tokens"]["input"]
    )
    assert (
        sum(t.output_tokens for t in turns(conversation.main)) == trace["totals"]["combined_tokens"]["output"]
    )


def request(t: float, **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], **more}


def trace_of(*requests: dict[str, object]) -> str:
    return json.dumps({"id": "x", "block_size": 64, "requests": requests})


def pauses(text: str) -> list[float]:
    [conversation] = load(text, "t")
    return [step.pause_s for step in conversation.main.steps]


def test_pauses_are_think_times_and_else_what_the_clock_leaves():
    text = trace_of(request(0, api_time=8.0), request(13, think_time=4.0, api_time=2.0), request(25))
    assert pauses(text) == [0.0, 4.0, 10.0]


def test_a_pause_after_a_subagent_does_not_count_its_time_again():
    """think_time counts from the agent's own last turn, so it includes the sub-agent's running time."""
    subagent = {"t": 12, "type": "subagent", "agent_id": "a", "duration_ms": 20_000, "requests": [request(0)]}
    text = trace_of(request(0, api_time=10.0), subagent, request(35, think_time=25.0))
    assert pauses(text) == [0.0, 2.0, 3.0]


def test_subagents_that_overlap_in_the_trace_run_beside_each_other():
    def subagent(t: float, seconds: float, name: str) -> dict[str, object]:
        ms = 1000 * seconds
        return {"t": t, "type": "subagent", "agent_id": name, "duration_ms": ms, "requests": [request(0)]}

    text = trace_of(
        request(0, api_time=10.0),
        subagent(12, 20, "a"),
        subagent(20, 5, "b"),
        subagent(40, 5, "c"),
        request(50),
    )
    [conversation] = load(text, "t")
    _, group, alone, after = conversation.main.steps
    assert isinstance(group, Branches) and isinstance(alone, Agent) and isinstance(after, Turn)
    assert [(a.name, a.pause_s) for a in group.agents] == [
        ("a", 2.0),
        ("b", 10.0),
    ] and group.turns_beside == 0
    assert (alone.name, alone.pause_s) == ("c", 8.0) and (after.kind, after.pause_s) == ("resume", 5.0)


def test_turns_that_started_before_a_subagent_ended_run_beside_it():
    subagent = {"t": 2, "type": "subagent", "agent_id": "a", "duration_ms": 20_000, "requests": [request(0)]}
    text = trace_of(request(0, api_time=1.0), subagent, request(5), request(8), request(30))
    [conversation] = load(text, "t")
    branches = conversation.main.steps[1]
    assert isinstance(branches, Branches) and branches.turns_beside == 2
    assert [turn.kind for turn in turns(conversation.main)].count("resume") == 0


def test_an_agent_that_goes_on_from_its_parents_whole_prompt_is_a_fork():
    fork = request(0, hash_ids=[1, 2, 3], **{"in": 195})
    steps = [
        {"t": 1, "type": "subagent", "agent_id": n, "requests": [r]}
        for n, r in (("a", fork), ("b", request(0, hash_ids=[1, 9])))
    ]
    [conversation] = load(trace_of(request(0), *steps), "t")
    assert [turn.kind for turn in turns(conversation.main)] == ["tool", "fork", "tool"]


def test_subagents_nested_beyond_reason_are_refused():
    inner: dict[str, object] = request(0)
    for _ in range(80):
        inner = {"t": 0, "type": "subagent", "agent_id": "a", "requests": [inner]}
    with pytest.raises(TraceError, match="more than 64 deep"):
        load(trace_of(inner), "t")


def test_cutting_counts_subagents_turns_and_drops_empty_agents():
    subagent = {"t": 1, "type": "subagent", "agent_id": "a", "requests": [request(0), request(1)]}
    [conversation] = load(trace_of(request(0), subagent, request(9)), "t")
    assert len(list(turns(first_turns(conversation, 2).main))) == 2
    assert len(list(turns(first_turns(conversation, 9).main))) == 4
    assert len(first_turns(conversation, 1).main.steps) == 1


BAD = [
    ({"id": 7}, "id: must be a string"),
    ({"id": "a\nb"}, "id: must be a string of printable"),
    ({"id": "\ud800"}, "id: must be a string of printable"),
    ({"block_size": 0}, "block_size: is 0; must be between 1"),
    ({"block_size": 64.0}, "block_size: must be an integer, not a number with a fraction"),
    ({"block_size": True}, "block_size: must be an integer, not true or false"),
    ({"block_size": 10**6}, "block_size: is 1000000; must be at most"),
    ({"hash_id_scope": "universe"}, "hash_id_scope: is 'universe'"),
    ({"requests": []}, "requests: holds no request"),
    ({"requests": {}}, "requests: must be a list, not an object"),
    ({"requests": None}, "requests: is missing"),
    ({"requests": [3]}, "requests[0]: must be a JSON object, not an integer"),
    ({"requests": [request(-1)]}, "requests[0].t: is -1; must be a finite number"),
    ({"requests": [request(0, **{"in": -5})]}, "requests[0].in: is -5; must be between 1"),
    ({"requests": [request(0, **{"in": 64})]}, "requests[0].in: is 64 tokens, which 2 hash_ids"),
    ({"requests": [request(0, **{"in": 192})]}, "requests[0].in: is 192 tokens, which 2 hash_ids"),
    ({"requests": [request(0, out="5")]}, "requests[0].out: must be an integer, not a string"),
    ({"requests": [request(0, out=10**30)]}, "requests[0].out: is an integer of more than 20 digits"),
    ({"requests": [request(0, hash_ids=[1, -2])]}, "requests[0].hash_ids[1]: is -2; cannot be negative"),
    ({"requests": [request(0, hash_ids=[1, "2"])]}, "requests[0].hash_ids[1]: must be an integer"),
    ({"requests": [request(0, hash_ids=[1, True])]}, "requests[0].hash_ids[1]: must be an integer"),
    ({"requests": [request(0, hash_ids=[2**63, 1])]}, "requests[0].hash_ids[0]: is 9223372036854775808; must be"),
    ({"requests": [request(0), request(1, type="z")]}, "requests[1].type: is 'z'"),
    ({"requests": [request(0, think_time="1")]}, "requests[0].think_time: must be a number of seconds"),
    ({"requests": [request(0, input_types="text")]}, "requests[0].input_types: must be a list"),
    (
        {"requests": [{"t": 0, "type": "subagent", "agent_id": "a", "requests": [request(0, out=-1)]}]},
        "requests[0].requests[0].out: is -1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_a_wrong_field_is_named_with_its_file(change: dict[str, object], words: str):
    good = {"id": "x", "block_size": 64, "requests": [request(0)]}
    with pytest.raises(TraceError) as error:
        load(json.dumps({**good, **change}), "some/file.json")
    assert str(error.value).startswith(f"some/file.json: {words}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"id": "x",\n "requests": [', "line 2, column 15: not JSON: it ends too early"),
        (b'{"id": "x",\n nonsense}', "line 2, column 2: not JSON"),
        (b"", "line 1, column 1: not JSON"),
        (b"[]", "the file must hold one JSON object, not a list"),
        (b'{"id": "\xff"}', "not UTF-8 at byte 8"),
        (b'{"id": NaN}', "NaN is not a number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as error:
        load_trace(path, "weka")
    assert str(path) in str(error.value) and words in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            load_trace(path, "weka")


def test_every_truncation_of_a_trace_is_refused():
    text = as_text(make_trace(seed=0)).rstrip()
    for end in range(0, len(text), 37):
        with pytest.raises(TraceError):
            load(text[:end], "t")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_mutated_trace_loads_or_is_refused_and_never_crashes(data: st.DataObject):
    """Replaces or removes a value anywhere in a valid trace."""
    trace = copy.deepcopy(make_trace(seed=1))
    node: object = trace
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))  # type: ignore[arg-type]
        key = data.draw(st.sampled_from(keys))
        child = node[key]  # type: ignore[index]
        if isinstance(child, dict | list) and child and data.draw(st.booleans()):
            node = child
            continue
        if data.draw(st.booleans()):
            node[key] = data.draw(anything)  # type: ignore[index]
        else:
            del node[key]  # type: ignore[attr-defined]
        break
    try:
        [conversation] = load(json.dumps(trace), "file")
    except TraceError as error:
        assert str(error).startswith("file: ")
        return
    for turn in turns(conversation.main):
        assert turn.input_tokens > 0 and turn.output_tokens >= 0 and turn.pause_s >= 0
