"""AIPerf's, Mooncake's and bench_serving's formats: what their turns become, and what is refused with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4x.replay.blocks import Blocks, common_blocks
from sglang_dsv4x.replay.conversation import Agent, Branches, Conversation, Turn, turns
from sglang_dsv4x.replay.formats import AUTO, LoadOptions, TraceError, load_trace

Load = Callable[..., list[Conversation]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes the values as JSON lines (one value alone: as a document) and loads the file."""

    def loaded(*values: Any, name: str = AUTO, **options: Any) -> list[Conversation]:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(json.dumps(value) for value in values) + "\n")
        return load_trace(path, name, LoadOptions(**options))

    return loaded


def words(count: int, of: str = "word") -> str:
    """Text of `count` tokens at four characters each."""
    return "".join(f"{of[:1]}{i % 1000:03d}" for i in range(count))


def user(tokens: int, of: str = "u", role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": words(tokens, of)}


def shared(a: Turn, b: Turn) -> int:
    return common_blocks(Blocks(a.blocks).array(), Blocks(b.blocks).array())


def session(name: str, *steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"session_id": name, "turns": list(steps), **more}


def say(tokens: int, of: str = "u", **more: Any) -> dict[str, Any]:
    return {"messages": [user(tokens, of)], "max_tokens": 100, **more}


DAG_BAD: list[tuple[list[Any], str]] = [
    ([session("a", say(9)), session("a", say(9))], "line 2: session_id: 'a' is there twice, first in line 1"),
    ([session("a", say(9, spawns=["b"]))], "line 1: turns: 'a' starts 'b', which is in no line"),
    (
        [session("a", say(9, forks=["b"])), session("b", say(9, forks=["c"])), session("c", say(9, forks=["b"]))],
        "'b' is forked by 'a' and 'c'",
    ),
    ([session("a", say(9, spawns=["b"])), session("b", say(9, spawns=["a"]))], "in a circle: a -> b -> a"),
    ([session("a", say(9, spawns=["a"]))], "in a circle: a -> a"),
    ([session("a", say(9, forks=["b"]), say(9)), session("b", say(9))], "turns[0].forks: end the session"),
    ([session("a", say(9, spawns=["b", "b"])), session("b", say(9))], "spawns: names a session twice"),
    ([session("a", say(9, delay=-1))], "turns[0].delay: is -1"),
    ([session("a", say(9, max_tokens=True))], "turns[0].max_tokens: must be an integer"),
    ([session("a", say(9, max_tokens=10**12))], "turns[0].max_tokens: is 1000000000000"),
    ([session("a", say(9, temperature=1))], "turns[0].temperature: is no field of this format"),
    ([session("a", say(9), color=1)], "line 1: color: is no field of this format"),
    ([session("a", say(9, spawns=[{"children": ["b"], "join_at": 7}])), session("b", say(9))], "join_at: is 7"),
    ([session("a", {"messages": [{"content": "x"}]})], "turns[0].messages[0].role: is missing"),
    (
        [session("a", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})],
        "content[0].type: is 'image_url'; only parts of text",
    ),
    ([session("a", say(9)), {"session_id": "b", "turns": []}], "line 2: turns: is empty"),
    ([session("a", say(9), context_mode="other")], "context_mode: is 'other'"),
    ([session("a", *[say(9, max_tokens=2**30)] * 2)], "makes a prompt of 1073741835 tokens"),
]  # fmt: skip


