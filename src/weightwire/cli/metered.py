"""Bytes counted on their way, for a command's progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from weightwire.diff.state import StateReader
from weightwire.model import Bits, TensorSpec
from weightwire.store import layout
from weightwire.store.contract import ObjectInfo, ObjectStore

Progress = Callable[[int], None]
Stage = Callable[[str, int], Progress]


class MeteredState:
    """Implements ``StateReader``: passes reads on and tells how many bytes went by."""

    def __init__(self, state: StateReader, progress: Progress) -> None:
        self._state, self._progress = state, progress

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name."""
        return self._state.specs

    @property
    def ties(self) -> Mapping[str, str]:
        """Names that share another tensor's storage."""
        return self._state.ties

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Bits, counted."""
        bits = self._state.read(name, start, stop)
        self._progress(bits.nbytes)
        return bits


class MeteredStore:
    """Implements ``ObjectStore``: anchors on their way up or down show as stages of their own.

    Patches do not: they go out while the state is being read, whose progress is theirs.
    """

    def __init__(self, store: ObjectStore, stage: Stage, n_state_bytes: int) -> None:
        self._store, self._stage, self._n_state_bytes = store, stage, n_state_bytes
        self._stages: dict[str, Progress] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return repr(self._store)

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object; only shards of anchors come in pieces.

        Raises:
            StoreUnavailable, StoreRefused: from the store.
        """
        if isinstance(data, (bytes, bytearray, memoryview)):
            self._store.put(key, data)
        else:
            self._store.put(key, _Counted(data, self._told("upload")))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read an object; chunks of anchors are what takes long.

        Raises:
            ObjectMissing, StoreUnavailable, StoreRefused: from the store.
        """
        data = self._store.read(key, start, stop)
        if key.startswith(layout.ANCHORS) and not key.endswith(layout.ANCHOR_MANIFEST):
            self._told("restore")(len(data))
        return data

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none of this name."""
        return self._store.create(key, data)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects in key order."""
        return self._store.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        self._store.delete(keys)

    def _told(self, name: str) -> Progress:
        """The stage of this name, begun when its first byte comes."""
        with self._lock:
            if name not in self._stages:
                self._stages[name] = self._stage(name, self._n_state_bytes)
            return self._stages[name]


class _Counted:
    """The same pieces, as often as they are asked for: a failed upload starts over."""

    def __init__(self, pieces: Iterable[bytes], progress: Progress) -> None:
        self._pieces, self._progress = pieces, progress

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._progress(len(piece))
            yield piece
