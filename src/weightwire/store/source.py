"""The bytes of a put, as pieces, with a memory of whose fault a failure was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Source:
    """Iterates over the pieces of an object and remembers what the caller's iterable raised.

    A store maps the errors of its own machinery; an error of the caller's iterable passes through
    unchanged. Both can be an ``OSError``, so they are told apart by identity.
    """

    def __init__(self, data: bytes | Iterable[bytes]) -> None:
        is_whole = isinstance(data, (bytes, bytearray, memoryview))
        self._pieces: Iterable[Any] = [data] if is_whole else data
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._pieces
        except BaseException as error:
            self.failure = error
            raise
