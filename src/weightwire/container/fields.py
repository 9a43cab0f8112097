"""Typed fields out of a JSON object, or an error that says which one is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from weightwire.errors import MalformedHeader

T = TypeVar("T")

HEX_128 = re.compile(r"[0-9a-f]{32}")
HEX_256 = re.compile(r"[0-9a-f]{64}")
_ANY = re.compile(r"(?s).*")
_MAX_COUNT = (1 << 63) - 1


class Fields:
    """One JSON object from outside; every getter checks what it gives."""

    def __init__(self, value: object, where: str) -> None:
        """Wrap a parsed value.

        Raises:
            MalformedHeader: it is no JSON object.
        """
        if not isinstance(value, dict):
            raise MalformedHeader(f"{where}: {value!r:.80} is not an object; fetch it again")
        self._value: dict[str, object] = value
        self._where = where

    def wrong(self, name: str) -> MalformedHeader:
        """The error to raise for a field."""
        found = self._value.get(name)
        return MalformedHeader(
            f"{self._where}: field {name!r} is {found!r:.120}; fetch the file again"
        )

    def raw(self, name: str) -> object:
        """The field as it was parsed, or None."""
        return self._value.get(name)

    def text(self, name: str, pattern: re.Pattern[str] = _ANY) -> str:
        """A string that matches a pattern in full.

        Raises:
            MalformedHeader: it does not, or is missing.
        """
        value = self._value.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.wrong(name)
        return value

    def count(self, name: str, highest: int = _MAX_COUNT) -> int:
        """A whole number from 0 to ``highest``.

        Raises:
            MalformedHeader: it is not one.
        """
        value = self._value.get(name)
        if type(value) is not int or not 0 <= value <= highest:
            raise self.wrong(name)
        return value

    def optional_count(self, name: str) -> int | None:
        """A whole number, or None where there is no such field.

        Raises:
            MalformedHeader: it is something else.
        """
        return self.count(name) if name in self._value else None

    def number(self, name: str) -> float:
        """A finite number, whole or not.

        Raises:
            MalformedHeader: it is not one.
        """
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name)
        return float(value)

    def names(self, name: str, pattern: re.Pattern[str] = _ANY) -> dict[str, str]:
        """An object of strings.

        Raises:
            MalformedHeader: it is not one, or a string does not match.
        """
        value = self._value.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name)
        for text in value.values():
            if not isinstance(text, str) or not pattern.fullmatch(text):
                raise self.wrong(name)
        return value

    def items(self, name: str, parse: Callable[[Fields], T]) -> tuple[T, ...]:
        """A list of objects, each parsed.

        Raises:
            MalformedHeader: it is no list of objects.
        """
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self.wrong(name)
        return tuple(parse(Fields(each, f"{self._where}: {name}")) for each in value)

    def optional(self, name: str, parse: Callable[[Fields], T]) -> T | None:
        """An object, parsed, or None where the field is null.

        Raises:
            MalformedHeader: the field is neither.
        """
        if name not in self._value:
            raise self.wrong(name)
        value = self._value[name]
        return None if value is None else parse(Fields(value, f"{self._where}: {name}"))