class TestDagJsonl:
    def test_a_prompt_is_all_messages_and_answers_before_and_the_turns_own(self, load: Load):
        [conversation] = load(session("s", say(500), say(40), say(30, delay=2500)))
        first, second, third = turns(conversation.main)
        header = len("\n<user>\n") / 4
        assert first.input_tokens == 500 + header
        assert second.input_tokens == first.input_tokens + 100 + 40 + header
        assert third.input_tokens == second.input_tokens + 100 + 30 + header
        assert [t.output_tokens for t in (first, second, third)] == [100] * 3
        assert third.pause_s == 2.5 and first.pause_s == 0
        assert shared(first, second) == first.input_tokens // 64 == len(first.blocks)
        assert shared(second, third) == len(second.blocks)

    def test_a_fork_inherits_its_parents_whole_history_and_a_spawn_none_of_it(self, load: Load):
        [conversation] = load(
            session("root", say(600, spawns=["new"]), say(64, forks=["left", "right"])),
            session("left", say(64, "l")),
            session("right", say(64, "r")),
            session("new", say(64, "n")),
        )
        first, spawns, second, forks = conversation.main.steps
        assert isinstance(first, Turn) and isinstance(second, Turn)
        assert isinstance(spawns, Branches) and isinstance(forks, Branches)
        [fresh] = turns(spawns.agents[0])
        left, right = (next(turns(agent)) for agent in forks.agents)
        assert (fresh.input_tokens, fresh.kind, shared(fresh, first)) == (66, "human", 0)
        assert second.kind == "resume" and left.kind == right.kind == "fork"
        inherited = second.input_tokens + 100
        assert left.input_tokens == right.input_tokens == inherited + 66
        assert shared(left, right) == inherited // 64
        assert [a.name for a in forks.agents] == ["left", "right"] and conversation.name == "root"

    @pytest.mark.parametrize(
        ("entry", "beside"),
        [
            ({"spawns": ["c"]}, 0),
            ({"spawns": [{"children": ["c"], "join_at": 3}]}, 2),
            ({"forks": [{"child": "c", "background": True}]}, None),
        ],
    )
    def test_the_parent_waits_where_the_trace_says(self, load: Load, entry: Any, beside: int | None):
        [conversation] = load(session("p", say(9, **entry), say(9), say(9), say(9)), session("c", say(9)))
        [branches] = [s for s in conversation.main.steps if isinstance(s, Branches)]
        assert branches.turns_beside == beside
        kinds = [s.kind for s in conversation.main.steps if isinstance(s, Turn)]
        assert kinds.index("resume") == beside + 1 if beside is not None else "resume" not in kinds

    def test_a_spawn_after_the_last_turn_and_one_before_the_first_are_waited_for_by_nobody(self, load: Load):
        [conversation] = load(
            session("p", say(9, spawns=["late"]), pre_session_spawns=["early"]),
            session("early", say(9)),
            session("late", say(9)),
        )
        early, _, late = conversation.main.steps
        assert isinstance(early, Branches) and isinstance(late, Branches)
        assert early.turns_beside is late.turns_beside is None

    def test_an_orchestrator_runs_its_rounds_one_after_the_other(self, load: Load):
        [conversation] = load(
            {
                "session_id": "o",
                "orchestrator": True,
                "rounds": 3,
                "spawns": ["a", "b"],
                "think_time_ms": 500,
            },
            session("a", say(9)),
            session("b", say(9)),
        )
        rounds = conversation.main.steps
        assert len(rounds) == 3
        for each in rounds:
            assert isinstance(each, Branches) and each.turns_beside == 0
            assert [(a.name, a.pause_s) for a in each.agents] == [("a", 0.5), ("b", 0.5)]

    def test_context_modes_say_what_is_in_the_next_prompt(self, load: Load):
        def lengths(mode: str) -> list[int]:
            [conversation] = load(session("s", say(64), say(64), context_mode=mode))
            return [t.input_tokens for t in turns(conversation.main)]

        assert lengths("deltas_without_responses") == [66, 66 + 100 + 66]
        assert lengths("deltas_with_responses") == [66, 66 + 66]
        assert lengths("message_array_with_responses") == [66, 66]

    def test_text_that_prompts_of_two_sessions_share_has_the_same_blocks(self, load: Load):
        system = user(640, "s", "system")
        two = [session(name, {"messages": [system, user(64, name)], "max_tokens": 5}) for name in ("a", "b")]
        a, b = (next(turns(c.main)) for c in load(*two))
        assert shared(a, b) == 10

    def test_tools_parts_and_calls_count_as_the_text_they_are(self, load: Load):
        plain = session("s", say(64))
        rich = session(
            "s",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": words(64)}]},
                    {"role": "assistant", "content": None, "tool_calls": [{"id": words(50)}]},
                    {"role": "tool", "content": "ok", "tool_call_id": "1"},
                ],
                "tools": [{"name": words(200)}],
            },
        )
        [simple], [full] = (list(turns(load(each)[0].main)) for each in (plain, rich))
        assert full.input_tokens > simple.input_tokens + 250 and full.kind == "tool"
        assert full.output_tokens == 220

    @pytest.mark.parametrize(("lines", "message"), DAG_BAD, ids=[m for _, m in DAG_BAD])
    def test_what_breaks_the_format_is_named_with_line_and_field(
        self, load: Load, lines: list[Any], message: str
    ):
        with pytest.raises(TraceError) as error:
            load(*lines, name="dag_jsonl")
        assert "trace.jsonl: line " in str(error.value) and message in str(error.value)

    def test_sessions_that_multiply_or_nest_without_end_are_refused(self, load: Load):
        doubling = [
            session(f"s{i}", say(9, spawns=[f"s{i + 1}"]), say(9, spawns=[f"s{i + 1}"])) for i in range(40)
        ]
        with pytest.raises(TraceError, match=r"starts more than 1,000,000 turns"):
            load(*doubling, session("s40", say(9)))
        chain = [session(f"s{i}", say(9, spawns=[f"s{i + 1}"])) for i in range(3000)]
        with pytest.raises(TraceError, match="more than 64 deep"):
            load(*chain, session("s3000", say(9)))
        with pytest.raises(TraceError, match=r"circle: s0 -> s1 -> s2 -> s3 -> \.\.\. -> s2998"):
            load(*chain[:-1], session("s2999", say(9, spawns=["s0"])))


