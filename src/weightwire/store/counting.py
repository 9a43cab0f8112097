"""What a store was asked, and how many bytes went each way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weightwire.store.contract import ObjectInfo, ObjectStore


@dataclass(frozen=True)
class StoreCounts:
    """Calls by verb, failed ones among them, and bytes of objects, up and down."""

    n_put: int = 0
    n_create: int = 0
    n_read: int = 0
    n_list: int = 0
    n_delete: int = 0
    n_bytes_up: int = 0
    n_bytes_down: int = 0


class CountingStore:
    """Passes everything on and counts it. Put it under a ``RetryingStore`` to count attempts."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counts = StoreCounts()

    def __repr__(self) -> str:
        return f"CountingStore({self._store!r})"

    def snapshot(self) -> StoreCounts:
        """The counts at this moment."""
        return self._counts

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Count, and put; the pieces of an iterable are counted as the store takes them.

        Raises:
            StoreUnavailable, StoreRefused: from the store.
        """
        self._count(n_put=1)
        if isinstance(data, (bytes, bytearray, memoryview)):
            self._count(n_bytes_up=len(data))
            self._store.put(key, data)
        else:
            self._store.put(key, self._counted(data))

    def create(self, key: str, data: bytes) -> bool:
        """Count, and create.

        Raises:
            StoreUnavailable, StoreRefused: from the store.
        """
        self._count(n_create=1, n_bytes_up=len(data))
        return self._store.create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Count, and read.

        Raises:
            ObjectMissing, StoreUnavailable, StoreRefused: from the store.
        """
        self._count(n_read=1)
        data = self._store.read(key, start, stop)
        self._count(n_bytes_down=len(data))
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Count, and list.

        Raises:
            StoreUnavailable, StoreRefused: from the store.
        """
        self._count(n_list=1)
        return self._store.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """Count, and delete.

        Raises:
            StoreUnavailable, StoreRefused: from the store.
        """
        self._count(n_delete=1)
        self._store.delete(keys)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The same pieces, each counted when it is taken."""
        for piece in pieces:
            self._count(n_bytes_up=len(piece))
            yield piece

    def _count(self, **more: int) -> None:
        """Add to the counts, all at once."""
        with self._lock:
            sums = {name: getattr(self._counts, name) + n for name, n in more.items()}
            self._counts = replace(self._counts, **sums)
