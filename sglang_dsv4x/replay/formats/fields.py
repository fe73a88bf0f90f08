"""Typed reading of JSON objects, with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

# Above every count that a trace can mean; keeps a corrupt number from becoming an allocation.
LARGEST_COUNT = 2**31 - 1
LARGEST_ID = 2**63 - 1


class TraceError(ValueError):
    """A trace cannot be read or breaks its format. The message names the file and the line or field."""


def parse_object(text: str, source: str) -> Fields:
    """The JSON object in `text`. Raises TraceError with line and column when it is not one."""
    return as_fields(parse_json(text, source), source, "the file")


def parse_json(text: str, source: str, first_line: int = 1) -> Any:
    """The JSON value in `text`, whose first line is number `first_line` of the file `source`.

    Raises TraceError with line and column when it is none.
    """

    def constant(name: str) -> float:
        raise TraceError(f"{source}: {name} is not a number that a trace can hold")

    try:
        return json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = "it ends too early" if error.pos >= len(text.rstrip()) else error.msg
        line = error.lineno + first_line - 1
        raise TraceError(f"{source}: line {line}, column {error.colno}: not JSON: {where}") from error
    except RecursionError as error:
        raise TraceError(f"{source}: nested too deeply") from error
    except TraceError:
        raise
    except ValueError as error:  # an integer with more digits than Python converts
        raise TraceError(f"{source}: {error}") from error


def as_fields(value: Any, source: str, what: str) -> Fields:
    """`value` as a JSON object. Raises TraceError saying that `what` must hold one when it is none."""
    if not isinstance(value, dict):
        raise TraceError(f"{source}: {what} must hold one JSON object, not {_name(value)}")
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

    def only(self, known: Collection[str]) -> None:
        """Raises TraceError when there are fields that the format does not have."""
        for field in self._values:
            if field not in known:
                raise self.error(field if field.isprintable() else "?", "is no field of this format")

    def bare(self) -> Fields:
        """The same place without its values, to raise errors with."""
        return Fields({}, self._source, self._path)

    def items(self, field: str) -> list[Any]:
        """A list of strings and JSON objects; empty when the field is missing."""
        values = self._list(field) if self.has(field) else []
        for i, value in enumerate(values):
            if not isinstance(value, str | dict) or value == "":
                raise self.error(f"{field}[{i}]", f"must be a name or a JSON object, not {_name(value)}")
        return values

    def item(self, field: str, index: int) -> Fields:
        """The JSON object at `index` of a list."""
        return Fields(self._list(field)[index], self._source, f"{self._path}.{field}[{index}]".strip("."))

    def value(self, field: str) -> Any:
        """The field as it is; None when it is missing."""
        return self._values.get(field)

    def flag(self, field: str) -> bool:
        """True or false; false when the field is missing."""
        value = self._get(field, False)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {_name(value)}")
        return value

    def object(self, field: str) -> Fields:
        """A JSON object."""
        value = self._get(field, None)
        if not isinstance(value, dict):
            raise self.error(field, f"must be a JSON object, not {_name(value)}")
        return Fields(value, self._source, f"{self._path}.{field}".strip("."))

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

    def counts(self, field: str) -> list[int]:
        """A list of integers between 0 and LARGEST_ID."""
        values = self._list(field)
        # Traces hold these by the hundred million: two passes in C, and a third only to name what is wrong.
        if values and not (
            set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= LARGEST_ID
        ):
            for i, value in enumerate(values):
                if not _is_count(value):
                    raise self.error(f"{field}[{i}]", f"must be an integer, not {_name(value)}")
                if value < 0:
                    raise self.error(f"{field}[{i}]", f"is {_short(value)}; cannot be negative")
                if value > LARGEST_ID:
                    raise self.error(f"{field}[{i}]", f"is {_short(value)}; must be at most {LARGEST_ID}")
        return values

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
