"""An object store in this process's memory: small, exact, fast enough for simulated worlds."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

from weightwire.clock import Clock, SystemClock
from weightwire.errors import ObjectMissing
from weightwire.store.contract import ObjectInfo
from weightwire.store.keys import check_key


class MemoryStore:
    """A dictionary that keeps the contract to the letter; objects die with the process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._keys: list[str] = []

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._keys)} objects)"

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Keep a copy under this name; nothing is kept if an iterable raises.

        Raises:
            StoreRefused: a key no store takes.
        """
        whole = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else b"".join(data)
        with self._lock:
            self._keep(check_key(key), whole)

    def create(self, key: str, data: bytes) -> bool:
        """Keep a copy if there is no object of this name.

        Raises:
            StoreRefused: a key no store takes.
        """
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._keep(key, bytes(data))
            return True

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or a range of them.

        Raises:
            ObjectMissing: there is no such object.
            StoreRefused: a key no store takes.
        """
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectMissing(
                f"memory: {key}: no such object; it was collected, or never written"
            )
        return found[0][start:stop]

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects as they are when the first is asked for, in key order."""
        with self._lock:
            first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
            found = []
            for at in range(first, len(self._keys)):
                key = self._keys[at]
                if not key.startswith(prefix):
                    break
                data, modified = self._objects[key]
                found.append(ObjectInfo(key, len(data), modified))
        yield from found

    def delete(self, keys: Iterable[str]) -> None:
        """Forget objects.

        Raises:
            StoreRefused: a key no store takes.
        """
        doomed = [check_key(key) for key in keys]
        with self._lock:
            for key in doomed:
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def _keep(self, key: str, data: bytes) -> None:
        """Put an object in its place; the lock is held."""
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = (data, self._clock.now())
