"""A coded piece as bytes: model, directory, payload. What ``body_bytes`` writes, ``parse_body`` reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightwire.codec.model_bytes import model_bytes, parse_model
from weightwire.codec.piece import Codec, EncodedPiece, plain_piece
from weightwire.errors import MalformedRecord
from weightwire.kernels.contract import PLAIN_CHUNK, Streams
from weightwire.model import DType


def body_bytes(piece: EncodedPiece) -> bytes:
    """The body of a record."""
    model = b"" if piece.model is None else model_bytes(piece.model, piece.chunk_log2)
    return joined_body(model, piece.streams)


def joined_body(model: bytes, streams: Streams) -> bytes:
    """The same, from a model that is bytes already; the plain codec has none."""
    directory: npt.NDArray[np.uint32] = streams.directory.astype("<u4")
    return b"".join((model, directory.tobytes(), streams.payload.data))


def parse_body(
    body: npt.NDArray[np.uint8], codec: Codec, n_elements: int, n_changed: int, dtype: DType
) -> EncodedPiece:
    """The inverse of ``body_bytes``, on bytes from anywhere.

    Raises:
        MalformedRecord: the body is too short, or a field is out of range.
    """
    if codec == "plain":
        n_chunks = -(-n_elements // PLAIN_CHUNK)
        return plain_piece(n_elements, _parse_streams(body, 0, n_chunks, 1, n_changed))
    model, chunk_log2, first = parse_model(body, dtype)
    streams = parse_compact_streams(body, first, chunk_log2, n_elements, n_changed)
    return EncodedPiece(n_elements, model, chunk_log2, streams)


def parse_compact_streams(
    body: npt.NDArray[np.uint8], first: int, chunk_log2: int, n_elements: int, n_changed: int
) -> Streams:
    """What follows a compact piece's model, which ends at ``first``.

    Raises:
        MalformedRecord: the body is too short.
    """
    n_chunks = -(-n_elements // (1 << chunk_log2))
    return _parse_streams(body, first, n_chunks, 2, n_changed)


def _parse_streams(
    body: npt.NDArray[np.uint8], first: int, n_chunks: int, width: int, n_changed: int
) -> Streams:
    stop = first + 4 * width * n_chunks
    if stop > len(body):
        raise MalformedRecord("a record ends inside its chunk directory")
    directory = np.frombuffer(body[first:stop].tobytes(), dtype="<u4").astype(np.uint32)
    return Streams(directory.reshape(n_chunks, width), body[stop:], n_changed)
