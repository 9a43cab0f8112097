"""A patch: an index and its buckets, in memory or in a folder, read one bucket at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from weightwire import limits
from weightwire.codec.bucket import parse_bucket
from weightwire.codec.index import INDEX_FILE, BucketEntry, PatchIndex, index_bytes, parse_index
from weightwire.codec.record import KIND_OF_CODEC, Kind, Record, RecordHead
from weightwire.container import read_bytes
from weightwire.durable import sync_folder
from weightwire.errors import (
    HashMismatch,
    LimitExceeded,
    MalformedRecord,
    NotAPatch,
    OutputExists,
    TruncatedFile,
)


class BucketSource(Protocol):
    """Where a patch's buckets come from; the reader checks every byte it gets.

    Except from a source that ``is_checked``: it has compared every bucket with the index itself.
    """

    def fetch(self, file: str, n_bytes: int) -> bytes:
        """The bytes of one bucket, expected to be so many."""


class MemoryBuckets:
    """Buckets kept in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def fetch(self, file: str, n_bytes: int) -> bytes:
        """The bucket's bytes.

        Raises:
            TruncatedFile: there is no such bucket.
        """
        del n_bytes
        if file not in self._files:
            raise TruncatedFile(f"{file}: the index names it, it is not there; fetch it again")
        return self._files[file]


class FolderBuckets:
    """Buckets in a folder, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fetch(self, file: str, n_bytes: int) -> bytes:
        """The bucket's bytes.

        Raises:
            TruncatedFile: the file is missing or has another length than the index says.
        """
        try:
            # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._folder / file, flags)
        except OSError as error:
            raise TruncatedFile(
                f"{self._folder / file}: {error.strerror}; fetch it again"
            ) from None
        try:
            found = os.fstat(descriptor)
            n_found = found.st_size
            if not stat.S_ISREG(found.st_mode):
                raise TruncatedFile(f"{self._folder / file}: not a regular file; fetch it again")
            if n_found != n_bytes:
                raise TruncatedFile(
                    f"{self._folder / file}: {n_found} bytes, the index says {n_bytes}; fetch it again"
                )
            return read_bytes(descriptor, n_bytes, 0, str(self._folder / file))
        finally:
            os.close(descriptor)


class Patch:
    """The lossless difference between two states."""

    def __init__(self, index: PatchIndex, source: BucketSource, where: str = "patch") -> None:
        self.index = index
        self._source = source
        self._where = where
        self._kept: tuple[int, dict[str, Record]] = (-1, {})
        self._heads: Mapping[str, tuple[tuple[int, RecordHead], ...]] | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Patch:
        """Open a patch folder; buckets are read and checked as they are needed.

        Raises:
            NotAPatch: no patch index at this path.
            MalformedHeader, UnsupportedVersion: an index that does not parse, or is too new.
        """
        folder = Path(path)
        index_path = folder / INDEX_FILE
        if not index_path.is_file():
            raise NotAPatch(
                f"{folder}: no {INDEX_FILE} in it; a patch is a folder made by `diff -o`"
            )
        if index_path.stat().st_size > limits.MAX_INDEX_BYTES:
            raise LimitExceeded(f"{index_path}: larger than {limits.MAX_INDEX_BYTES} bytes")
        index = parse_index(index_path.read_bytes(), str(index_path))
        return cls(index, FolderBuckets(folder), str(folder))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patch as a folder that appears whole or not at all.

        Raises:
            OutputExists: there is something at this path already.
        """
        with PatchFolder(Path(path)) as folder:
            for entry in self.index.buckets:
                folder.put(entry.file, self._checked(entry))
            folder.commit(self.index)

    def records(self) -> Iterator[Record]:
        """Every record, bucket by bucket; only one bucket is in memory at a time.

        Raises:
            HashMismatch, TruncatedFile: a bucket is not the one the index names.
            MalformedHeader, MalformedRecord: a bucket that lies.
        """
        for entry in self.index.buckets:
            yield from parse_bucket(self._checked(entry), f"{self._where}/{entry.file}")

    def record(self, bucket: int, key: str) -> Record:
        """One record by its bucket's number and its key.

        Raises:
            the same as ``records``, and MalformedRecord when there is no such record.
        """
        if self._kept[0] != bucket:
            entry = self.index.buckets[bucket]
            found = parse_bucket(self._checked(entry), f"{self._where}/{entry.file}")
            # The last bucket stays: its records are asked for one after another.
            self._kept = (bucket, {record.head.key: record for record in found})
        if key not in self._kept[1]:
            raise MalformedRecord(f"{self._where}: no record {key!r:.200}; fetch the patch again")
        return self._kept[1][key]

    def walk(self) -> Iterator[Record]:
        """Every record once, in order; at its end the heads are checked and known.

        A receiver that streams a patch from far away must not fetch a bucket twice.

        Raises:
            the same as ``records``, and MalformedRecord at the end as ``heads``.
        """
        pieces: dict[str, list[tuple[int, RecordHead]]] = {}
        for number, entry in enumerate(self.index.buckets):
            for record in parse_bucket(self._checked(entry), f"{self._where}/{entry.file}"):
                pieces.setdefault(record.head.spec.name, []).append((number, record.head))
                yield record
        for name, found in pieces.items():
            _check_pieces(name, found)
        self._check_index(pieces)
        self._heads = {name: tuple(found) for name, found in pieces.items()}

    @property
    def heads(self) -> Mapping[str, tuple[tuple[int, RecordHead], ...]]:
        """For every tensor with records: bucket number and head of its pieces, in order.

        Raises:
            MalformedRecord: pieces that overlap, leave gaps or disagree about their tensor.
        """
        if self._heads is None:
            for _ in self.walk():
                pass
        return self._heads or {}

    @property
    def n_elements(self) -> int:
        """Elements in the target state."""
        return self.index.n_elements

    @property
    def n_changed(self) -> int:
        """Elements whose bits differ, new tensors included."""
        return self.index.n_changed

    @property
    def n_bytes(self) -> int:
        """Size of all files: buckets and index."""
        return self.index.n_bytes + len(index_bytes(self.index))

    @property
    def codec(self) -> str:
        """``compact`` or ``plain``."""
        return self.index.codec

    @property
    def base_digest(self) -> str:
        """Digest of the state this patch applies to."""
        return self.index.base_digest

    @property
    def target_digest(self) -> str:
        """Digest of the state it gives."""
        return self.index.target_digest

    def __repr__(self) -> str:
        return (
            f"Patch({self.codec}, {self.n_changed:,} of {self.n_elements:,} elements,"
            f" {self.n_bytes:,} bytes, {self.base_digest[:8]} → {self.target_digest[:8]})"
        )

    def _checked(self, entry: BucketEntry) -> bytes:
        raw = self._source.fetch(entry.file, entry.n_bytes)
        if getattr(self._source, "is_checked", False):
            return raw
        found = hashlib.sha256(raw).hexdigest()
        if len(raw) != entry.n_bytes or found != entry.sha256:
            raise HashMismatch(
                f"{self._where}/{entry.file}: SHA-256 {found[:16]}…, the index says"
                f" {entry.sha256[:16]}…; fetch this bucket again"
            )
        return raw

    def _check_index(self, pieces: Mapping[str, list[tuple[int, RecordHead]]]) -> None:
        heads = [head for found in pieces.values() for _, head in found]
        if sum(head.n_changed for head in heads) != self.index.n_changed:
            raise MalformedRecord(f"{self._where}: records and index disagree on the changes")
        names = {*pieces, *self.index.unchanged}
        if len(names) != len(pieces) + len(self.index.unchanged):
            raise MalformedRecord(f"{self._where}: a tensor is both changed and unchanged")
        removed, tied = {*self.index.removed}, {*self.index.tied}
        if names & removed or names & tied or removed & tied:
            raise MalformedRecord(f"{self._where}: a tensor is both there and removed or tied")
        if len(names) != self.index.n_tensors:
            raise MalformedRecord(f"{self._where}: records and index disagree on the tensors")
        if any(head.kind not in (Kind.FULL, KIND_OF_CODEC[self.codec]) for head in heads):
            raise MalformedRecord(f"{self._where}: a record is not coded as the index says")
        if not {*self.index.tied.values()} <= names:
            raise MalformedRecord(f"{self._where}: a tensor is tied to one that is not there")


