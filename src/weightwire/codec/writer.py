"""Records in, buckets out: a patch is written as it is made, a few buckets in memory at a time."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from weightwire import limits
from weightwire.codec.bucket import bucket_bytes
from weightwire.codec.index import BucketEntry, PatchIndex
from weightwire.codec.record import Record
from weightwire.errors import LimitExceeded
from weightwire.workers import InlineExecutor, threads

_MAX_SEALERS = 4
"""Threads that join and hash: a device codes far faster than one of them does that."""

_Sealed = tuple[bytes, str]
"""A bucket's bytes, and their SHA-256."""


class BucketSink(Protocol):
    """Takes finished buckets as they come: a folder, memory, later an upload."""

    def put(self, file: str, raw: bytes) -> None:
        """Keep one bucket."""


class PatchWriter:
    """Fills buckets with records and hands each to the sink when it is full.

    Buckets are made by threads of their own, and reach the sink in order, from the caller's.
    """

    def __init__(
        self,
        sink: BucketSink,
        codec: str,
        n_bucket_bytes: int = limits.BUCKET_BYTES,
        first_bucket: int = 0,
        n_threads: int = 1,
    ) -> None:
        """Write to ``sink``; writers that share a patch number their buckets from different places."""
        self._n_sealers = min(n_threads, _MAX_SEALERS)
        self._sealers: Executor | None = None
        self._sealing: deque[Future[_Sealed]] = deque()
        self._sink, self._first_bucket = sink, first_bucket
        self._codec = codec
        self._n_bucket_bytes = n_bucket_bytes
        self._records: list[Record] = []
        self._keys: set[str] = set()
        self._n_pending = 0
        self._entries: list[BucketEntry] = []
        self._n_changed = 0

    def add(self, record: Record) -> None:
        """Append one record; may close a bucket."""
        if record.head.key in self._keys:
            # A tensor may be called like another one's later piece; they then go to two buckets.
            self._close_bucket()
        self._keys.add(record.head.key)
        self._records.append(record)
        self._n_changed += record.head.n_changed
        self._n_pending += len(record.body)
        if self._n_pending >= self._n_bucket_bytes:
            self._close_bucket()

    def close(self) -> tuple[BucketEntry, ...]:
        """Close the last bucket and name all of them, in order."""
        if self._records:
            self._close_bucket(is_last=True)
        while self._sealing:
            self._put_first()
        if self._sealers is not None:
            self._sealers.shutdown()
        return tuple(self._entries)

    def finish(
        self,
        *,
        base_digest: str,
        target_digest: str,
        n_tensors: int,
        n_elements: int,
        unchanged: Mapping[str, str],
        removed: Sequence[str],
        tied: Mapping[str, str],
    ) -> PatchIndex:
        """Close the last bucket and describe the whole patch."""
        return PatchIndex(
            codec=self._codec,
            base_digest=base_digest,
            target_digest=target_digest,
            n_tensors=n_tensors,
            n_elements=n_elements,
            n_changed=self._n_changed,
            buckets=self.close(),
            unchanged=unchanged,
            removed=tuple(removed),
            tied=tied,
        )

    def _close_bucket(self, *, is_last: bool = False) -> None:
        if len(self._entries) + len(self._sealing) >= limits.MAX_BUCKETS:
            raise LimitExceeded(f"more than {limits.MAX_BUCKETS} buckets; raise the bucket size")
        if self._sealers is None:
            # For the only bucket there is, a thread would cost more than it saves.
            is_alone = is_last or self._n_sealers == 1
            self._sealers = InlineExecutor() if is_alone else threads(self._n_sealers, "seal")
        self._sealing.append(self._sealers.submit(_sealed, self._records, self._codec))
        self._records, self._n_pending = [], 0
        self._keys.clear()
        while len(self._sealing) > (self._n_sealers if self._n_sealers > 1 else 0):
            self._put_first()

    def _put_first(self) -> None:
        raw, sha256 = self._sealing.popleft().result()
        file = f"bucket-{self._first_bucket + len(self._entries):05d}.safetensors"
        self._sink.put(file, raw)
        self._entries.append(BucketEntry(file, len(raw), sha256))


def _sealed(records: Sequence[Record], codec: str) -> _Sealed:
    raw = bucket_bytes(records, codec)
    return raw, hashlib.sha256(raw).hexdigest()


class MemorySink:
    """Keeps buckets in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, file: str, raw: bytes) -> None:
        """Keep one bucket."""
        self.files[file] = raw
