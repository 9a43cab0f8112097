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
from weightwire.kernels.contract import DENSE, ClassModel, Streams
from weightwire.kernels.gaps import HEADROOM_LOG2, MAX_RATE
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.dense import list_dense
from weightwire.kernels.triton.launch import Bucket, make_bucket, to_device
from weightwire.kernels.triton.models import DeviceModels, arrays_of, upload
from weightwire.kernels.triton.pop import CodedChunks, gap_slots, pop_gaps, pop_steps
from weightwire.model import DType

_TROUBLES = (
    "",
    "a position lies past the end of its chunk",
    "stream does not end where it must",
    "an exception is out of order or out of range",
)
_RESERVED = 1 << 23


@dataclass(frozen=True)
class CodedPiece:
    """A piece as a file holds it, and the old bits it is decoded against."""

    old: torch.Tensor
    model: ClassModel
    chunk_log2: int
    streams: Streams


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


def decode_compact_all(pieces: Sequence[CodedPiece], dtype: DType) -> list[DeviceChanges]:
    """The changes every piece stands for.

    Raises:
        CorruptStream: streams that no encoder writes.
    """
    done: list[DeviceChanges | None] = [None] * len(pieces)
    for is_expecting in (False, True):
        # Where classes are expected to change, changes must be counted before they can be listed.
        numbers = [n for n, p in enumerate(pieces) if any(p.model.expected) == is_expecting]
        if numbers:
            found = _Decoder([pieces[n] for n in numbers], dtype).decode()
            for number, changes in zip(numbers, found, strict=True):
                done[number] = changes
    return [changes for changes in done if changes is not None]


