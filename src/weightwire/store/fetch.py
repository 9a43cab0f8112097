"""A plan's data on its way down: checked, fetched again if damaged, kept on disk if wanted."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from weightwire.clock import Clock, SystemClock
from weightwire.codec.index import INDEX_FILE, BucketEntry, PatchIndex, parse_index
from weightwire.codec.patch import Patch
from weightwire.durable import typed_disk_errors, write_at
from weightwire.errors import BaseMismatch, HashMismatch, RetryError
from weightwire.store import layout
from weightwire.store.anchor import AnchorFile, Manifest, parse_manifest
from weightwire.store.cache import Cache
from weightwire.store.contract import ObjectStore
from weightwire.store.plan import Step
from weightwire.store.records import AnchorRef, PatchRef, sha256
from weightwire.workers import InlineExecutor

log = logging.getLogger("weightwire.store")

_N_TRIES = 3
_N_FOLDER_RACES = 16
"""How often others that share a cache may finish or remove what we fetch before we give up."""
_MOVED = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
"""What the system says of a folder that is gone, or has its final name already."""
_N_AHEAD = 4
"""Buckets or chunks fetched ahead of their use: bounds memory."""


class Fetcher:
    """Gets patches and anchors from the cache or the store; counts what it downloads."""

    def __init__(
        self,
        store: ObjectStore,
        cache: Cache,
        executor: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._cache = store, cache
        self._executor = executor or InlineExecutor()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self.n_bytes = 0
        """Downloaded so far."""
        self.wait_s = 0.0
        """Spent waiting for the store, by whoever asked."""

    def patch(self, step: Step) -> Patch:
        """A patch whose buckets are fetched as they are read.

        Raises:
            ObjectMissing: it was collected.
            HashMismatch, RetryError: it stays damaged.
            BaseMismatch: it is not the patch its record describes.
        """
        ref = _patch_of(step)
        kept = self._cache.load_patch(ref)
        if kept is not None:
            return kept
        raw = self._checked(ref.folder + INDEX_FILE, 0, ref.n_index_bytes, ref.index_sha256)
        index = parse_index(raw, ref.folder + INDEX_FILE)
        _check_index(index, ref, step)
        buckets = _Buckets(self._fetch_bucket, ref.folder, index, self._executor, self._timed)
        return Patch(index, buckets, ref.folder.rstrip("/"))

    def keep(self, step: Step, patch: Patch) -> None:
        """Write a patch that was read to its end to the cache, if there is one."""
        self._cache.finish_patch(_patch_of(step), patch.index)

    def anchor(
        self, step: Step, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[Path, Manifest]:
        """A folder with an anchor's files, on the local disk; what was there already is not fetched.

        Raises:
            ObjectMissing: it was collected.
            HashMismatch, RetryError: it stays damaged.
            DiskTrouble: there is no room for it here.
        """
        ref = step.anchor
        if ref is None:
            raise ValueError(f"version {step.version} is not reached by an anchor")
        manifest = self._manifest(ref)
        if manifest.digest != step.digest:
            raise BaseMismatch(f"{ref.folder}: an anchor of {manifest.digest}, not {step.digest}")
        with typed_disk_errors(Path(ref.folder)):
            return self._keep_anchor(ref, manifest, progress), manifest

    def _keep_anchor(
        self, ref: AnchorRef, manifest: Manifest, progress: Callable[[int], None]
    ) -> Path:
        """Bring an anchor to the disk; begin again if others that share the cache move its folder.

        Raises:
            OSError: the disk's own errors.
        """
        for _ in range(_N_FOLDER_RACES):
            try:
                return self._fetch_files(ref, manifest, progress)
            except OSError as error:
                if error.errno not in _MOVED:
                    raise
                log.info("%s: moved by another receiver; beginning again: %s", ref.folder, error)
        return self._fetch_files(ref, manifest, progress)

    def _fetch_files(
        self, ref: AnchorRef, manifest: Manifest, progress: Callable[[int], None]
    ) -> Path:
        folder = self._cache.begin_anchor(ref)
        for file in manifest.files:
            self._fetch_file(ref, file, folder / file.name, progress)
        return self._cache.finish_anchor(ref)

    def _timed(self, work: Callable[[], bytes]) -> bytes:
        began = self._clock.monotonic()
        try:
            return work()
        finally:
            self.wait_s += self._clock.monotonic() - began

    def _manifest(self, ref: AnchorRef) -> Manifest:
        raw = self._checked(
            ref.folder + layout.ANCHOR_MANIFEST, 0, ref.n_manifest_bytes, ref.manifest_sha256
        )
        return parse_manifest(raw, ref)

    def _fetch_file(
        self, ref: AnchorRef, file: AnchorFile, path: Path, progress: Callable[[int], None]
    ) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, file.n_bytes)
            waiting: list[Future[int]] = []
            for number in range(len(file.chunks)):
                waiting.append(
                    self._executor.submit(self._fetch_chunk, ref, file, number, descriptor)
                )
                if len(waiting) >= _N_AHEAD:
                    progress(waiting.pop(0).result())
            for future in waiting:
                progress(future.result())
        finally:
            os.close(descriptor)

    def _fetch_chunk(self, ref: AnchorRef, file: AnchorFile, number: int, descriptor: int) -> int:
        start, stop = file.chunk_range(number)
        if sha256(os.pread(descriptor, stop - start, start)) == file.chunks[number]:
            return stop - start
        data = self._checked(ref.folder + file.name, start, stop - start, file.chunks[number])
        write_at(descriptor, memoryview(data), start)
        return len(data)

    def _fetch_bucket(self, folder: str, entry: BucketEntry) -> bytes:
        raw = self._checked(folder + entry.file, 0, entry.n_bytes, entry.sha256)
        self._cache.add_bucket(folder, entry, raw)
        return raw

    def _checked(self, key: str, start: int, n_bytes: int, wanted: str) -> bytes:
        """Bytes that are what a record says, fetched again a few times if they are not."""
        for _ in range(_N_TRIES):
            raw = self._store.read(key, start, start + n_bytes)
            with self._lock:
                self.n_bytes += len(raw)
            if len(raw) == n_bytes and sha256(raw) == wanted:
                return raw
            log.warning("%s: damaged on the way, or in the store; fetching it again", key)
        raise HashMismatch(
            f"{key}: {n_bytes} bytes from {start} are not what their record says, {_N_TRIES} times"
        )


class _Buckets:
    """Implements ``BucketSource``: fetches a few buckets ahead of the one asked for."""

    is_checked = True
    """By the threads that fetch them, which fetch what is damaged again."""

    def __init__(
        self,
        fetch: Callable[[str, BucketEntry], bytes],
        folder: str,
        index: PatchIndex,
        executor: Executor,
        timed: Callable[[Callable[[], bytes]], bytes],
    ) -> None:
        self._fetch, self._folder, self._executor = fetch, folder, executor
        self._timed = timed
        self._entries = index.buckets
        self._number = {entry.file: n for n, entry in enumerate(index.buckets)}
        self._ahead: dict[int, Future[bytes]] = {}
        self._is_inline = isinstance(executor, InlineExecutor)

    def fetch(self, file: str, n_bytes: int) -> bytes:
        del n_bytes
        number = self._number[file]
        last = number + 1 if self._is_inline else number + 1 + _N_AHEAD
        return self._timed(lambda: self._wait_for(number, min(last, len(self._entries))))

    def _wait_for(self, number: int, last: int) -> bytes:
        for n in range(number, last):
            if n not in self._ahead:
                self._ahead[n] = self._executor.submit(self._fetch, self._folder, self._entries[n])
        return self._ahead.pop(number).result()


def _patch_of(step: Step) -> PatchRef:
    if step.patch is None:
        raise ValueError(f"version {step.version} is not reached by a patch")
    return step.patch


def _check_index(index: PatchIndex, ref: PatchRef, step: Step) -> None:
    """The record is what was signed, so the index must agree with it."""
    if (index.base_digest, index.target_digest) != (ref.base_digest, step.digest):
        raise BaseMismatch(
            f"{ref.folder}: leads from {index.base_digest} to {index.target_digest}, its record says"
            f" {ref.base_digest} to {step.digest}"
        )
    n_bytes = index.n_bytes + ref.n_index_bytes
    if n_bytes != ref.n_bytes or len(index.buckets) != ref.n_buckets:
        raise RetryError(f"{ref.folder}: its record and its index disagree about its size")
