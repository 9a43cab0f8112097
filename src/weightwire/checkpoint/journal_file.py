"""The redo journal: which elements get which bits, so that a dead apply can be finished.

    magic: 8 bytes | n_bytes_proof: u32 | proof
    record, any number of times:
        kind = 1: u8 | dtype code: u8 | bytes per position: u16 | n_bytes_name: u32 | n_changes: u64
        name | positions, rising | bits
    kind = 0 and 15 zero bytes | SHA-256 of everything before it

It holds new bits, not differences, so that replaying it twice equals replaying it once.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire import limits
from weightwire.checkpoint.disk import Disk
from weightwire.container import read_bytes, read_into
from weightwire.errors import HashMismatch, LimitExceeded, MalformedRecord, TruncatedFile
from weightwire.model import Changes, DType, TensorSpec, dtype_coded

RECORD_CHANGES = 1 << 20
"""Most changes in one record: writer and reader hold one record at a time."""

_MAGIC = b"WWJRNL01"
_PREFIX = struct.Struct("<8sI")
_RECORD = struct.Struct("<BBHIQ")
_KIND_END, _KIND_CHANGES = 0, 1
_DIGEST_BYTES = 32
_HASH_BLOCK_BYTES = 1 << 20
_REBUILD = "the checkpoint may be half written: rebuild it, then delete the journal"


@dataclass(frozen=True)
class Record:
    """The changes of a stretch of one tensor."""

    name: str
    dtype: DType
    changes: Changes


class JournalWriter:
    """Appends records to a new journal; memory stays at one record."""

    def __init__(self, disk: Disk, file_descriptor: int, proof: str) -> None:
        """Start the journal.

        Raises:
            LimitExceeded: the proof is longer than ``limits.MAX_NAME_BYTES``.
        """
        self._disk = disk
        self._file_descriptor = file_descriptor
        self._n_bytes = 0
        self._sha256 = hashlib.sha256()
        text = proof.encode()
        if len(text) > limits.MAX_NAME_BYTES:
            raise LimitExceeded(f"proof of {len(text)} bytes; cap {limits.MAX_NAME_BYTES}")
        self._append(_PREFIX.pack(_MAGIC, len(text)) + text)

    def add(self, spec: TensorSpec, changes: Changes) -> None:
        """Append one tensor's changes, as many records as it takes.

        Raises:
            MalformedRecord: they do not fit the tensor.
        """
        check_changes(spec, changes)
        for start in range(0, len(changes), RECORD_CHANGES):
            part = slice(start, start + RECORD_CHANGES)
            self._add_record(spec, changes.positions[part], changes.bits[part])

    def finish(self) -> None:
        """Append the end mark and the hash."""
        self._append(_RECORD.pack(_KIND_END, 0, 0, 0, 0))
        self._append(self._sha256.digest())

    def _add_record(
        self,
        spec: TensorSpec,
        positions: npt.NDArray[np.unsignedinteger],
        bits: npt.NDArray[np.unsignedinteger],
    ) -> None:
        n_bytes_position = 4 if spec.n_elements <= 1 << 32 else 8
        name = spec.name.encode()
        fixed = (_KIND_CHANGES, spec.dtype.code, n_bytes_position, len(name), len(positions))
        self._append(_RECORD.pack(*fixed) + name)
        self._append(_flat_bytes(positions, np.dtype(f"<u{n_bytes_position}")))
        self._append(_flat_bytes(bits, spec.dtype.bits_dtype))

    def _append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._disk.pwrite(self._file_descriptor, view, self._n_bytes)
        self._sha256.update(view)
        self._n_bytes += view.nbytes


class JournalReader:
    """Reads what ``JournalWriter`` wrote, field by field, in the same order."""

    def __init__(self, file_descriptor: int, where: str) -> None:
        """Read the start of the journal.

        Raises:
            MalformedRecord: not a journal, or one of another format version.
            TruncatedFile: the file ends too early.
        """
        self._file_descriptor = file_descriptor
        self._where = where
        self._offset = 0
        magic, n_bytes_proof = _PREFIX.unpack(self._take_bytes(_PREFIX.size))
        if magic != _MAGIC or n_bytes_proof > limits.MAX_NAME_BYTES:
            raise MalformedRecord(
                f"{where}: starts with {magic!r}; not a journal this release reads"
            )
        self.proof = self._take_text(n_bytes_proof)

    def records(self) -> Iterator[Record]:
        """Every record, in order.

        Raises:
            MalformedRecord: a field out of its range.
            UnsupportedDType: an element type code that is not assigned.
            TruncatedFile: the file ends before the end mark.
        """
        while True:
            fixed = _RECORD.unpack(self._take_bytes(_RECORD.size))
            if fixed[0] == _KIND_END:
                return
            yield self._take_record(*fixed)

    def _take_record(
        self, kind: int, code: int, n_bytes_position: int, n_bytes_name: int, n_changes: int
    ) -> Record:
        sound = kind == _KIND_CHANGES and n_bytes_position in (4, 8)
        if not sound or n_bytes_name > limits.MAX_NAME_BYTES or n_changes > RECORD_CHANGES:
            raise MalformedRecord(f"{self._where}: unreadable record before byte {self._offset}")
        dtype = dtype_coded(code)
        name = self._take_text(n_bytes_name)
        positions = self._take_array(n_changes, np.dtype(f"<u{n_bytes_position}"))
        return Record(
            name, dtype, Changes(positions, self._take_array(n_changes, dtype.bits_dtype))
        )

    def _take_array(
        self, n_elements: int, dtype: np.dtype[np.unsignedinteger]
    ) -> npt.NDArray[np.unsignedinteger]:
        array = np.empty(n_elements, dtype)
        read_into(self._file_descriptor, array.view(np.uint8), self._offset, self._where)
        self._offset += array.nbytes
        return array

    def _take_bytes(self, n_bytes: int) -> bytes:
        data = read_bytes(self._file_descriptor, n_bytes, self._offset, self._where)
        self._offset += n_bytes
        return data

    def _take_text(self, n_bytes: int) -> str:
        try:
            return self._take_bytes(n_bytes).decode()
        except UnicodeDecodeError as error:
            raise MalformedRecord(f"{self._where}: a name is not UTF-8: {error}") from error


def verify_journal(file_descriptor: int, where: str) -> None:
    """Check the hash at the end against everything before it, in blocks.

    Raises:
        TruncatedFile: too short to be a journal.
        HashMismatch: damaged; replaying it would write noise.
    """
    n_bytes = os.fstat(file_descriptor).st_size - _DIGEST_BYTES
    if n_bytes < _PREFIX.size + _RECORD.size:
        raise TruncatedFile(f"{where}: too short for a journal; {_REBUILD}")
    sha256 = hashlib.sha256()
    for start in range(0, n_bytes, _HASH_BLOCK_BYTES):
        size = min(_HASH_BLOCK_BYTES, n_bytes - start)
        sha256.update(read_bytes(file_descriptor, size, start, where))
    if sha256.digest() != read_bytes(file_descriptor, _DIGEST_BYTES, n_bytes, where):
        raise HashMismatch(f"{where}: the journal is damaged; {_REBUILD}")


def check_changes(spec: TensorSpec, changes: Changes) -> None:
    """Refuse changes that would write outside their tensor, or write an element twice.

    Raises:
        MalformedRecord: positions that do not rise or lie outside, or bits of another width.
    """
    positions, bits = changes.positions, changes.bits
    sound = positions.dtype.kind == "u" and bits.dtype.kind == "u" and len(positions) == len(bits)
    if not sound or bits.dtype.itemsize != spec.dtype.n_bytes:
        raise MalformedRecord(
            f"tensor {spec.name!r:.200}: {len(positions)} positions of {positions.dtype} with "
            f"{len(bits)} values of {bits.dtype}; expected as many values of "
            f"{spec.dtype.bits_dtype}, and unsigned positions"
        )
    if len(positions) and int(positions[-1]) >= spec.n_elements:
        raise MalformedRecord(
            f"tensor {spec.name!r:.200}: position {positions[-1]} of {spec.n_elements} elements"
        )
    if np.any(positions[1:] <= positions[:-1]):
        raise MalformedRecord(f"tensor {spec.name!r:.200}: positions do not rise")


def _flat_bytes(
    array: npt.NDArray[np.unsignedinteger], dtype: np.dtype[np.unsignedinteger]
) -> memoryview:
    return np.ascontiguousarray(array, dtype).view(np.uint8).data
