"""One piece of a tensor, coded: the border between arrays and kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weightwire import limits
from weightwire.codec.classes import UNUSED_MODEL, build_model, choose_chunk_log2
from weightwire.codec.model_bytes import model_bytes
from weightwire.errors import CorruptStream, LimitExceeded, StopError
from weightwire.kernels import kernels
from weightwire.kernels.contract import DENSE, PLAIN_CHUNK, ClassModel, Streams
from weightwire.kernels.reference import plain_chunk_bytes
from weightwire.model import Bits, Changes, DType

Codec = Literal["compact", "plain"]
CODECS: tuple[Codec, ...] = ("compact", "plain")

UNCOUNTED = -1
"""Changes in a part of a piece: only the whole piece announces a number."""


@dataclass(frozen=True)
class EncodedPiece:
    """A coded piece; ``model`` is None for the plain codec."""

    n_elements: int
    model: ClassModel | None
    chunk_log2: int
    streams: Streams

    @property
    def codec(self) -> Codec:
        """Which of the two encodings this is."""
        return "plain" if self.model is None else "compact"

    @property
    def n_changed(self) -> int:
        """How many elements differ from the base."""
        return self.streams.n_changed

    @property
    def n_bytes(self) -> int:
        """Size of the coded streams with their tables and directory, as they stand in a file."""
        model = b"" if self.model is None else model_bytes(self.model, self.chunk_log2)
        return len(model) + 4 * self.streams.directory.size + len(self.streams.payload)


def piece_elements(dtype: DType) -> int:
    """How many elements of this type make a full piece."""
    return min(limits.PIECE_ELEMENTS, limits.PIECE_BYTES // dtype.n_bytes)


def thread_count(n_threads: int | None = None) -> int:
    """So many threads as asked for; by default one per processor this process may run on.

    Raises:
        StopError: fewer than one.
    """
    if n_threads is None:
        return len(os.sched_getaffinity(0))
    if n_threads < 1:
        raise StopError(f"{n_threads} threads; give at least one, or none for all processors")
    return n_threads


def plain_piece(n_elements: int, streams: Streams) -> EncodedPiece:
    """A piece of the plain codec: no model, and chunks of a fixed size."""
    return EncodedPiece(n_elements, None, PLAIN_CHUNK.bit_length() - 1, streams)


def encode_piece(
    old: Bits,
    new: Bits,
    dtype: DType,
    codec: str = "compact",
    *,
    n_threads: int | None = None,
    keep_changes: bool = False,
) -> EncodedPiece:
    """Code what changes from ``old`` to ``new``; ``keep_changes`` leaves it in ``streams.changes``.

    Raises:
        LimitExceeded: the piece is longer than ``limits.MAX_PIECE_ELEMENTS``.
        StopError: there is no codec of this name.
    """
    if len(old) > limits.MAX_PIECE_ELEMENTS:
        raise LimitExceeded(f"a piece of {len(old)} elements; split it")
    threads = thread_count(n_threads)
    if codec == "plain":
        return plain_piece(len(old), kernels().encode_plain(old, new, threads, keep_changes))
    if codec != "compact":
        raise StopError(f"no codec {codec!r}; choose one of: {', '.join(CODECS)}")
    survey = kernels().survey(old, new, dtype)
    model, chunk_log2 = build_model(survey, dtype), choose_chunk_log2(survey)
    streams = kernels().encode_compact(old, new, dtype, model, chunk_log2, threads, keep_changes)
    if np.isin(streams.directory[:, 0], (0, DENSE)).all():
        # Nothing was coded with it: small tensors need not carry a model they do not use.
        model = UNUSED_MODEL
    return EncodedPiece(len(old), model, chunk_log2, streams)


def decode_piece(
    old: Bits | None, piece: EncodedPiece, dtype: DType, *, n_threads: int | None = None
) -> Changes:
    """The changes a piece stands for; writes nothing. The plain codec needs no ``old``.

    Raises:
        CorruptStream: the streams are not ones an encoder writes.
        StopError: a compact piece without its old bits.
    """
    threads = thread_count(n_threads)
    if piece.model is None:
        changes = kernels().decode_plain(piece.n_elements, dtype, piece.streams, threads)
        _check_count(int((piece.streams.directory & 0xFFFFFF).sum()), piece)
        return changes
    if old is None or len(old) != piece.n_elements:
        raise StopError("a compact piece is decoded against its old bits, all of them")
    changes = kernels().decode_compact(
        old, dtype, piece.model, piece.chunk_log2, piece.streams, threads
    )
    _check_count(len(changes), piece)
    return changes


def sub_piece(piece: EncodedPiece, first: int, last: int, dtype: DType) -> EncodedPiece:
    """Chunks ``first`` to ``last`` of a piece, as a piece: chunks are coded by themselves.

    Raises:
        CorruptStream: the directory does not match its payload.
    """
    streams, chunk = piece.streams, 1 << piece.chunk_log2
    ends = np.concatenate([[0], np.cumsum(_chunk_bytes(piece, dtype))])
    if ends[-1] != len(streams.payload):
        raise CorruptStream("payload does not match its directory")
    directory = streams.directory[first:last]
    is_plain = piece.model is None
    n_changed = int((directory & 0xFFFFFF).sum()) if is_plain else UNCOUNTED
    part = Streams(directory, streams.payload[ends[first] : ends[last]], n_changed)
    n_elements = min(last * chunk, piece.n_elements) - first * chunk
    return EncodedPiece(n_elements, piece.model, piece.chunk_log2, part)


def _chunk_bytes(piece: EncodedPiece, dtype: DType) -> list[int]:
    """How many bytes of the payload belong to each chunk."""
    directory, chunk = piece.streams.directory, 1 << piece.chunk_log2
    if piece.model is not None:
        return [4 * n_words for n_words in directory[:, 1].tolist()]
    starts = range(0, piece.n_elements, chunk)
    lengths = [min(chunk, piece.n_elements - start) for start in starts]
    heads = directory[:, 0].tolist()
    return [plain_chunk_bytes(h, n, dtype.n_bytes) for h, n in zip(heads, lengths, strict=True)]


def _check_count(n_found: int, piece: EncodedPiece) -> None:
    if piece.n_changed not in (n_found, UNCOUNTED):
        raise CorruptStream(f"{n_found} changes decoded where {piece.n_changed} were announced")
