"""Broken, huge and random trace files in every format: a clear error or conversations, never a crash, a hang or the
whole file in memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_dsv4x.replay.conversation import turns
from sglang_dsv4x.replay.formats import AUTO, FORMATS, TraceError, load_trace

ROLES = [{"role": "system", "content": "s" * 900}, {"role": "user", "content": "u" * 300}]
WEKA = {"t": 0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 1.5, "api_time": 2}
CONTENT: dict[str, list[Any]] = {
    "weka": [
        {
            "id": "x",
            "block_size": 64,
            "requests": [
                WEKA,
                {"t": 4, "type": "subagent", "agent_id": "a", "duration_ms": 900, "requests": [WEKA, WEKA]},
                {**WEKA, "t": 9, "input_types": ["text"]},
            ],
        }
    ],
    "dag_jsonl": [
        {
            "session_id": "r",
            "turns": [
                {"messages": ROLES, "max_tokens": 9, "spawns": ["c", {"children": ["d"], "join_at": 2}]},
                {"messages": ROLES[1:], "delay": 5.5, "forks": [{"child": "f", "background": True}]},
                {"messages": ROLES[1:], "forks": ["g"], "extra": {"seed": 1}},
            ],
            "pre_session_spawns": ["e"],
        },
        *({"session_id": n, "turns": [{"messages": ROLES[1:], "tools": [{"name": "t"}]}]} for n in "cdefg"),
        {"session_id": "o", "orchestrator": True, "rounds": [{"spawns": ["c"], "think_time_ms": 4}]},
    ],
    "mooncake": [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 4, "hash_ids": [0, i]} for i in range(3)
    ],
    "mooncake_trace": [
        {"session_id": "s", "input_length": 600, "output_length": 4, "hash_ids": [0, 1], "timestamp": 5},
        {"session_id": "s", "input_length": 70, "delay": 3},
        {"text_input": "x" * 400},
        {"session_id": "m", "messages": ROLES, "tools": [{"name": "t"}]},
        {"payload": {"prompt": "y" * 90, "max_tokens": 3}},
    ],
    "agentic-trace": [
        {
            "metadata": {"a": [1, {"b": None}]},
            "conversations": [
                [{"messages": ROLES, "prompt_tokens": 310}, {"messages": ROLES[1:], "prompt_tokens": 600}],
                [{"messages": ROLES}],
            ],
        }
    ],
}
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**40, -0.5, 1e308])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
quick = settings(max_examples=60, deadline=5000, suppress_health_check=[HealthCheck.too_slow])


def text_of(values: list[Any]) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


def outcome(path: Path, content: bytes, name: str) -> str | None:
    """Loads the bytes; None for conversations that make sense, the error's words for a refusal."""
    path.write_bytes(content)
    try:
        conversations = load_trace(path, name)
    except TraceError as error:
        message = str(error)
        assert message.startswith(f"{path}: ") and message.isprintable()
        return message
    for conversation in conversations:
        found = list(turns(conversation.main))
        assert conversation.name and conversation.arrival_s >= 0
        for turn in found:
            assert turn.input_tokens > 0 and turn.output_tokens >= 0 and turn.pause_s >= 0
            assert (len(turn.blocks) - 1) * conversation.block_size < turn.input_tokens
    return None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "trace.json"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_told_by_its_first_object(path: Path, name: str):
    path.write_text(text_of(CONTENT[name]))
    by_name = load_trace(path, name)
    assert load_trace(path, AUTO) == by_name and by_name
    for other in set(FORMATS) - {name, "mooncake_trace"}:
        assert outcome(path, text_of(CONTENT[name]).encode(), other) is not None, other


def test_what_is_no_trace_is_refused_with_the_formats_that_are_known(path: Path):
    for content in (b"", b"[1]", b'{"a": 1}', b"\xff\xfe", b'"x"', b"{", b'{"id', b"\n\n{}"):
        message = outcome(path, content, AUTO)
        assert message is not None and "--format: weka, dag_jsonl" in message


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_refused_or_loads(path: Path, name: str):
    whole = text_of(CONTENT[name]).encode()
    refused = sum(outcome(path, whole[:end], name) is not None for end in range(0, len(whole), 7))
    assert refused > 5


@pytest.mark.parametrize("name", FORMATS)
@quick
@given(data=st.data())
def test_a_value_replaced_or_removed_anywhere(path: Path, name: str, data: st.DataObject):
    values = json.loads(json.dumps(CONTENT[name]))
    node: Any = values
    while True:
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        child = node[key]
        if isinstance(child, dict | list) and child and data.draw(st.booleans()):
            node = child
        elif data.draw(st.booleans()):
            node[key] = data.draw(anything)
            break
        else:
            del node[key]
            break
    outcome(path, text_of(values).encode(), name)


@pytest.mark.parametrize("name", FORMATS)
@quick
@given(data=st.data())
def test_bytes_replaced_anywhere(path: Path, name: str, data: st.DataObject):
    whole = bytearray(text_of(CONTENT[name]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    outcome(path, bytes(whole), name)


@quick
@given(st.binary(max_size=200))
def test_random_bytes(path: Path, content: bytes):
    for name in (AUTO, *FORMATS):
        assert outcome(path, content, name) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_beyond_the_limit_is_named(path: Path, name: str):
    path.write_text(text_of(CONTENT[name]))
    with pytest.raises(TraceError) as error:
        load_trace(path, name, largest_record=60)
    place = {"weka": "the file is", "agentic-trace": "line 1: a value is"}.get(name, r"line \d is")
    assert re.match(f"{re.escape(str(path))}: {place} longer than 60 (bytes|characters)", str(error.value))


LIMITED = """
import resource, sys
from pathlib import Path
from sglang_dsv4x.replay.formats import TraceError, load_trace
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
try:
    print(len(load_trace(Path(sys.argv[1]), sys.argv[2])), "conversations")
except TraceError as error:
    print(error)
"""


def limited(path: Path, name: str, limit: int = 2**30) -> str:
    """What loading prints in a process with `limit` bytes of address space."""
    command = [sys.executable, "-c", LIMITED, str(path), name, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weka", "the file is longer than 134,217,728 bytes"),
        ("mooncake", "line 1 is longer than 134,217,728 bytes"),
        ("agentic-trace", "line 1: a value is longer than 134,217,728 characters"),
    ],
)
def test_a_line_of_a_gigabyte_is_refused_within_bounded_memory(tmp_path: Path, name: str, words: str):
    path = tmp_path / "long.json"
    begin = b'{"conversations": [[{"messages": [{"role": "user", "content": "'
    with path.open("wb") as file:
        file.write(begin)
        # A hole in the file, so that it takes no disk: zero bytes are no JSON, but nobody looks at them.
        file.truncate(10**9)
    if name == "agentic-trace":
        with path.open("r+b") as file:
            file.seek(len(begin))
            for _ in range(260):
                file.write(b"x" * 2**20)
    assert words in limited(path, name)


def test_a_file_of_many_conversations_is_never_in_memory_as_a_whole(tmp_path: Path):
    """150 MB in one line, of 150 conversations: far more as JSON values than the process may have."""
    path = tmp_path / "many.json"
    turn = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000}]})
    conversation = "[" + ",".join([turn] * 100) + "]"
    with path.open("w") as file:
        file.write('{"conversations": [')
        for i in range(150):
            file.write(("," if i else "") + conversation)
        file.write("]}")
    assert path.stat().st_size > 1.5e8
    assert limited(path, "agentic-trace", 500 * 2**20) == "150 conversations\n"
