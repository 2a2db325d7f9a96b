"""Checked reading of config.json: each field has a type and a range, each error names it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cpumoe._core import Error

# Above any published model by a factor of ten or more; keeps every product of sizes below 2^63.
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_POSITIONS = 1 << 27

_ABSENT: Any = object()


class Config:
    """A JSON object whose fields are read with a type and a range.

    A field that is absent or null takes the default; without a default it is required.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, name: str, must: str, hint: str = "") -> Error:
        """The error of field `name`, to be raised."""
        got = f"got {self.values[name]!r:.100}" if name in self.values else "it is missing"
        return Error(f"{self.where}: {name} must be {must}; {got}" + (f". {hint}" if hint else ""))

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def _get(self, name: str, default: Any, must: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _ABSENT:
                raise self.fail(name, must)
            return default
        return value

    def integer(self, name: str, low: int, high: int, default: Any = _ABSENT) -> int:
        """An integer in [low, high]."""
        must = f"an integer from {low} to {high}"
        value = self._get(name, default, must)
        if self.has(name) and (type(value) is not int or not low <= value <= high):
            raise self.fail(name, must)
        return int(value)

    def number(
        self, name: str, low: float, high: float = math.inf, default: Any = _ABSENT
    ) -> float:
        """A finite number above `low` and at most `high`."""
        must = f"a finite number above {low:g}" + (f", at most {high:g}" if high < math.inf else "")
        value = self._get(name, default, must)
        good = type(value) in (int, float) and abs(value) <= 1e300
        if not good or not low < value <= high or not math.isfinite(value):
            raise self.fail(name, must)
        return float(value)

    def flag(self, name: str, default: Any = _ABSENT) -> bool:
        """true or false."""
        value = self._get(name, default, "true or false")
        if type(value) is not bool:
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: Any = _ABSENT) -> str:
        """A string."""
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def choice(self, name: str, of: Sequence[str], default: Any = _ABSENT) -> str:
        """One of the strings in `of`."""
        value = self.text(name, default)
        if value not in of:
            raise self.fail(name, f"one of {', '.join(of)}")
        return value

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high]; empty when absent."""
        value = self._get(name, [], "")
        if not isinstance(value, list) or not all(
            type(v) is int and low <= v <= high for v in value
        ):
            raise self.fail(name, f"a list of integers from {low} to {high}")
        return tuple(value)

    def object(self, name: str) -> Config | None:
        """A nested object, or None when absent."""
        value = self._get(name, None, "")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return Config(value, f"{self.where}: {name}")
