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


@dataclass(frozen=True)
class Directory:
    """Every chunk of every piece, on the host."""

    borders: npt.NDArray[np.int64]
    """Every piece's first chunk, and the end of the last one's."""
    piece: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    n_elements: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    first_word: npt.NDArray[np.int64]
    n_words: npt.NDArray[np.int64]

    @property
    def is_dense(self) -> npt.NDArray[np.bool_]:
        """Which chunks say all their new bits."""
        chosen: npt.NDArray[np.bool_] = (self.n_words > 0) & ((self.head & DENSE) != 0)
        return chosen

    @property
    def is_coded(self) -> npt.NDArray[np.bool_]:
        """Which chunks go through the coder."""
        chosen: npt.NDArray[np.bool_] = (self.n_words > 0) & ((self.head & DENSE) == 0)
        return chosen

    def by_piece(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Sums over every piece's chunks."""
        before = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return np.diff(before[self.borders])

    def at(self, numbers: npt.NDArray[np.intp], device: torch.device) -> CodedChunks:
        """Some of them, on the device."""
        n_elements = self.n_elements[numbers]
        n_spans = -(-n_elements // SPAN_ELEMENTS)
        tables: list[npt.NDArray[Any]] = [
            self.piece[numbers].astype(np.int32), self.start[numbers], n_elements,
            self.head[numbers].astype(np.uint32).view(np.int32), self.first_word[numbers],
            self.n_words[numbers].astype(np.int32), np.cumsum(n_spans) - n_spans,
        ]  # fmt: skip
        piece, start, elements, head, first_word, n_words, first_span = send_tables(tables, device)
        return CodedChunks(
            piece, start, elements, head, first_word, n_words, first_span,
            int(n_spans.sum()), int(n_spans.max(initial=0)),
        )  # fmt: skip


def read_directory(
    all_streams: Sequence[Streams], log2s: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Directory:
    """Join the directories of pieces of so many elements, in chunks of such sizes.

    Raises:
        CorruptStream: a directory does not match its piece, or its payload.
    """
    counts = np.array([len(streams.directory) for streams in all_streams], dtype=np.int64)
    if not np.array_equal(counts, -(-sizes >> log2s)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    borders = np.concatenate([[0], np.cumsum(counts)])
    piece = np.repeat(np.arange(len(counts)), counts)
    log2 = log2s[piece]
    start = (np.arange(len(piece)) - borders[piece]) << log2
    rows = np.concatenate([streams.directory for streams in all_streams])
    head, n_words = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    found = Directory(
        borders,
        piece,
        start,
        np.minimum(sizes[piece] - start, 1 << log2),
        head,
        np.cumsum(n_words) - n_words,
        n_words,
    )
    _check_payloads(found, all_streams)
    return found


def _check_payloads(found: Directory, streams: Sequence[Streams]) -> None:
    n_bytes = np.array([len(each.payload) for each in streams], dtype=np.int64)
    _refuse(4 * found.by_piece(found.n_words) != n_bytes, "payload does not match its directory")


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
