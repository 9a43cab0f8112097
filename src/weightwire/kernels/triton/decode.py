"""The compact decoder on a GPU: coded pieces in, changes out, beside the weights they are for.

Nothing is written to the weights. Heads and sizes are checked on the host before anything is sent;
what only the streams can tell is checked by the kernels, and told after the last of them.
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
from weightwire.kernels.triton.launch import Bucket, make_bucket, to_device
from weightwire.kernels.triton.models import DeviceModels, ModelArrays, upload
from weightwire.kernels.triton.pop import (
    TROUBLES,
    CodedChunks,
    count_expected,
    pop_gaps,
    pop_steps,
    room_for_expected,
)
from weightwire.kernels.triton.staging import send_joined, to_host
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

    def some(self, numbers: npt.NDArray[np.intp]) -> Work:
        """A few of the pieces."""
        return Work(
            [self.olds[n] for n in numbers],
            [self.streams[n] for n in numbers],
            self.models.some(numbers),
            self.chunk_log2s[numbers],
            self.dtype,
        )


@dataclass(frozen=True)
class _Directory:
    """Every chunk of every piece, on the host."""

    piece: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    n_elements: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    first_word: npt.NDArray[np.int64]
    n_words: npt.NDArray[np.int64]

    def at(self, chosen: npt.NDArray[np.bool_], device: torch.device) -> CodedChunks:
        """Some of them, on the device."""

        def send(values: npt.NDArray[np.int64], kind: Any) -> torch.Tensor:
            return to_device(values[chosen].astype(kind), device)

        return CodedChunks(
            send(self.piece, np.int32), send(self.start, np.int64), send(self.n_elements, np.int64),
            send(self.head, np.uint32).view(torch.int32), send(self.first_word, np.int64),
            send(self.n_words, np.int32),
        )  # fmt: skip


def decode_compact_all(work: Work) -> list[DeviceChanges]:
    """The changes every piece stands for.

    Raises:
        CorruptStream: streams that no encoder writes.
    """
    done: dict[int, DeviceChanges] = {}
    is_expecting = work.models.expected.any(axis=1)
    for numbers in (np.flatnonzero(~is_expecting), np.flatnonzero(is_expecting)):
        # Where classes are expected to change, those elements must be counted beforehand.
        if len(numbers):
            found = _Decoder(work.some(numbers)).decode()
            done.update(zip(numbers.tolist(), found, strict=True))
    return [done[number] for number in range(len(work.olds))]


class _Decoder:
    """Some pieces on their way back to changes."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._directory = _directory(work)
        _check_heads(self._directory, work)
        device = work.olds[0].device
        # Never empty: a kernel may look at the first word of nothing.
        parts = [*map(_words, work.streams), np.zeros(1, dtype=np.uint32)]
        self._payload, words = send_joined(parts, device)
        _check_padding(self._directory, words, work.dtype)
        self._old: Bucket = make_bucket(work.olds, 1 << 20)
        self._models: DeviceModels = upload(work.models, work.dtype, device)

    def decode(self) -> list[DeviceChanges]:
        """Count what only the old bits can tell, then list."""
        found, dtype, device = self._directory, self._work.dtype, self._payload.device
        is_dense = (found.n_words > 0) & ((found.head & DENSE) != 0)
        is_coded = (found.n_words > 0) & ~is_dense
        coded, dense = found.at(is_coded, device), found.at(is_dense, device)
        counts = np.where(is_coded, found.head & EVENT_MASK, 0)
        n_expected = self._count_expected(coded)
        counts[is_coded] += n_expected
        if len(dense):
            counts[is_dense] = to_host(count_dense(self._old, dense, self._payload, dtype))
        firsts = np.cumsum(counts) - counts
        positions, bits = self._room(int(counts.sum()))
        n_changed = counts.copy()
        if len(dense):
            first = to_device(firsts[is_dense], device)
            list_dense(self._old, dense, self._payload, dtype, first, positions, bits)
        if len(coded):
            first = to_device(firsts[is_coded], device)
            n_changed[is_coded] = self._list_coded(coded, n_expected, first, positions, bits)
        return self._split(counts, n_changed, positions, bits)

    def _room(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._payload.device
        return (
            torch.empty(n, dtype=torch.int32, device=device),
            torch.empty(n, dtype=self._work.olds[0].dtype, device=device),
        )

    def _count_expected(self, chunks: CodedChunks) -> npt.NDArray[np.int32]:
        if not self._models.has_expected or not len(chunks):
            return np.zeros(len(chunks), dtype=np.int32)
        counts: npt.NDArray[np.int32] = to_host(
            count_expected(self._old, chunks, self._models, self._work.dtype)
        )
        return counts

    def _list_coded(
        self,
        chunks: CodedChunks,
        n_expected: npt.NDArray[np.int32],
        first: torch.Tensor,
        positions: torch.Tensor,
        bits: torch.Tensor,
    ) -> npt.NDArray[np.int32]:
        dtype, models, payload = self._work.dtype, self._models, self._payload
        counts = to_device(n_expected, payload.device)
        expected = room_for_expected(counts, int(n_expected.sum()), bits)
        popped = pop_gaps(
            self._old, chunks, payload, models, dtype, expected, first, positions, bits
        )
        pop_steps(chunks, popped, payload, models, dtype, expected, first, positions, bits)
        told = to_host(torch.stack([popped.trouble, popped.n_changed]))
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
        n_pieces, piece = len(self._work.olds), self._directory.piece
        sizes = np.bincount(piece, weights=counts, minlength=n_pieces).astype(np.int64)
        changed = np.bincount(piece, weights=n_changed, minlength=n_pieces).astype(np.int64)
        borders = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        return [
            DeviceChanges(positions[first:last], bits[first:last], n)
            for (first, last), n in zip(pairwise(borders), changed.tolist(), strict=True)
        ]


def _words(streams: Streams) -> npt.NDArray[np.uint32]:
    n_promised = 4 * int(streams.directory[:, 1].sum(dtype=np.uint64))
    if n_promised != len(streams.payload):
        raise CorruptStream("payload does not match its directory")
    return np.ascontiguousarray(streams.payload).view("<u4")


def _directory(work: Work) -> _Directory:
    counts = np.array([len(streams.directory) for streams in work.streams], dtype=np.int64)
    sizes = np.array([old.numel() for old in work.olds], dtype=np.int64)
    log2s = work.chunk_log2s
    if not np.array_equal(counts, -(-sizes >> log2s)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    piece = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number << log2s[piece]
    rows = np.concatenate([streams.directory for streams in work.streams]).astype(np.int64)
    return _Directory(
        piece,
        start,
        np.minimum(sizes[piece] - start, 1 << log2s[piece]),
        rows[:, 0],
        np.cumsum(rows[:, 1]) - rows[:, 1],
        rows[:, 1],
    )


def _check_heads(found: _Directory, work: Work) -> None:
    head, n, n_words = found.head, found.n_elements, found.n_words
    _refuse((n_words == 0) & (head != 0), "an empty chunk has a head")
    is_dense = (n_words > 0) & ((head & DENSE) != 0)
    dense_words = (n * work.dtype.n_bytes + 3) // 4
    _refuse(
        is_dense & ((head != DENSE) | (n_words != dense_words)), "a dense chunk has the wrong size"
    )
    is_coded = (n_words > 0) & ~is_dense
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
    is_padded = (found.n_words > 0) & ((found.head & DENSE) != 0) & (n_spare > 0)
    last = payload[(found.first_word + found.n_words - 1)[is_padded]].astype(np.uint64)
    _refuse(last >> (32 - 8 * n_spare[is_padded]).astype(np.uint64) != 0, _PADDING)


_PADDING = "a dense chunk's padding is not zero"


def _refuse(is_wrong: Any, what: str) -> None:
    if np.any(is_wrong):
        raise CorruptStream(what)
