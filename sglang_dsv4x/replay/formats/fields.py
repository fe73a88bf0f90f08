"""Typed reading of JSON objects, with errors that name the file and the field."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

# Above every count that a trace can mean; keeps a corrupt number from becoming an allocation.
LARGEST_COUNT = 2**31 - 1


class TraceError(ValueError):
    """A trace cannot be read or breaks its format. The message names the file and the line or field."""


def parse_object(text: str, source: str) -> Fields:
    """The JSON object in `text`. Raises TraceError with line and column when it is not one."""

    def constant(name: str) -> float:
        raise TraceError(f"{source}: {name} is not a number that a trace can hold")

    try:
        value = json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = "the file ends too early" if error.pos >= len(text.rstrip()) else error.msg
        raise TraceError(f"{source}: line {error.lineno}, column {error.colno}: not JSON: {where}") from error
    except RecursionError as error:
        raise TraceError(f"{source}: nested too deeply") from error
    except TraceError:
        raise
    except ValueError as error:  # an integer with more digits than Python converts
        raise TraceError(f"{source}: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{source}: the file must hold one JSON object, not {_name(value)}")
    return Fields(value, source, "")


class Fields:
    """One JSON object; every getter raises TraceError naming the field when its value will not do."""

    def __init__(self, values: dict[str, Any], source: str, path: str):
        self._values = values
        self._source = source
        self._path = path

    def error(self, field: str, message: str) -> TraceError:
        """An error about `field` of this object, for the caller to raise."""
        where = f"{self._path}.{field}".strip(".")
        return TraceError(f"{self._source}: {where}: {message}")

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(field) is not None

    def count(self, field: str, least: int = 0, default: int | None = None) -> int:
        """An integer between `least` and LARGEST_COUNT."""
        value = self._get(field, default)
        if not _is_count(value):
            raise self.error(field, f"must be an integer, not {_name(value)}")
        if not least <= value <= LARGEST_COUNT:
            raise self.error(field, f"is {_short(value)}; must be between {least} and {LARGEST_COUNT}")
        return int(value)

    def seconds(self, field: str, default: float | None = None) -> float:
        """A finite time in seconds, not negative."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"must be a number of seconds, not {_name(value)}")
        if not 0 <= value <= LARGEST_COUNT or not math.isfinite(value):
            raise self.error(field, f"is {_short(value)}; must be a finite number of seconds, not negative")
        return float(value)

    def text(self, field: str, default: str | None = None) -> str:
        """A printable string that is not empty."""
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, not {_name(value)}")
        if not value or not value.isprintable():
            raise self.error(field, "must be a string of printable characters that is not empty")
        return value

    def counts(self, field: str) -> tuple[int, ...]:
        """A list of integers that are not negative."""
        values = self._list(field)
        for i, value in enumerate(values):
            if not _is_count(value):
                raise self.error(f"{field}[{i}]", f"must be an integer, not {_name(value)}")
            if value < 0:
                raise self.error(f"{field}[{i}]", f"is {_short(value)}; cannot be negative")
        return tuple(values)

    def numbers(self, field: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        values = self._list(field)
        for i, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self.error(f"{field}[{i}]", f"must be a number, not {_name(value)}")
            if not abs(value) <= sys.float_info.max:
                raise self.error(f"{field}[{i}]", f"is {_short(value)}; must be finite")
        return tuple(float(value) for value in values)

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of strings; empty when the field is missing."""
        values = self._list(field) if self.has(field) else []
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{field}[{i}]", f"must be a string, not {_name(value)}")
        return tuple(values)

    def objects(self, field: str) -> list[Fields]:
        """A list of JSON objects."""
        found = []
        for i, value in enumerate(self._list(field)):
            if not isinstance(value, dict):
                raise self.error(f"{field}[{i}]", f"must be a JSON object, not {_name(value)}")
            found.append(Fields(value, self._source, f"{self._path}.{field}[{i}]".strip(".")))
        return found

    def _get(self, field: str, default: Any) -> Any:
        value = self._values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        return value

    def _list(self, field: str) -> list[Any]:
        value = self._get(field, None)
        if not isinstance(value, list):
            raise self.error(field, f"must be a list, not {_name(value)}")
        return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "an integer"}
    return "null" if value is None else names.get(type(value), "a number with a fraction")


def _short(value: int | float) -> str:
    if isinstance(value, int) and abs(value) > 10**20:
        return "an integer of more than 20 digits"
    return str(value)
