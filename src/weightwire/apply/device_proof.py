"""Decoding beside the weights: the mirror of ``codec.patched.proven_changes`` for many records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightwire.apply.partial import Chunks, partial_changes
from weightwire.codec.device_pieces import DevicePiece, decode_pieces
from weightwire.codec.model_parse import parse_models
from weightwire.codec.patched import check_base_digest, check_target_digest
from weightwire.codec.piece import EncodedPiece
from weightwire.codec.record import Kind, Record
from weightwire.diff.device_digest import digests_of
from weightwire.digest import TensorDigest
from weightwire.errors import CorruptStream, MalformedRecord
from weightwire.model import Bits, DType

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges
    from weightwire.kernels.triton.scatter import Scatter, Write


def proven_on_device(
    records: Sequence[Record], olds: Sequence[torch.Tensor]
) -> tuple[list[DeviceChanges], Scatter]:
    """The changes of records of one type and codec, each place once, and their writes to ``olds``.

    Old bits are proven before, and new ones after; nothing is written.

    Raises:
        BaseMismatch: some old bits are not what the patch was made for.
        TargetMismatch, CorruptStream, MalformedRecord: the patch is not what it says.
    """
    from weightwire.kernels.triton.digest import digest_all, digest_moved_all
    from weightwire.kernels.triton.scatter import prepare_scatter

    starts = [record.head.start for record in records]
    found = digests_of(digest_all(olds, starts))
    for record, digest in zip(records, found, strict=True):
        check_base_digest(record.head, digest)
    listed = _decoded(records, olds)
    scatter = prepare_scatter(_writes(olds, listed))
    moved = digests_of(digest_moved_all(scatter, starts))
    for record, digest, by in zip(records, found, moved, strict=True):
        check_target_digest(record.head, digest + by)
    return _changed_only(listed, scatter, olds)


def parts_on_device(
    records: Sequence[Record], parts: Sequence[Chunks], olds: Sequence[torch.Tensor]
) -> tuple[list[DeviceChanges], Scatter, list[TensorDigest]]:
    """The same for some chunks of each record, and by how much the digests of ``olds`` move.

    Nothing is proven here: a record's digests are those of all of it.

    Raises:
        CorruptStream: a patch is not what it says.
    """
    from weightwire.kernels.triton.digest import digest_moved_all
    from weightwire.kernels.triton.scatter import prepare_scatter

    listed = _decoded_parts(records, parts, olds)
    scatter = prepare_scatter(_writes(olds, listed))
    moved = digests_of(digest_moved_all(scatter, [part.span.start for part in parts]))
    return *_changed_only(listed, scatter, olds), moved


def on_host(bits: torch.Tensor, dtype: DType) -> Bits:
    """A copy of a device's bits."""
    copied: Bits = bits.to("cpu", copy=True).numpy().view(dtype.bits_dtype)
    return copied


def _decoded(records: Sequence[Record], olds: Sequence[torch.Tensor]) -> list[DeviceChanges]:
    dtype = records[0].head.spec.dtype
    try:
        return decode_pieces(olds, _pieces(records), dtype)
    except CorruptStream:
        for record, old in zip(records, olds, strict=True):
            # The kernels look at all pieces at once: the host tells which one is wrong.
            record.changes(on_host(old, dtype))
        raise


def _decoded_parts(
    records: Sequence[Record], parts: Sequence[Chunks], olds: Sequence[torch.Tensor]
) -> list[DeviceChanges]:
    dtype = records[0].head.spec.dtype
    try:
        return decode_pieces(olds, [part.piece for part in parts], dtype)
    except CorruptStream:
        for record, part, old in zip(records, parts, olds, strict=True):
            partial_changes(record, part, on_host(old, dtype))
        raise


def _pieces(records: Sequence[Record]) -> Sequence[EncodedPiece | DevicePiece]:
    if any(record.head.kind is not Kind.COMPACT for record in records):
        return _pieces_one_by_one(records)
    try:
        return _compact_pieces(records)
    except MalformedRecord:
        # All models are read at once: one by one, the first wrong record is told with its name.
        return _pieces_one_by_one(records)


def _compact_pieces(records: Sequence[Record]) -> list[DevicePiece]:
    dtype = records[0].head.spec.dtype
    models, ends = parse_models([record.body for record in records], dtype)
    places = zip(records, ends.tolist(), models.chunk_log2.tolist(), strict=True)
    return [
        DevicePiece(record.head.n_elements, record.compact_streams(end, log2), models, number)
        for number, (record, end, log2) in enumerate(places)
    ]


def _pieces_one_by_one(records: Sequence[Record]) -> list[EncodedPiece]:
    return [_piece(record) for record in records]


def _piece(record: Record) -> EncodedPiece:
    try:
        return record.piece()
    except MalformedRecord as error:
        raise MalformedRecord(
            f"tensor {record.head.key!r}: {error}; fetch the patch again"
        ) from None


def _changed_only(
    listed: list[DeviceChanges], scatter: Scatter, olds: Sequence[torch.Tensor]
) -> tuple[list[DeviceChanges], Scatter]:
    """Without what decoders list although it stays as it is; the room goes with it."""
    lengths = [len(each.positions) for each in listed]
    if sum(lengths) == sum(each.n_changed for each in listed):
        return listed, scatter
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges
    from weightwire.kernels.triton.scatter import read, tabulate_writes

    bits = torch.cat([each.bits for each in listed])
    is_change = bits != torch.cat(read(scatter))
    ends = torch.from_numpy(np.cumsum(lengths)).to(bits.device)
    # A leading zero, for pieces before which nothing changes.
    n_before = torch.cat([is_change.new_zeros(1), is_change]).cumsum(0)
    sizes = np.diff(n_before[ends].cpu().numpy(), prepend=0).tolist()
    places = torch.cat([each.positions for each in listed])[is_change].split(sizes)
    changed = [
        DeviceChanges(at, new, size)
        for at, new, size in zip(places, bits[is_change].split(sizes), sizes, strict=True)
    ]
    return changed, tabulate_writes(_writes(olds, changed))


def _writes(olds: Sequence[torch.Tensor], changes: Sequence[DeviceChanges]) -> list[Write]:
    return [(old, each.positions, each.bits) for old, each in zip(olds, changes, strict=True)]