def _check_pieces(name: str, found: list[tuple[int, RecordHead]]) -> None:
    expected, first = 0, found[0][1]
    for _, head in found:
        same = (head.spec, head.base_shape, head.kind) == (first.spec, first.base_shape, first.kind)
        if head.start != expected or not same:
            raise MalformedRecord(
                f"tensor {name!r:.200}: its pieces do not fit; fetch the patch again"
            )
        expected = head.stop
    if expected != first.spec.n_elements:
        raise MalformedRecord(f"tensor {name!r:.200}: its last pieces are missing")


class PatchFolder:
    """A patch folder in the making: under another name until ``commit``, gone if that never comes."""

    def __init__(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            raise OutputExists(f"{path} exists already; remove it or choose another name")
        self._path = path

    def __enter__(self) -> PatchFolder:
        parent = self._path.resolve().parent
        self._building = Path(tempfile.mkdtemp(prefix=f".{self._path.name}.", dir=parent))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._building, ignore_errors=True)

    def put(self, file: str, raw: bytes) -> None:
        """Write one file and see it on disk."""
        descriptor = os.open(self._building / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())

    def commit(self, index: PatchIndex) -> None:
        """Write the index and give the folder its name: the moment the patch exists."""
        self.put(INDEX_FILE, index_bytes(index))
        self._building.chmod(0o755)
        sync_folder(self._building)
        # rename() would replace an empty folder that appeared meanwhile, and nothing else.
        self._building.rename(self._path)
        sync_folder(self._path.resolve().parent)
