"""Decoding some chunks of a record: those with elements that a receiver keeps."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.apply.needs import Needs, Span
from weightwire.codec.piece import EncodedPiece, decode_piece, sub_piece
from weightwire.codec.record import Record
from weightwire.errors import CorruptStream, CutElsewhere, MalformedRecord
from weightwire.model import Bits, Changes


@dataclass(frozen=True)
class Chunks:
    """Some chunks of a record, and the elements of the tensor that they say something about."""

    piece: EncodedPiece
    span: Span


def chunks_around(record: Record, kept: Span, needs: Needs | None) -> Chunks:
    """The chunks that have elements of ``kept``.

    Raises:
        CutElsewhere: some of them have others too, whose old bits nobody has.
        MalformedRecord, CorruptStream: the record names itself in the message.
    """
    head = record.head
    try:
        piece = record.piece()
        size, inner = 1 << piece.chunk_log2, kept & Span(head.start, head.stop)
        first = (inner.start - head.start) // size
        last = -(-(inner.stop - head.start) // size)
        part = sub_piece(piece, first, last, head.spec.dtype)
    except (MalformedRecord, CorruptStream) as error:
        raise type(error)(f"tensor {head.key!r}: {error}; fetch the patch again") from None
    start = head.start + first * size
    span = Span(start, start + part.n_elements)
    if not kept.covers(span):
        if needs is not None:
            needs.keep_whole()
        raise CutElsewhere(
            f"tensor {head.key!r:.200}: elements {span.start} to {span.stop} are coded together,"
            f" {kept.start} to {kept.stop} are kept; start from an anchor and keep whole tensors"
        )
    return Chunks(part, span)


def partial_changes(record: Record, chunks: Chunks, old: Bits) -> Changes:
    """The changes of these chunks, counted from their first element.

    Raises:
        CorruptStream: the record names itself in the message.
    """
    head = record.head
    try:
        return decode_piece(old, chunks.piece, head.spec.dtype)
    except CorruptStream as error:
        raise CorruptStream(f"tensor {head.key!r}: {error}; fetch the patch again") from None
