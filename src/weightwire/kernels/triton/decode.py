"""The compact decoder on a GPU: coded pieces in, changes out, beside the weights they are for.

Nothing is written to the weights. While the device looks at the old bits, the host checks heads and
sizes, joins the payload and sends it. What only the streams can tell is checked by the kernels that
read them, and told after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import DENSE, Streams
from weightwire.kernels.gaps import HEADROOM_LOG2, MAX_RATE
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.dense import count_dense, list_dense
from weightwire.kernels.triton.launch import Bucket, make_bucket
from weightwire.kernels.triton.models import DeviceModels, ModelArrays, upload
from weightwire.kernels.triton.pop import TROUBLES, pop_gaps
from weightwire.kernels.triton.pop_steps import pop_steps
from weightwire.kernels.triton.downloads import to_host
from weightwire.kernels.triton.uploads import Sending, send_tables
from weightwire.kernels.triton.weight_index import (
    SPAN_ELEMENTS,
    CodedChunks,
    WeightIndex,
    index_weights,
    list_expected,
)
from weightwire.model import DType

_RESERVED = 1 << 23


@dataclass(frozen=True)
class Work:
    """Coded pieces of one element type, and the old bits they are decoded against."""

    olds: Sequence[torch.Tensor]
    streams: Sequence[Streams]
    models: ModelArrays
    chunk_log2s: npt.NDArray[np.int64]
    dtype: DType


@dataclass(frozen=True)
class _Directory:
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


def decode_compact_all(work: Work) -> list[DeviceChanges]:
    """The changes every piece stands for.

    Raises:
        CorruptStream: streams that no encoder writes.
    """
    return _Decoder(work, _directory(work)).decode()


class _Decoder:
    """Pieces on their way back to changes."""

    def __init__(self, work: Work, directory: _Directory) -> None:
        self._work, self._directory = work, directory
        self._device = work.olds[0].device
        self._coded = np.flatnonzero(directory.is_coded)
        self._dense = np.flatnonzero(directory.is_dense)
        self._old: Bucket = make_bucket(work.olds, 1 << 20)
        self._models: DeviceModels = upload(work.models, work.dtype, self._device)

    def decode(self) -> list[DeviceChanges]:
        """Count what only the old bits can tell, then list."""
        found, work = self._directory, self._work
        sending = Sending(int(found.n_words.sum()), self._device)
        coded = found.at(self._coded, self._device)
        index = None
        if len(coded):
            index = index_weights(self._old, coded, self._models, work.dtype)
        _check_heads(found, work)
        words = sending.send([streams.payload for streams in work.streams])
        _check_padding(found, words, work.dtype)
        payload = sending.arrived()
        dense = found.at(self._dense, self._device) if len(self._dense) else None
        counts = np.zeros(len(found.piece), dtype=np.int64)
        counts[self._coded] = found.head[self._coded] & EVENT_MASK
        n_expected = self._n_expected(index)
        counts[self._coded] += n_expected
        if dense is not None:
            counts[self._dense] = to_host(count_dense(self._old, dense, payload, work.dtype))
        firsts = np.cumsum(counts) - counts
        positions, bits = self._room(int(counts.sum()))
        if dense is not None:
            (first,) = send_tables([firsts[self._dense]], self._device)
            list_dense(self._old, dense, payload, work.dtype, first, positions, bits)
        n_changed = counts
        if index is not None:
            (first,) = send_tables([firsts[self._coded]], self._device)
            n_changed = counts.copy()
            n_changed[self._coded] = self._list_coded(
                coded, payload, index, int(n_expected.sum()), first, positions, bits
            )
        return self._split(counts, n_changed, positions, bits)

    def _room(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.empty(n, dtype=torch.int32, device=self._device),
            torch.empty(n, dtype=self._work.olds[0].dtype, device=self._device),
        )

    def _n_expected(self, index: WeightIndex | None) -> npt.NDArray[np.int32]:
        """How many elements of each coded chunk are expected to change."""
        if index is None or not self._models.has_expected:
            return np.zeros(len(self._coded), dtype=np.int32)
        counts: npt.NDArray[np.int32] = to_host(index.n_expected)
        return counts

    def _list_coded(
        self,
        chunks: CodedChunks,
        payload: torch.Tensor,
        index: WeightIndex,
        n_expected: int,
        first: torch.Tensor,
        positions: torch.Tensor,
        bits: torch.Tensor,
    ) -> npt.NDArray[np.int32]:
        """List the changes of coded chunks, and say how many each one has."""
        dtype, models, old = self._work.dtype, self._models, self._old
        expected = list_expected(old, chunks, index, models, dtype, n_expected)
        popped = pop_gaps(
            old, chunks, payload, models, dtype, index, expected, first, positions, bits
        )
        most_tokens = int(self._work.models.n_tokens.max())
        pop_steps(
            chunks, popped, payload, models, most_tokens, dtype, expected, first, positions, bits
        )
        told = to_host(popped.told)
        trouble = int(told[0].max())
        if trouble:
            raise CorruptStream(TROUBLES[trouble])
        n_changed: npt.NDArray[np.int32] = told[1]
        return n_changed

    def _split(
        self,
        counts: npt.NDArray[np.int64],
        n_changed: npt.NDArray[np.int64],
        positions: torch.Tensor,
        bits: torch.Tensor,
    ) -> list[DeviceChanges]:
        """Every piece's share."""
        borders = [0, *np.cumsum(self._directory.by_piece(counts)).tolist()]
        changed = self._directory.by_piece(n_changed).tolist()
        return [
            DeviceChanges(positions[first:last], bits[first:last], n)
            for (first, last), n in zip(pairwise(borders), changed, strict=True)
        ]


