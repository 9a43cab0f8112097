"""The small true patch that every attack starts from, whole and taken apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import weightwire as ww
from weightwire.codec.bucket import FORMAT, bucket_bytes
from weightwire.codec.index import index_bytes, seal
from weightwire.codec.patch import MemoryBuckets, Patch
from weightwire.codec.piece import EncodedPiece
from weightwire.codec.record import Kind, Record, parse_record, patch_record, record_bytes
from weightwire.codec.writer import MemorySink, PatchWriter
from weightwire.container import build_header
from weightwire.errors import WeightwireError
from weightwire.kernels import kernels
from weightwire.kernels.contract import N_CLASSES, ONE_STEP, ClassModel
from weightwire.model import TensorSpec, dtype_named

State = dict[str, npt.NDArray[Any]]

HEAD_BYTES = 64
"""Size of a record's fixed fields; its extents follow."""


@dataclass(frozen=True)
class Files:
    """A patch folder's contents."""

    index: bytes
    buckets: dict[str, bytes]


@dataclass
class Forgery:
    """A patch taken apart; ``files`` puts it together again, with every hash made to fit."""

    index: dict[str, Any]
    buckets: list[list[tuple[str, bytearray]]]
    codec: str

    def files(self) -> Files:
        """The forged folder: lies inside, sound SHA-256 outside."""
        return sealed(self.index, [self.bucket(number) for number in range(len(self.buckets))])

    def bucket(self, number: int) -> bytes:
        """One bucket file of the records as they now are."""
        records = self.buckets[number]
        byte = dtype_named("U8")
        specs = [TensorSpec(key, byte, (len(raw),)) for key, raw in records]
        return b"".join([build_header(specs, self._metadata(number)), *(raw for _, raw in records)])

    def _metadata(self, number: int) -> dict[str, str]:
        """Digests that fit the records, as long as these can be read at all."""
        try:
            parsed = [
                parse_record(key, np.frombuffer(raw, np.uint8)) for key, raw in self.buckets[number]
            ]
            return json.loads(bucket_bytes(parsed, self.codec)[8:].split(b"}", 1)[0] + b"}}")[
                "__metadata__"
            ]
        except WeightwireError:
            return {"format": FORMAT, "format_version": "1", "codec": self.codec}

    def record(self, name: str) -> bytearray:
        """One record, to be changed in place."""
        return next(raw for bucket in self.buckets for key, raw in bucket if key == name)

    def body(self, name: str) -> int:
        """Where a record's body starts."""
        raw = self.record(name)
        return HEAD_BYTES + 8 * (raw[2] + (0 if raw[3] == 0xFF else raw[3]))

    def put(self, name: str, raw: bytes) -> None:
        """Replace one record."""
        for bucket in self.buckets:
            for at, (key, _) in enumerate(bucket):
                if key == name:
                    bucket[at] = (key, bytearray(raw))


