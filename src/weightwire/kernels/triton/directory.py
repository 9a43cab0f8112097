"""The chunks of coded pieces, as their directories tell of them: read on the host, and checked there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import CorruptStream
from weightwire.kernels import native_module
from weightwire.kernels.contract import DENSE, Streams
from weightwire.kernels.gaps import HEADROOM_LOG2, MAX_RATE
from weightwire.kernels.model_batch import ModelBatch
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.kernels.triton.launch import owners_of
from weightwire.kernels.triton.uploads import send_tables
from weightwire.kernels.triton.weight_index import SPAN_ELEMENTS, CodedChunks
from weightwire.model import DType

_RESERVED = 1 << 23


Numbers = slice | npt.NDArray[np.intp]
"""Of chunks: a slice if it is all of them, which costs nothing to take."""


class Chunks(NamedTuple):
    """Every chunk of every piece, on the host: tables as kernels take them."""

    piece: npt.NDArray[np.int32]
    start: npt.NDArray[np.int64]
    n_elements: npt.NDArray[np.int64]
    head: npt.NDArray[np.uint32]
    first_word: npt.NDArray[np.int64]
    n_words: npt.NDArray[np.uint32]
    first_span: npt.NDArray[np.int64]
    """As many spans as all chunks before it have."""
    is_coded: npt.NDArray[np.bool_]
    """Which go through the coder; of the others, those with words say all their new bits."""

    @property
    def is_dense(self) -> npt.NDArray[np.bool_]:
        """Which chunks say all their new bits."""
        chosen: npt.NDArray[np.bool_] = (self.n_words > 0) & ~self.is_coded
        return chosen

    def at(self, numbers: Numbers, device: torch.device) -> CodedChunks:
        """Some of them, on the device."""
        n_elements, first_span = self.n_elements[numbers], self.first_span
        n_spans = -(-n_elements // SPAN_ELEMENTS)
        if not isinstance(numbers, slice):
            first_span = np.cumsum(n_spans) - n_spans
        tables: list[npt.NDArray[Any]] = [
            self.piece[numbers], self.start[numbers], n_elements, self.head.view(np.int32)[numbers],
            self.first_word[numbers], self.n_words.view(np.int32)[numbers], first_span,
        ]  # fmt: skip
        piece, start, n, head, first_word, n_words, first = send_tables(tables, device)
        return CodedChunks(
            piece, start, n, head, first_word, n_words, first,
            int(n_spans.sum()), int(n_spans.max(initial=0)),
        )  # fmt: skip


def numbers_of(is_chosen: npt.NDArray[np.bool_]) -> Numbers:
    """The chunks that are chosen."""
    return slice(None) if is_chosen.all() else np.flatnonzero(is_chosen)


def read_directories(
    directories: Sequence[npt.NDArray[np.uint32]],
    log2s: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> Chunks:
    """Join the directories of pieces of so many elements, in chunks of such sizes.

    Raises:
        CorruptStream: a directory does not match its piece.
    """
    native = native_module()
    if native is None:
        return _read_by_numpy(directories, log2s, sizes)
    try:
        found = Chunks(*native.read_directories(list(directories), sizes, log2s))
    except native.CorruptStream as error:
        raise CorruptStream(str(error)) from None
    return found._replace(is_coded=found.is_coded.view(np.bool_))


def _read_by_numpy(
    directories: Sequence[npt.NDArray[np.uint32]],
    log2s: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> Chunks:
    counts = np.array(list(map(len, directories)), dtype=np.int64)
    if not np.array_equal(counts, -(-sizes >> log2s)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    piece, number = owners_of(counts)
    start = number << log2s[piece]
    n_elements = np.minimum(sizes[piece] - start, 1 << log2s[piece])
    n_spans = -(-n_elements // SPAN_ELEMENTS)
    head, n_words = np.concatenate(directories).T.copy()
    wide = n_words.astype(np.int64)
    return Chunks(
        piece, start, n_elements, head, np.cumsum(wide) - wide, n_words,
        np.cumsum(n_spans) - n_spans, (n_words > 0) & ((head & DENSE) == 0),
    )  # fmt: skip


def borders_of(sizes: npt.NDArray[np.int64], log2s: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Every piece's first chunk, and the end of the last one's."""
    borders: npt.NDArray[np.int64] = np.append(0, np.cumsum(-(-sizes >> log2s)))
    return borders


def check_payloads(
    chunks: Chunks, borders: npt.NDArray[np.int64], payloads: Sequence[npt.NDArray[np.uint8]]
) -> None:
    """Refuse payloads that are not as long as their chunks.

    Raises:
        CorruptStream: a payload is shorter or longer.
    """
    n_bytes = np.array(list(map(len, payloads)), dtype=np.int64)
    ends = np.append(chunks.first_word, chunks.n_words.sum(dtype=np.int64))[borders]
    _refuse(4 * np.diff(ends) != n_bytes, "payload does not match its directory")


def check_heads(found: Chunks, models: ModelBatch, dtype: DType) -> None:
    """Refuse chunks that cannot be what their heads say.

    Raises:
        CorruptStream: heads that no encoder writes.
    """
    head, n, n_words = found.head.astype(np.int64), found.n_elements, found.n_words
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


def check_padding(found: Chunks, streams: Sequence[Streams], dtype: DType) -> None:
    """Refuse what stands past the last element of dense chunks.

    Raises:
        CorruptStream: padding that is not zero.
    """
    is_dense = found.is_dense
    if not is_dense.any():
        return
    n_spare = -found.n_elements * dtype.n_bytes % 4
    # Only a piece's last chunk is not a whole number of words, and ends where its payload does.
    for chunk in np.flatnonzero(is_dense & (n_spare > 0)).tolist():
        payload = streams[int(found.piece[chunk])].payload
        _refuse(payload[len(payload) - int(n_spare[chunk]) :] != 0, _PADDING)


_PADDING = "a dense chunk's padding is not zero"


def _refuse(is_wrong: Any, what: str) -> None:
    if np.any(is_wrong):
        raise CorruptStream(what)