class TestMooncake:
    def row(self, at: float, tokens: int, ids: list[int]) -> dict[str, Any]:
        return {"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": ids}

    def test_each_line_is_a_session_that_begins_at_its_time_and_shares_blocks_with_the_others(
        self, load: Load
    ):
        late, early = self.row(9000, 1300, [0, 1, 2]), self.row(4000, 1000, [0, 1])
        conversations = load(late, early)
        assert [(c.name, c.arrival_s, c.block_size) for c in conversations] == [
            ("trace:2", 0.0, 512),
            ("trace:1", 5.0, 512),
        ]
        assert {c.token_scope for c in conversations} == {"trace"}
        second, first = (next(turns(c.main)) for c in conversations)
        assert list(first.blocks) == [0, 1, 2] and list(second.blocks) == [0, 1]
        assert (first.input_tokens, first.output_tokens) == (1300, 7)

    def test_another_block_size_can_be_given(self, load: Load):
        [conversation] = load(self.row(0, 100, [0, 1]), block_size=64)
        assert conversation.block_size == 64

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"timestamp": -1}, "timestamp: is -1"),
            ({"hash_ids": [0]}, "hash_ids: 1 blocks of 512 tokens cannot stand for input_length 1000"),
            ({"hash_ids": ["a", 1]}, "hash_ids[0]: must be an integer, not a string"),
            ({"input_length": 0}, "input_length: is 0"),
            ({"output_length": 1.5}, "output_length: must be an integer"),
            ({"more": 1}, "more: is no field of this format"),
        ],
    )
    def test_wrong_fields_are_named(self, load: Load, change: dict[str, Any], message: str):
        with pytest.raises(TraceError) as error:
            load(self.row(0, 600, [0, 1]), {**self.row(0, 1000, [0, 1]), **change}, name="mooncake")
        assert f"trace.jsonl: line 2: {message}" in str(error.value)


class TestMooncakeTrace:
    def test_lines_of_one_session_build_on_each_other_with_their_answers(self, load: Load):
        [conversation, other] = load(
            {"session_id": "s", "input_length": 300, "output_length": 40},
            {"session_id": "x", "input_length": 10},
            {"session_id": "s", "delay": 2000, "input_length": 150, "output_length": 20},
        )
        first, second = turns(conversation.main)
        assert (first.input_tokens, second.input_tokens) == (300, 300 + 40 + 150)
        assert second.pause_s == 2.0 and other.name == "x"
        [conversation] = load(
            {"session_id": "s", "input_length": 1024, "hash_ids": [5, 6], "output_length": 512},
            {"session_id": "s", "input_length": 512, "hash_ids": [7], "timestamp": 3},
        )
        first, second = turns(conversation.main)
        assert list(first.blocks) == [5, 6] and second.blocks[:2] == (5, 6) and second.blocks[3] == 7

    def test_hash_ids_that_do_not_end_at_a_block_still_make_equal_prompts_equal(self, load: Load):
        lines = [
            {"session_id": name, "input_length": 700, "hash_ids": [1, 2], "output_length": 5} for name in "ab"
        ]
        a, b = (next(turns(c.main)) for c in load(*lines))
        assert a.blocks == b.blocks and len(a.blocks) == 1

    def test_messages_and_payloads_are_whole_prompts(self, load: Load):
        body = {"messages": [user(640), user(64, "b")], "max_tokens": 9}
        conversations = load(
            {"session_id": "m", "messages": [user(640)], "output_length": 4, "timestamp": 1000},
            {"session_id": "m", "messages": [user(640), user(64, "b", "tool")], "timestamp": 3500},
            {"session_id": "p", "payload": body, "timestamp": 2000},
            {"text_input": words(64), "timestamp": 5000},
        )
        m, p, text = conversations
        first, second = turns(m.main)
        assert second.input_tokens == 708 and shared(first, second) == len(first.blocks) == 10
        assert (second.kind, second.pause_s) == ("tool", 2.5)
        assert next(turns(p.main)).output_tokens == 9 and p.arrival_s == 1.0
        assert next(turns(text.main)).input_tokens == 64

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ({"session_id": "s"}, "input_length: exactly one of"),
            ({"input_length": 4, "text_input": "x"}, "input_length and text_input"),
            ({"text_input": "x", "hash_ids": [1]}, "hash_ids: is only for lines with input_length"),
            ({"session_id": "s", "messages": [user(9)]}, "messages: cannot follow another kind of line"),
            (
                {"session_id": "s", "input_length": 9, "timestamp": 1},
                "timestamp: is before the session's last",
            ),
            ({"payload": {"prompt": 3}}, "payload.prompt: must be a string"),
            ({"input_length": 2**30}, "makes a prompt of 1073741824 tokens"),
            ({"input_length": 9, "delay": -3}, "delay: is -3"),
        ],
    )
    def test_wrong_lines_are_named(self, load: Load, line: dict[str, Any], message: str):
        with pytest.raises(TraceError) as error:
            load({"session_id": "s", "input_length": 9, "timestamp": 2}, line, name="mooncake_trace")
        assert "trace.jsonl: line 2: " in str(error.value) and message in str(error.value)


