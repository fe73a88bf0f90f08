"""Trace files, read piece by piece: one line, one element or one document at a time, none of them without a limit."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sglang_dsv4x.replay.formats.fields import Fields, TraceError, as_fields, parse_json

# The longest record (a line, an element or a document) that is read. JSON takes ten times its length in memory.
LARGEST_RECORD = 128 * 2**20

_HEAD = 2**16
_CHUNK = 2**20


class Line(NamedTuple):
    """A line that is not blank: its number from 1, where it begins in the file in bytes, and its JSON object."""

    number: int
    offset: int
    value: Fields


class TraceFile:
    """One file. Every method raises TraceError naming it when it cannot be read or is not what it should be."""

    def __init__(self, path: Path, largest_record: int = LARGEST_RECORD):
        self.path = path
        self._largest = largest_record

    @property
    def stem(self) -> str:
        """The file's name without its ending; names the conversations of formats that have no names."""
        printable = "".join(c if c.isprintable() else "?" for c in self.path.stem)
        return printable or "trace"

    def document(self) -> str:
        """The whole content, for formats of one object per file."""
        with self._opened() as file:
            content = file.read(self._largest + 1)
        if len(content) > self._largest:
            raise self._too_long("the file")
        return self._decoded(content, str(self.path)).removeprefix("\ufeff")

    def lines(self) -> Iterator[Line]:
        """The JSON objects of a file of lines, in order."""
        with self._opened() as file:
            offset = number = 0
            while content := file.readline(self._largest + 1):
                number += 1
                if len(content) > self._largest:
                    raise self._too_long(f"line {number}")
                if content.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield Line(number, offset, self._object(content, number))
                offset += len(content)

    def line_at(self, line: Line | tuple[int, int]) -> Fields:
        """Reads again the line with this (number, offset)."""
        number, offset = line[0], line[1]
        with self._opened() as file:
            file.seek(offset)
            return self._object(file.readline(self._largest + 1), number)

    def elements(self, field: str) -> Iterator[tuple[int, Any, str]]:
        """The elements of the list `field` of the file's one object: their index, JSON value and place.

        Reads no more of the file at a time than one element takes.
        """
        with self._opened() as file:
            yield from _Elements(file, str(self.path), self._largest).of(field)

    def first_keys(self, until: Collection[str]) -> set[str]:
        """The keys of the first JSON object, as far as they are in the first 64 KiB, up to the first one that is in
        `until`; none for another file."""
        with self._opened() as file:
            head = file.read(_HEAD)
        return _keys(head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip(), until)

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _object(self, content: bytes, number: int) -> Fields:
        text = self._decoded(content, f"{self.path}: line {number}").removeprefix("\ufeff")
        return as_fields(parse_json(text, str(self.path), number), f"{self.path}: line {number}", "the line")

    def _decoded(self, content: bytes, where: str) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"{where}: not UTF-8 at byte {error.start} ({error.reason})") from error

    def _too_long(self, what: str) -> TraceError:
        return TraceError(
            f"{self.path}: {what} is longer than {self._largest:,} bytes, the most that one record may have"
        )


class _Elements:
    """Reads one JSON object from a file through a window that grows to the value it is in."""

    def __init__(self, file: BinaryIO, path: str, largest: int):
        self._file = file
        self._path = path
        self._largest = largest
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(parse_constant=self._constant)
        self._text = ""
        self._at = 0
        self._line = 1
        self._ended = False

    def of(self, field: str) -> Iterator[tuple[int, Any, str]]:
        self._expect("{", "the file must hold one JSON object")
        found = False
        if self._next() == "}":
            self._at += 1
        else:
            while True:
                key = self._value()
                if not isinstance(key, str):
                    raise self._error("not JSON: a key must be a string")
                self._expect(":", "not JSON: ':' is missing after a key")
                if key == field and self._next() == "[":
                    found = True
                    yield from self._list(field)
                else:
                    self._value()
                if self._separator("}"):
                    break
        if self._next():
            raise self._error("not JSON: extra data after the object")
        if not found:
            raise TraceError(f"{self._path}: {field}: is missing or no list")

    def _list(self, field: str) -> Iterator[tuple[int, Any, str]]:
        self._at += 1
        if self._next() == "]":
            self._at += 1
            return
        index = 0
        while True:
            self._next()
            place = f"{self._path}: line {self._line}: {field}[{index}]"
            yield index, self._value(), place
            index += 1
            if self._separator("]"):
                return

    def _separator(self, end: str) -> bool:
        """Takes ',' or `end` and says whether it was the end."""
        found = self._next()
        if found not in (",", end):
            raise self._error(
                "not JSON: the file ends too early" if not found else "not JSON: ',' is missing"
            )
        self._at += 1
        return found == end

    def _expect(self, character: str, otherwise: str) -> None:
        if self._next() != character:
            raise self._error(otherwise)
        self._at += 1

    def _next(self) -> str:
        """The next character that is no white space, or nothing at the end."""
        while True:
            length = len(self._text)
            while self._at < length and self._text[self._at] in " \t\r\n\ufeff":
                self._at += 1
            if self._at < length:
                return self._text[self._at]
            if not self._read(_CHUNK):
                return ""

    def _value(self) -> Any:
        self._next()
        self._forget()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._grow():
                    continue
                line = self._line + self._text.count("\n", 0, error.pos)
                early = error.pos >= len(self._text.rstrip())
                what = "the file ends too early" if early else error.msg
                raise TraceError(f"{self._path}: line {line}: not JSON: {what}") from error
            except RecursionError as error:
                raise self._error("nested too deeply") from error
            except TraceError:
                raise
            except ValueError as error:
                raise self._error(str(error)) from error
            # A number may go on in the next chunk.
            if end == len(self._text) and self._grow():
                continue
            if end - self._at > self._largest:
                raise self._value_too_long()
            self._at = end
            return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether more of the file may mend it: a string without an end, or anything at the window's end."""
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - 16

    def _forget(self) -> None:
        self._line += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :], 0

    def _grow(self) -> bool:
        """Doubles the window; False at the end of the file."""
        if len(self._text) - self._at > self._largest:
            raise self._value_too_long()
        return self._read(min(max(_CHUNK, len(self._text)), self._largest + 1))

    def _read(self, size: int) -> bool:
        if self._ended:
            return False
        content = self._file.read(size)
        self._ended = not content
        try:
            self._text += self._decode.decode(content, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8 ({error.reason})") from error
        return not self._ended

    def _value_too_long(self) -> TraceError:
        return self._error(f"a value is longer than {self._largest:,} characters, the most it may have")

    def _constant(self, name: str) -> float:
        raise self._error(f"{name} is not a number that a trace can hold")

    def _error(self, message: str) -> TraceError:
        line = self._line + self._text.count("\n", 0, self._at)
        return TraceError(f"{self._path}: line {line}: {message}")


def _keys(text: str, until: Collection[str]) -> set[str]:
    """Keys at the top of the object that `text` begins with; it may be cut anywhere."""
    found: set[str] = set()
    scan = json.decoder.scanstring  # type: ignore[attr-defined]
    depth = at = 0
    expecting = False
    while at < len(text):
        character = text[at]
        at += 1
        if character in "{[":
            depth += 1
            expecting = depth == 1 and character == "{"
            if depth == 1 and not expecting:
                return found
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return found
        elif character == ",":
            expecting = depth == 1
        elif character == '"':
            try:
                word, at = scan(text, at, False)
            except ValueError:
                return found
            if expecting:
                found.add(word)
                expecting = False
                if word in until:
                    return found
        elif depth == 0:
            return found
    return found
