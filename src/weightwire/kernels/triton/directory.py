"""The chunks of coded pieces, as their directories tell of them: read on the host, and checked there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import DENSE, Streams
from weightwire.kernels.gaps import HEADROOM_LOG2, MAX_RATE
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.kernels.triton.models import ModelArrays
from weightwire.kernels.triton.uploads import send_tables
from weightwire.kernels.triton.weight_index import SPAN_ELEMENTS, CodedChunks
from weightwire.model import DType

_RESERVED = 1 << 23


Numbers = slice | npt.NDArray[np.intp]
"""Of chunks: a slice if it is all of them, which costs nothing to take."""


@dataclass(frozen=True)
class Directory:
    """Every chunk of every piece, on the host."""

    borders: npt.NDArray[np.int64]
    """Every piece's first chunk, and the end of the last one's."""
    piece: npt.NDArray[np.int32]
    start: npt.NDArray[np.int64]
    n_elements: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    n_words: npt.NDArray[np.int64]
    is_dense: npt.NDArray[np.bool_]
    """Which chunks say all their new bits."""
    is_coded: npt.NDArray[np.bool_]
    """Which chunks go through the coder."""

    def at(self, numbers: Numbers, device: torch.device) -> CodedChunks:
        """Some of them, on the device."""
        n_elements = self.n_elements[numbers]
        n_spans = -(-n_elements // SPAN_ELEMENTS)
        first_word = np.cumsum(self.n_words) - self.n_words
        tables: list[npt.NDArray[Any]] = [
            self.piece[numbers], self.start[numbers], n_elements,
            self.head[numbers].astype(np.int32), first_word[numbers],
            self.n_words[numbers].astype(np.int32), np.cumsum(n_spans) - n_spans,
        ]  # fmt: skip
        piece, start, elements, head, first_word, n_words, first_span = send_tables(tables, device)
        return CodedChunks(
            piece, start, elements, head, first_word, n_words, first_span,
            int(n_spans.sum()), int(n_spans.max(initial=0)),
        )  # fmt: skip


def numbers_of(is_chosen: npt.NDArray[np.bool_]) -> Numbers:
    """The chunks that are chosen."""
    return slice(None) if is_chosen.all() else np.flatnonzero(is_chosen)


def read_directory(
    all_streams: Sequence[Streams], log2s: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Directory:
    """Join the directories of pieces of so many elements, in chunks of such sizes.

    Raises:
        CorruptStream: a directory does not match its piece, or its payload.
    """
    directories = [streams.directory for streams in all_streams]
    counts = np.array(list(map(len, directories)), dtype=np.int64)
    if not np.array_equal(counts, -(-sizes >> log2s)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    borders = np.concatenate([[0], np.cumsum(counts)])
    number = np.arange(borders[-1]) - np.repeat(borders[:-1], counts)
    n_elements = np.repeat(1 << log2s, counts)
    # Only a piece's last chunk may be shorter.
    last = borders[1:][counts > 0] - 1
    n_elements[last] = (sizes - (counts - 1 << log2s))[counts > 0]
    head, n_words = np.concatenate(directories).T.astype(np.int64)
    is_told, is_dense = n_words > 0, (head & DENSE) != 0
    found = Directory(
        borders,
        np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        number << np.repeat(log2s, counts),
        n_elements,
        head,
        n_words,
        is_told & is_dense,
        is_told & ~is_dense,
    )
    _check_payloads(found, all_streams)
    return found


def _check_payloads(found: Directory, streams: Sequence[Streams]) -> None:
    n_bytes = np.array([len(each.payload) for each in streams], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(found.n_words)])[found.borders]
    _refuse(4 * np.diff(ends) != n_bytes, "payload does not match its directory")


def check_heads(found: Directory, models: ModelArrays, dtype: DType) -> None:
    """Refuse chunks that cannot be what their heads say.

    Raises:
        CorruptStream: heads that no encoder writes.
    """
    head, n, n_words = found.head, found.n_elements, found.n_words
    _refuse((n_words == 0) & (head != 0), "an empty chunk has a head")
    is_dense, is_coded = found.is_dense, found.is_coded
    dense_words = (n * dtype.n_bytes + 3) // 4
    _refuse(
        is_dense & ((head != DENSE) | (n_words != dense_words)), "a dense chunk has the wrong size"
    )
    rate = head >> 24
    is_odd = ((head & _RESERVED) != 0) | ((head & EVENT_MASK) > n) | (rate > MAX_RATE)
    _refuse(is_coded & is_odd, "a chunk's head is out of range")
    heaviest = models.log2_weights.max(axis=1).astype(np.int64)
    is_heavy = heaviest[found.piece] > rate // 8 + HEADROOM_LOG2
    _refuse(is_coded & is_heavy, "a chunk's rate is too high for its weights")
    is_short = n_words < 2 + ((head & EXCEPTIONS) != 0)
    _refuse(is_coded & is_short, "stream is shorter than the coder's state")


def check_padding(found: Directory, streams: Sequence[Streams], dtype: DType) -> None:
    """Refuse what stands past the last element of dense chunks.

    Raises:
        CorruptStream: padding that is not zero.
    """
    n_spare = -found.n_elements * dtype.n_bytes % 4
    # Only a piece's last chunk is not a whole number of words, and ends where its payload does.
    for chunk in np.flatnonzero(found.is_dense & (n_spare > 0)).tolist():
        payload = streams[int(found.piece[chunk])].payload
        _refuse(payload[len(payload) - int(n_spare[chunk]) :] != 0, _PADDING)


_PADDING = "a dense chunk's padding is not zero"


def _refuse(is_wrong: Any, what: str) -> None:
    if np.any(is_wrong):
        raise CorruptStream(what)
