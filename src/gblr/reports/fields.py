"""Reading JSON with errors that name the field: `results[2].value must be a number; got "high"`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class RecordError(ValueError):
    """A run record that cannot be read, with the field that is wrong."""


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it is in the file. Methods without a default ask for a field that must be there."""

    values: Mapping[str, Any]
    where: str = ""

    def at(self, name: str) -> str:
        """The full name of a field.

        >>> Fields({}, "results[2]").at("value")
        'results[2].value'
        """
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default, "a text")
        if not isinstance(value, str):
            raise self.wrong(name, "a text", value)
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default, "a whole number")
        if not _is_number(value) or value != int(value):
            raise self.wrong(name, "a whole number", value)
        return int(value)

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is not None and not _is_number(value):
            raise self.wrong(name, "a number or null", value)
        return None if value is None else float(value)

    def whole(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def numbers(self, name: str) -> tuple[float | None, ...]:
        return tuple(None if value is None else float(value) for value in self._list(name, "numbers", _or_null))

    def objects(self, name: str) -> list["Fields"]:
        rows = self._list(name, "objects", lambda value: isinstance(value, Mapping))
        return [Fields(row, f"{self.at(name)}[{i}]") for i, row in enumerate(rows)]

    def object(self, name: str) -> "Fields":
        """The object of that name; an empty one where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return Fields(value or {}, self.at(name))

    def texts(self, name: str) -> dict[str, str]:
        """An object of texts, numbers or lists of numbers, all as texts; entries that are null are left out."""
        inner = self.object(name)
        for key, value in inner.values.items():
            if value is not None and not isinstance(value, (str, int, float)) and not _are_numbers(value):
                raise inner.wrong(key, "a text or a number, or a list of numbers", value)
        return {key: _as_text(value) for key, value in inner.values.items() if value is not None}

    def seconds(self, name: str) -> dict[str, float]:
        """An object of positive times; entries that are null are left out."""
        inner = self.object(name)
        for key, value in inner.values.items():
            if value is not None and (not _is_number(value) or value <= 0):
                raise inner.wrong(key, "a positive number of seconds", value)
        return {key: float(value) for key, value in inner.values.items() if value is not None}

    def wrong(self, name: str, expected: str, got: Any) -> RecordError:
        return RecordError(f"field `{self.at(name)}` must be {expected}; got {_shown(got)}")

    def _get(self, name: str, default: Any, expected: str) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise RecordError(f"field `{self.at(name)}` is missing; it must be {expected}")
        return default if value is None else value

    def _list(self, name: str, expected: str, fits: Any) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise self.wrong(name, f"a list of {expected}", value)
        for i, entry in enumerate(value):
            if not fits(entry):
                raise self.wrong(f"{name}[{i}]", f"one of a list of {expected}", entry)
        return list(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_number(entry) for entry in value)


def _as_text(value: Any) -> str:
    return ", ".join(f"{entry:.4g}" for entry in value) if isinstance(value, (list, tuple)) else str(value)


def _or_null(value: Any) -> bool:
    return value is None or _is_number(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