class TestAgenticTrace:
    def trace(self, *conversations: list[Any]) -> dict[str, Any]:
        return {"metadata": {"from": "test"}, "conversations": list(conversations)}

    def test_prompts_have_the_recorded_lengths_and_grow(self, load: Load):
        turns_of = [
            {"messages": [user(5000, "s", "system"), user(1000)], "prompt_tokens": 5500},
            {"messages": [user(64, "a")], "prompt_tokens": 5900},
            {"messages": []},
            {"messages": [user(64, "b")], "prompt_tokens": 6400},
        ]
        [conversation] = load(self.trace(turns_of))
        first, second, third = turns(conversation.main)
        assert [t.input_tokens for t in (first, second, third)] == [5500, 5900, 6400]
        assert shared(first, second) == len(first.blocks) and shared(second, third) == len(second.blocks)
        assert conversation.name == "trace:0" and second.output_tokens == 220

    def test_conversations_share_their_system_prompt_and_not_what_differs(self, load: Load):
        def of(name: str, recorded: int) -> list[Any]:
            return [{"messages": [user(3000, "s", "system"), user(500, name)], "prompt_tokens": recorded}]

        a, b, same = (
            next(turns(c.main)) for c in load(self.trace(of("a", 3400), of("b", 3300), of("a", 3400)))
        )
        assert 2700 < 64 * shared(a, b) <= 3000
        assert a.blocks == same.blocks and a.input_tokens == 3400 and b.input_tokens == 3300

    def test_without_recorded_lengths_an_answer_has_bench_servings_default(self, load: Load):
        [conversation] = load(self.trace([{"messages": [user(62)]}, {"messages": [user(62)]}]))
        assert [t.input_tokens for t in turns(conversation.main)] == [64, 64 + 220 + 64]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"conversations": []}, "conversations: holds no turn with messages"),
            ({"conversations": 4}, "conversations: is missing or no list"),
            ({"conversations": [4]}, "line 1: conversations[0]: must be a list of turns"),
            ({"conversations": [[4]]}, "conversations[0][0]: a turn must hold one JSON object"),
            ({"conversations": [[{"messages": "x"}]]}, "messages: must be a list"),
            ({"conversations": [[{"messages": [user(9)], "prompt_tokens": -1}]]}, "prompt_tokens: is -1"),
            ({"conversations": [[{"messages": [user(9)], "prompt_tokens": 2**31}]]}, "prompt_tokens: is 2147483648"),
        ],
    )  # fmt: skip
    def test_wrong_values_are_named(self, load: Load, value: Any, message: str):
        with pytest.raises(TraceError) as error:
            load(value, name="agentic-trace")
        assert "trace.jsonl: " in str(error.value) and message in str(error.value)


def test_the_fork_heavy_trace_is_a_tree_of_turns(load: Load):
    """Every session forks two until the fourth level: 15 sessions, one conversation, prompts that share."""
    lines = [
        session(f"s{i}", say(256, "x"), say(64, "y", **({"forks": [f"s{2 * i}", f"s{2 * i + 1}"]} if i < 8 else {})))
        for i in range(1, 16)
    ]  # fmt: skip
    [conversation] = load(*lines)
    assert len(list(turns(conversation.main))) == 30

    def depth(agent: Agent) -> int:
        inner = [a for s in agent.steps if isinstance(s, Branches) for a in s.agents]
        return 1 + max(map(depth, inner), default=0)

    assert depth(conversation.main) == 4