def _directory(work: Work) -> _Directory:
    counts = np.array([len(streams.directory) for streams in work.streams], dtype=np.int64)
    sizes = np.array([old.numel() for old in work.olds], dtype=np.int64)
    log2s = work.chunk_log2s
    if not np.array_equal(counts, -(-sizes >> log2s)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    borders = np.concatenate([[0], np.cumsum(counts)])
    piece = np.repeat(np.arange(len(counts)), counts)
    log2 = log2s[piece]
    start = (np.arange(len(piece)) - borders[piece]) << log2
    rows = np.concatenate([streams.directory for streams in work.streams])
    head, n_words = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    found = _Directory(
        borders,
        piece,
        start,
        np.minimum(sizes[piece] - start, 1 << log2),
        head,
        np.cumsum(n_words) - n_words,
        n_words,
    )
    _check_payloads(found, work.streams)
    return found


def _check_payloads(found: _Directory, streams: Sequence[Streams]) -> None:
    n_bytes = np.array([len(each.payload) for each in streams], dtype=np.int64)
    _refuse(4 * found.by_piece(found.n_words) != n_bytes, "payload does not match its directory")


def _check_heads(found: _Directory, work: Work) -> None:
    head, n, n_words = found.head, found.n_elements, found.n_words
    _refuse((n_words == 0) & (head != 0), "an empty chunk has a head")
    is_dense, is_coded = found.is_dense, found.is_coded
    dense_words = (n * work.dtype.n_bytes + 3) // 4
    _refuse(
        is_dense & ((head != DENSE) | (n_words != dense_words)), "a dense chunk has the wrong size"
    )
    rate = head >> 24
    is_odd = ((head & _RESERVED) != 0) | ((head & EVENT_MASK) > n) | (rate > MAX_RATE)
    _refuse(is_coded & is_odd, "a chunk's head is out of range")
    heaviest = work.models.log2_weights.max(axis=1).astype(np.int64)
    is_heavy = heaviest[found.piece] > rate // 8 + HEADROOM_LOG2
    _refuse(is_coded & is_heavy, "a chunk's rate is too high for its weights")
    is_short = n_words < 2 + ((head & EXCEPTIONS) != 0)
    _refuse(is_coded & is_short, "stream is shorter than the coder's state")


def _check_padding(found: _Directory, payload: npt.NDArray[np.uint32], dtype: DType) -> None:
    n_spare = -found.n_elements * dtype.n_bytes % 4
    is_padded = found.is_dense & (n_spare > 0)
    last = payload[(found.first_word + found.n_words - 1)[is_padded]].astype(np.uint64)
    _refuse(
        last >> (32 - 8 * n_spare[is_padded]).astype(np.uint64) != 0,
        "a dense chunk's padding is not zero",
    )


def _refuse(is_wrong: Any, what: str) -> None:
    if np.any(is_wrong):
        raise CorruptStream(what)
