"""What the store contract's tests are written with; plain Python, so that no pytest is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from weightwire.store.contract import ObjectStore

MIB = 1 << 20


class SourceFailed(Exception):
    """Raised by an iterable in the middle of a put."""


class MemoryWatch:
    """How much more memory the process has while pieces are being taken; Linux only."""

    def __init__(self) -> None:
        self.n_most = 0

    def watched(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The same pieces; memory is looked at after each."""
        n_before = resident_bytes()
        for piece in pieces:
            yield piece
            self.n_most = max(self.n_most, resident_bytes() - n_before)


def resident_bytes() -> int:
    """Memory of this process; zero where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def pieces_of(n_mib: int) -> Iterator[bytes]:
    """Pieces of one MiB, each of one byte value."""
    return (bytes([each % 251]) * MIB for each in range(n_mib))


def range_of_pieces(start: int, stop: int) -> bytes:
    """What those pieces have there."""
    return bytes((at // MIB) % 251 for at in range(start, stop))


def failing_pieces(n_good: int, error: BaseException | None = None) -> Iterator[bytes]:
    """Some pieces, then an error."""
    yield from pieces_of(n_good)
    raise error or SourceFailed


def keys_of(store: ObjectStore, prefix: str = "", after: str = "") -> list[str]:
    """The keys of a listing, in its order."""
    return [info.key for info in store.list(prefix, after)]


def sizes_of(store: ObjectStore) -> dict[str, int]:
    """The size of every object, as a listing tells it."""
    return {info.key: info.n_bytes for info in store.list("")}


def same(found: object, expected: object) -> None:
    """Like ``assert ==``, but also under ``python -O`` and without pytest's rewriting.

    Raises:
        AssertionError: they differ.
    """
    if found != expected:
        raise AssertionError(f"{found!r:.500} is not {expected!r:.500}")


def raises(kind: type[BaseException], call: Callable[[], object]) -> None:
    """Make a call that must fail in this way.

    Raises:
        AssertionError: it does not fail.
    """
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")