class _Decoder:
    """Some pieces on their way back to changes."""

    def __init__(self, pieces: Sequence[CodedPiece], dtype: DType) -> None:
        self._dtype, self._pieces = dtype, pieces
        self._directory = _directory(pieces)
        _check_heads(self._directory, pieces, dtype)
        device = pieces[0].old.device
        payload = np.concatenate([_words(piece.streams) for piece in pieces])
        _check_padding(self._directory, payload, dtype)
        # Never empty: a kernel may look at the first word of nothing.
        self._payload = to_device(np.append(payload, 0).astype(np.uint32).view(np.int32), device)
        self._old: Bucket = make_bucket([piece.old for piece in pieces], 1 << 20)
        self._models: DeviceModels = upload(arrays_of([piece.model for piece in pieces]), device)
        self._slots = gap_slots(device)

    def decode(self) -> list[DeviceChanges]:
        """Count where it must be counted, then list."""
        head, n_words = self._directory.head, self._directory.n_words
        is_dense = (n_words > 0) & ((head & DENSE) != 0)
        is_coded = (n_words > 0) & ~is_dense
        device = self._payload.device
        coded, dense = (self._directory.at(chosen, device) for chosen in (is_coded, is_dense))
        counts = np.where(is_coded, head & EVENT_MASK, 0)
        if self._models.has_expected:
            counts[is_coded] = self._list_coded(coded, None).cpu().numpy()
        counts[is_dense] = self._list_dense(dense, None).cpu().numpy()
        return self._listed(counts, (coded, is_coded), (dense, is_dense))

    def _listed(
        self,
        counts: npt.NDArray[np.int64],
        coded: tuple[CodedChunks, npt.NDArray[np.bool_]],
        dense: tuple[CodedChunks, npt.NDArray[np.bool_]],
    ) -> list[DeviceChanges]:
        ends = np.cumsum(counts)
        n_changed = int(ends[-1]) if len(ends) else 0
        device = self._payload.device
        out = DeviceChanges(
            torch.empty(n_changed, dtype=torch.int32, device=device),
            torch.empty(n_changed, dtype=self._pieces[0].old.dtype, device=device),
        )
        firsts = ends - counts
        self._list_dense(dense[0], (to_device(firsts[dense[1]], device), out))
        self._list_coded(coded[0], (to_device(firsts[coded[1]], device), out))
        by_piece = np.bincount(self._directory.piece, weights=counts, minlength=len(self._pieces))
        borders = np.concatenate([[0], np.cumsum(by_piece)]).astype(np.int64).tolist()
        return [
            DeviceChanges(out.positions[first:last], out.bits[first:last])
            for first, last in pairwise(borders)
        ]

    def _list_dense(
        self, chunks: CodedChunks, out: tuple[torch.Tensor, DeviceChanges] | None
    ) -> torch.Tensor:
        first, positions, bits = self._rooms(chunks, out)
        return list_dense(
            self._old, chunks, self._payload, self._dtype, first, positions, bits,
            is_only_counted=out is None,
        )  # fmt: skip

    def _list_coded(
        self, chunks: CodedChunks, out: tuple[torch.Tensor, DeviceChanges] | None
    ) -> torch.Tensor:
        first, positions, bits = self._rooms(chunks, out)
        if not len(chunks):
            return torch.empty(0, dtype=torch.int32, device=self._payload.device)
        popped = pop_gaps(
            self._old, chunks, self._payload, self._models, self._dtype, self._slots,
            first, positions, bits, is_only_counted=out is None,
        )  # fmt: skip
        if out is not None:
            pop_steps(chunks, popped, self._payload, self._models, self._dtype, first, bits)
        trouble = int(popped.trouble.max())
        if trouble:
            raise CorruptStream(_TROUBLES[trouble])
        return popped.n_changed

    def _rooms(
        self, chunks: CodedChunks, out: tuple[torch.Tensor, DeviceChanges] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if out is not None:
            return out[0], out[1].positions, out[1].bits
        nowhere = torch.zeros(max(len(chunks), 1), dtype=torch.int64, device=self._payload.device)
        return nowhere, nowhere.int(), self._pieces[0].old[:0].clone()


def _words(streams: Streams) -> npt.NDArray[np.uint32]:
    n_promised = 4 * int(streams.directory[:, 1].sum(dtype=np.uint64))
    if n_promised != len(streams.payload):
        raise CorruptStream("payload does not match its directory")
    return np.ascontiguousarray(streams.payload).view("<u4")


def _directory(pieces: Sequence[CodedPiece]) -> _Directory:
    counts = np.array([len(piece.streams.directory) for piece in pieces], dtype=np.int64)
    sizes = np.array([len(piece.old) for piece in pieces], dtype=np.int64)
    log2s = np.array([piece.chunk_log2 for piece in pieces], dtype=np.int64)
    if not np.array_equal(counts, -(-sizes >> log2s)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    piece = np.repeat(np.arange(len(pieces)), counts)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number << log2s[piece]
    rows = np.concatenate([piece.streams.directory for piece in pieces]).astype(np.int64)
    return _Directory(
        piece,
        start,
        np.minimum(sizes[piece] - start, 1 << log2s[piece]),
        rows[:, 0],
        np.cumsum(rows[:, 1]) - rows[:, 1],
        rows[:, 1],
    )


def _check_heads(found: _Directory, pieces: Sequence[CodedPiece], dtype: DType) -> None:
    head, n, n_words = found.head, found.n_elements, found.n_words
    _refuse((n_words == 0) & (head != 0), "an empty chunk has a head")
    is_dense = (n_words > 0) & ((head & DENSE) != 0)
    dense_words = (n * dtype.n_bytes + 3) // 4
    _refuse(
        is_dense & ((head != DENSE) | (n_words != dense_words)), "a dense chunk has the wrong size"
    )
    is_coded = (n_words > 0) & ~is_dense
    rate = head >> 24
    is_odd = ((head & _RESERVED) != 0) | ((head & EVENT_MASK) > n) | (rate > MAX_RATE)
    _refuse(is_coded & is_odd, "a chunk's head is out of range")
    heaviest = np.array([max(piece.model.log2_weights) for piece in pieces], dtype=np.int64)
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
