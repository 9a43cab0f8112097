"""A record: one piece of one tensor in a patch, with what it must be before and after."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightwire import limits
from weightwire.codec.body import body_bytes, joined_body, parse_body, parse_compact_streams
from weightwire.codec.piece import Codec, EncodedPiece, decode_piece
from weightwire.digest import TensorDigest
from weightwire.errors import CorruptStream, MalformedRecord
from weightwire.kernels.contract import Streams
from weightwire.model import Bits, Changes, TensorSpec, dtype_coded

if TYPE_CHECKING:
    from weightwire.codec.device_pieces import DevicePiece

_FIXED = struct.Struct("<BBBBIQQQQQQQ")
_SAME_SHAPE = 0xFF


class Kind(IntEnum):
    """How a record's body says the new bits."""

    COMPACT = 1
    PLAIN = 2
    FULL = 3


_CODECS: dict[Kind, Codec] = {Kind.COMPACT: "compact", Kind.PLAIN: "plain"}
KIND_OF_CODEC: dict[str, Kind] = {"compact": Kind.COMPACT, "plain": Kind.PLAIN}


@dataclass(frozen=True)
class RecordHead:
    """Everything about a piece but its coded changes.

    ``base_shape`` differs from the spec's shape only when the tensor was reshaped. A FULL record
    stands for a tensor that is new, or has another type or size than before: it has no base.
    """

    spec: TensorSpec
    kind: Kind
    start: int
    n_elements: int
    n_changed: int
    base_digest: TensorDigest
    target_digest: TensorDigest
    base_shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The element after the piece's last one."""
        return self.start + self.n_elements

    @property
    def is_fresh(self) -> bool:
        """Whether the tensor has to be made anew: it is new, or has another type or shape."""
        return self.kind is Kind.FULL or self.base_shape != self.spec.shape

    @property
    def key(self) -> str:
        """The record's name in its bucket: the tensor's, with ``@start`` for all but the first piece."""
        return f"{self.spec.name}@{self.start}" if self.start else self.spec.name


@dataclass(frozen=True)
class Record:
    """A piece's head and its body, which is decoded only when asked for."""

    head: RecordHead
    body: npt.NDArray[np.uint8]

    def piece(self) -> EncodedPiece:
        """The coded piece in the body.

        Raises:
            MalformedRecord: the body does not parse.
        """
        head = self.head
        codec = _CODECS[head.kind]
        return parse_body(self.body, codec, head.n_elements, head.n_changed, head.spec.dtype)

    def compact_streams(self, first: int, chunk_log2: int) -> Streams:
        """The streams of a compact body, whose model was read with many others and ends at ``first``.

        Raises:
            MalformedRecord: the body is too short.
        """
        head = self.head
        return parse_compact_streams(self.body, first, chunk_log2, head.n_elements, head.n_changed)

    def changes(self, old: Bits | None, *, n_threads: int | None = None) -> Changes:
        """Positions within the piece and new bits; pure.

        Raises:
            MalformedRecord, CorruptStream: the record names itself in the message.
        """
        try:
            if self.head.kind is Kind.FULL:
                return Changes(np.arange(self.head.n_elements, dtype=np.uint32), self.full_bits())
            return decode_piece(old, self.piece(), self.head.spec.dtype, n_threads=n_threads)
        except (MalformedRecord, CorruptStream) as error:
            raise type(error)(f"tensor {self.head.key!r}: {error}; fetch the patch again") from None

    def full_bits(self) -> Bits:
        """The new bits of a FULL record."""
        bits: Bits = np.frombuffer(
            self.body[: self.head.n_elements * self.head.spec.dtype.n_bytes].tobytes(),
            dtype=self.head.spec.dtype.bits_dtype,
        )
        return bits


def patch_record(head: RecordHead, piece: EncodedPiece) -> Record:
    """The record of a coded piece."""
    return _record(head, piece.codec, piece.streams, body_bytes(piece))


def device_record(head: RecordHead, piece: DevicePiece, model: bytes) -> Record:
    """The same of a piece that was coded on a device, with its model as ``model_bytes_of`` gives it."""
    codec: Codec = "plain" if piece.models is None else "compact"
    return _record(head, codec, piece.streams, joined_body(model, piece.streams))


def _record(head: RecordHead, codec: Codec, streams: Streams, body: bytes) -> Record:
    head = replace(head, kind=KIND_OF_CODEC[codec], n_changed=streams.n_changed)
    return Record(head, np.frombuffer(body, dtype=np.uint8))


