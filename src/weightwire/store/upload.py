"""A patch on its way up: buckets go out while the next ones are still being encoded."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future

from weightwire.codec.index import INDEX_FILE, PatchIndex, index_bytes
from weightwire.store.contract import ObjectStore
from weightwire.store.records import PatchRef, sha256

BUCKETS_IN_FLIGHT = 4
"""Finished buckets that may wait for the store: bounds memory, and makes the encoder wait."""


class UploadSink:
    """Implements ``BucketSink``: hands buckets to threads, a few at a time."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        executor: Executor,
        n_in_flight: int = BUCKETS_IN_FLIGHT,
    ) -> None:
        self._store, self._folder = store, folder
        self._executor, self._n_in_flight = executor, n_in_flight
        self._waiting: deque[Future[None]] = deque()

    def put(self, file: str, raw: bytes) -> None:
        """Send one bucket; waits while too many are under way.

        Raises:
            StoreUnavailable, StoreRefused: an earlier bucket could not be sent.
        """
        while len(self._waiting) >= self._n_in_flight:
            self._waiting.popleft().result()
        self._waiting.append(self._executor.submit(self._store.put, self._folder + file, raw))

    def finish(self, index: PatchIndex, base_version: int) -> PatchRef:
        """Wait for every bucket, send the index, and say where the patch is.

        Raises:
            StoreUnavailable, StoreRefused: something could not be sent.
        """
        self.drain()
        raw = index_bytes(index)
        self._store.put(self._folder + INDEX_FILE, raw)
        return PatchRef(
            folder=self._folder,
            base_version=base_version,
            base_digest=index.base_digest,
            codec=index.codec,
            n_changed=index.n_changed,
            n_buckets=len(index.buckets),
            n_bytes=index.n_bytes + len(raw),
            n_index_bytes=len(raw),
            index_sha256=sha256(raw),
        )

    def drain(self) -> None:
        """Wait for every bucket.

        Raises:
            StoreUnavailable, StoreRefused: one could not be sent.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        while self._waiting:
            self._waiting.popleft().exception()


class NoUpload:
    """Implements ``BucketSink``: counts, and keeps nothing."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def put(self, file: str, raw: bytes) -> None:
        """Count one bucket."""
        del file
        self.n_bytes += len(raw)
