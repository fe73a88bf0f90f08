"""The trace formats that replay reads. A new one is a module with a loader and a line in FORMATS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sglang_dsv4x.replay.conversation import Conversation
from sglang_dsv4x.replay.formats import weka
from sglang_dsv4x.replay.formats.fields import TraceError

__all__ = ["FORMATS", "SHIPPED_TRACES", "Format", "TraceError", "load_trace", "trace_path"]

SHIPPED_TRACES = Path(__file__).parent.parent / "traces"


class Format(NamedTuple):
    """`load(text, source)` returns the conversations of one file; it raises TraceError naming `source`."""

    description: str
    load: Callable[[str, str], list[Conversation]]


FORMATS: dict[str, Format] = {
    "weka": Format(
        "Weka kv-cache-tester: one JSON object per conversation, prompts as block hashes", weka.load
    ),
}


def trace_path(name: str) -> Path:
    """The file `name`, or the trace of that name that ships with the package ('small')."""
    path = Path(name)
    shipped = SHIPPED_TRACES / f"{name}.json"
    return shipped if not path.exists() and path.name == name and shipped.is_file() else path


def load_trace(path: Path, format_name: str) -> list[Conversation]:
    """Conversations of a trace file in the named format (a key of FORMATS).

    Raises TraceError, whose message names the file and the line or field, when the file cannot be read, is
    not UTF-8 or does not follow the format.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 at byte {error.start} ({error.reason})") from error
    return FORMATS[format_name].load(text, str(path))