def full_record(head: RecordHead, bits: Bits) -> Record:
    """The record of a piece that has no base."""
    raw = bits.tobytes()
    return Record(head, np.frombuffer(raw + bytes(-len(raw) % 4), dtype=np.uint8))


def record_bytes(record: Record) -> bytes:
    """The record as it stands in a bucket."""
    return b"".join(record_parts(record))


def record_parts(record: Record) -> tuple[bytes, memoryview]:
    """The same in two parts, of which the second, and larger, is not copied."""
    head = record.head
    reshaped = head.base_shape != head.spec.shape
    fixed = _FIXED.pack(
        head.kind,
        head.spec.dtype.code,
        len(head.spec.shape),
        len(head.base_shape) if reshaped else _SAME_SHAPE,
        0,
        head.start,
        head.n_elements,
        head.n_changed,
        head.base_digest.low,
        head.base_digest.high,
        head.target_digest.low,
        head.target_digest.high,
    )
    extents = head.spec.shape + (head.base_shape if reshaped else ())
    return fixed + struct.pack(f"<{len(extents)}Q", *extents), record.body.data


def parse_record(key: str, raw: npt.NDArray[np.uint8]) -> Record:
    """The inverse of ``record_bytes``, on bytes from anywhere.

    Raises:
        MalformedRecord: fields contradict each other, the key or the size.
        UnsupportedDType: an element type this release does not know.
    """
    try:
        return _parse_record(key, raw)
    except MalformedRecord as error:
        raise MalformedRecord(f"record {key!r:.200}: {error}; fetch the patch again") from None


def _parse_record(key: str, raw: npt.NDArray[np.uint8]) -> Record:
    if len(raw) < _FIXED.size:
        raise MalformedRecord(f"{len(raw)} bytes are too few")
    kind, code, n_dims, n_base_dims, reserved, start, n_elements, n_changed, *lanes = _FIXED.unpack(
        raw[: _FIXED.size].tobytes()
    )
    if reserved or kind not in Kind.__members__.values():
        raise MalformedRecord(f"kind {kind} is unknown")
    shape, at = _take_shape(raw, _FIXED.size, n_dims)
    base_shape = shape
    if n_base_dims != _SAME_SHAPE:
        base_shape, at = _take_shape(raw, at, n_base_dims)
    name = _name_of(key, start)
    head = RecordHead(
        TensorSpec(name, dtype_coded(code), shape),
        Kind(kind),
        start,
        n_elements,
        n_changed,
        TensorDigest(*lanes[:2]),
        TensorDigest(*lanes[2:]),
        base_shape,
    )
    _check_head(head, len(raw) - at)
    if head.kind is Kind.FULL and raw[at + head.n_elements * head.spec.dtype.n_bytes :].any():
        raise MalformedRecord("the padding after its elements is not zero")
    return Record(head, raw[at:])


def _take_shape(raw: npt.NDArray[np.uint8], at: int, n_dims: int) -> tuple[tuple[int, ...], int]:
    stop = at + 8 * n_dims
    if n_dims > limits.MAX_DIMS or stop > len(raw):
        raise MalformedRecord(f"{n_dims} dimensions do not fit")
    return struct.unpack(f"<{n_dims}Q", raw[at:stop].tobytes()), stop


def _name_of(key: str, start: int) -> str:
    suffix = f"@{start}" if start else ""
    if not key.endswith(suffix):
        raise MalformedRecord(f"it starts at element {start}, its name says otherwise")
    return key[: len(key) - len(suffix)]


def _check_head(head: RecordHead, n_body: int) -> None:
    total = head.spec.n_elements
    if head.stop > total or head.n_elements > limits.MAX_PIECE_ELEMENTS:
        raise MalformedRecord(f"elements {head.start} to {head.stop} of {total}")
    if head.n_changed > head.n_elements:
        raise MalformedRecord(f"{head.n_changed} changes in {head.n_elements} elements")
    if TensorSpec(head.spec.name, head.spec.dtype, head.base_shape).n_elements != total:
        raise MalformedRecord(f"shapes {head.base_shape} and {head.spec.shape} differ in size")
    if n_body % 4:
        raise MalformedRecord(f"a body of {n_body} bytes is not whole words")
    n_full = head.n_elements * head.spec.dtype.n_bytes
    if head.kind is Kind.FULL and (
        n_body != n_full + -n_full % 4 or head.n_changed != head.n_elements
    ):
        raise MalformedRecord(f"{n_body} bytes for {head.n_elements} whole elements")
    if head.kind is Kind.FULL and (head.base_digest, head.base_shape) != (
        TensorDigest(),
        head.spec.shape,
    ):
        raise MalformedRecord("a whole tensor has no base, this one names one")