def sealed(index: dict[str, Any], buckets: list[bytes]) -> Files:
    """Files whose index has the right length and SHA-256 of every bucket."""
    entries = [dict(entry) for entry in index["buckets"]]
    for entry, raw in zip(entries, buckets, strict=True):
        entry |= {"n_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    named = {entry["file"]: raw for entry, raw in zip(entries, buckets, strict=True)}
    return Files(as_json({**index, "buckets": entries}), named)


def as_json(index: dict[str, Any]) -> bytes:
    """An index as the writer of patches has it, with the right SHA-256 of itself."""
    fields = {name: value for name, value in index.items() if name != "sha256"}
    return seal(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())


def base_state() -> State:
    """The state at hand: a copy that an attack may try to damage."""
    state = {name: array.copy() for name, array in _base().items()}
    state["tied"] = state["coded"]
    return state


def target_state() -> State:
    """What the true patch turns ``base_state`` into."""
    state = {name: array.copy() for name, array in _target().items()}
    state["tied"] = state["coded"]
    return state


@cache
def true_files(codec: str) -> Files:
    """The true patch."""
    patch = _true_patch(codec)
    sources = {entry.file: patch._checked(entry) for entry in patch.index.buckets}
    return Files(index_bytes(patch.index), sources)


def take_apart(codec: str) -> Forgery:
    """The true patch, ready to be forged."""
    return deepcopy(_parts(codec))


@cache
def _parts(codec: str) -> Forgery:
    patch = _true_patch(codec)
    index = json.loads(index_bytes(patch.index))
    buckets: list[list[tuple[str, bytearray]]] = [[] for _ in patch.index.buckets]
    for number, record in _numbered(patch):
        buckets[number].append((record.head.key, bytearray(record_bytes(record))))
    return Forgery(index, buckets, codec)


def _numbered(patch: Patch) -> Iterator[tuple[int, Record]]:
    for pieces in patch.heads.values():
        for number, head in pieces:
            yield number, patch.record(number, head.key)


@cache
def _true_patch(codec: str) -> Patch:
    """Small, but with every kind of record and chunk: coded, expected, exceptions, dense, whole."""
    patch = ww.diff(_with_tie(_base()), _with_tie(_target()), codec=codec, n_threads=1)
    sink = MemorySink()
    writer = PatchWriter(sink, codec, n_bucket_bytes=150)
    for record in patch.records():
        writer.add(_with_exceptions(record) if record.head.spec.name == "exceptions" else record)
    index = patch.index
    whole = writer.finish(
        base_digest=index.base_digest,
        target_digest=index.target_digest,
        n_tensors=index.n_tensors,
        n_elements=index.n_elements,
        unchanged=index.unchanged,
        removed=index.removed,
        tied=index.tied,
    )
    return Patch(whole, MemoryBuckets(sink.files))


def _with_exceptions(record: Record) -> Record:
    """Coded with tables that know only steps of one, so that larger ones become exceptions."""
    if record.head.kind is not Kind.COMPACT:
        return record
    model = ClassModel(
        0, (0,) * N_CLASSES, (False,) * N_CLASSES, tuple(ONE_STEP for _ in range(N_CLASSES))
    )
    old, new = (state["exceptions"].view(np.uint32) for state in (_base(), _target()))
    streams = kernels().encode_compact(old, new, record.head.spec.dtype, model, 10, 1)
    return patch_record(replace(record.head), EncodedPiece(len(old), model, 10, streams))


def _with_tie(state: State) -> State:
    return {**state, "tied": state["coded"]}


@cache
def _base() -> State:
    weights = ((np.arange(48) * 977 + 31) % 4099 / 4096).astype(np.float32)
    return {
        "coded": weights[:42].astype(ml_dtypes.bfloat16).reshape(6, 7),
        "expected": weights[:40].astype(np.float16),
        "exceptions": weights[:24].copy(),
        "dense": np.arange(5, dtype=np.uint16) * np.uint16(9973),
        "wide": np.arange(12, dtype=np.float64) / 7,
        "same": np.arange(4, dtype=np.int32),
        "gone": np.arange(3, dtype=np.int8),
        "reshaped": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "retyped": np.arange(3, dtype=np.uint8),
    }


@cache
def _target() -> State:
    state = {name: array.copy() for name, array in _base().items() if name != "gone"}
    state["coded"].view(np.uint16).reshape(-1)[[3, 17, 41]] += np.array([1, 1, 3], np.uint16)
    state["expected"].view(np.uint16)[np.arange(40) % 13 != 5] += np.uint16(1)
    state["exceptions"].view(np.uint32)[[1, 9, 20]] += np.array([1, 70000, 300], np.uint32)
    state["dense"] ^= np.uint16(0x5A5A)
    state["wide"].view(np.uint64)[[0, 7]] += np.array([1, 1 << 40], np.uint64)
    state["reshaped"] = state["reshaped"].reshape(3, 2)
    state["reshaped"][2, 1] = 200
    state["retyped"] = np.array([1.5, -0.0, np.inf], np.float32)
    state["added"] = np.array([7, 8, 9], np.uint8)
    return state
