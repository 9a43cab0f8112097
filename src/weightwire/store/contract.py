"""What Weightwire needs of an object store: five verbs, and what each may and may not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """One object as a listing shows it."""

    key: str
    n_bytes: int
    modified: float
    """Seconds since 1970, by the store's clock."""


class ObjectStore(Protocol):
    """Named bytes under one prefix; keys are relative to it and look like ``log/000.json``.

    A publisher ``put``s buckets under names nobody else draws, then ``create``s the record that
    makes a version exist. Readers ``list`` the log, ``read`` records and buckets, and trust
    nothing they did not check. A collector ``delete``s. Every method may be called from many
    threads, and every one may raise ``StoreUnavailable``, after which a write may or may not
    have happened, or may still happen.
    """

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object, whole or not at all, in parts if it is large or an iterable.

        Raises:
            StoreUnavailable: no answer, or one that says "later".
            StoreRefused: the store will not, ever: no permission, no bucket, no space.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none of this name: True for exactly one caller, ever.

        Raises:
            StoreUnavailable, StoreRefused: as ``put``.
        """

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or those from ``start`` to ``stop``; short if it ends before.

        Raises:
            ObjectMissing: there is no such object.
            StoreUnavailable, StoreRefused: as ``put``.
        """

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with ``prefix`` and sort after ``after``, in key order.

        Raises:
            StoreUnavailable, StoreRefused: as ``put``.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are passed over.

        Raises:
            StoreUnavailable, StoreRefused: as ``put``.
        """
