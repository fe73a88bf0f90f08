"""The trace formats that replay reads. A new one is a module with `read` and a line in FORMATS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_dsv4x.replay.conversation import Conversation
from sglang_dsv4x.replay.formats import agentic_trace, dag_jsonl, mooncake, mooncake_trace, weka
from sglang_dsv4x.replay.formats.fields import TraceError
from sglang_dsv4x.replay.formats.options import LoadOptions
from sglang_dsv4x.replay.formats.source import LARGEST_RECORD, TraceFile

__all__ = [
    "AUTO",
    "FORMATS",
    "SHIPPED_TRACES",
    "Format",
    "LoadOptions",
    "TraceError",
    "detect",
    "load_trace",
    "trace_path",
]

SHIPPED_TRACES = Path(__file__).parent.parent / "traces"
AUTO = "auto"


class Format(NamedTuple):
    """`read(file, options)` yields the conversations of one file; it raises TraceError naming the place."""

    description: str
    read: Callable[[TraceFile, LoadOptions], Iterator[Conversation]]


FORMATS: dict[str, Format] = {
    "weka": Format(
        "Weka kv-cache-tester, a JSON object per conversation, prompts as block hashes", weka.read
    ),
    "dag_jsonl": Format("AIPerf, a session per line, turns of messages that fork and spawn", dag_jsonl.read),
    "mooncake_trace": Format(
        "AIPerf, a turn per line, with sessions, delays, lengths or text", mooncake_trace.read
    ),
    "mooncake": Format("Mooncake's traces, a request per line, prompts as block hashes", mooncake.read),
    "agentic-trace": Format("SGLang bench_serving, conversations of new messages", agentic_trace.read),
}


def trace_path(name: str) -> Path:
    """The file `name`, or the trace of that name that ships with the package ('small')."""
    path = Path(name)
    shipped = SHIPPED_TRACES / f"{name}.json"
    return shipped if not path.exists() and path.name == name and shipped.is_file() else path


def load_trace(
    path: Path,
    format_name: str = AUTO,
    options: LoadOptions | None = None,
    largest_record: int = LARGEST_RECORD,
) -> list[Conversation]:
    """Conversations of a trace file in the named format (a key of FORMATS, or AUTO to find out).

    Raises TraceError, whose message names the file and the line or field, when the file cannot be read, is
    not UTF-8, does not follow the format or has a record of more than `largest_record` bytes.
    """
    file = TraceFile(path, largest_record)
    name = detect(file) if format_name == AUTO else format_name
    return list(FORMATS[name].read(file, options or LoadOptions()))


def detect(file: TraceFile) -> str:
    """The format that the file's first object looks like, by its keys. Raises TraceError when it is none."""
    keys = file.first_keys(until=("conversations", "turns", "orchestrator", "requests"))
    if "conversations" in keys:
        return "agentic-trace"
    if "session_id" in keys and keys & {"turns", "orchestrator"}:
        return "dag_jsonl"
    if keys & {"block_size", "hash_id_scope", "requests"}:
        return "weka"
    if keys and keys <= {*mooncake.KEYS} and "session_id" not in keys and "timestamp" in keys:
        return "mooncake"
    if keys & {"input_length", "text_input", "messages", "payload"}:
        return "mooncake_trace"
    seen = ", ".join(sorted(k for k in keys if k.isprintable())[:8])
    raise TraceError(
        f"{file.path}: its format cannot be told from "
        + (f"the keys of its first object ({seen})" if seen else "its beginning, which is no JSON object")
        + f". Name it with --format: {', '.join(FORMATS)}."
    )
