"""The compact decoder on a GPU: coded pieces in, changes out, beside the weights they are for.

Nothing is written to the weights. While the device looks at the old bits, the host checks heads and
sizes, joins the payload and sends it. What only the streams can tell is checked by the kernels that
read them, and told after the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import Streams
from weightwire.kernels.reference import EVENT_MASK
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.dense import count_dense, list_dense
from weightwire.kernels.triton.directory import check_heads, check_padding, read_directory
from weightwire.kernels.triton.downloads import beside, mark, to_host
from weightwire.kernels.triton.launch import Bucket
from weightwire.kernels.triton.memories import sizes_of
from weightwire.kernels.triton.merge import merge_expected
from weightwire.kernels.triton.models import DeviceModels, ModelArrays
from weightwire.kernels.triton.pop import TROUBLES, Popped, pop_gaps
from weightwire.kernels.triton.pop_steps import pop_steps
from weightwire.kernels.triton.uploads import Sending, send_tables
from weightwire.kernels.triton.weight_index import (
    CodedChunks,
    Expected,
    WeightIndex,
    index_weights,
    list_expected,
)
from weightwire.model import DType


@dataclass(frozen=True)
class Work:
    """Coded pieces of one element type, and the old bits they are decoded against."""

    olds: Sequence[torch.Tensor]
    streams: Sequence[Streams]
    models: ModelArrays
    chunk_log2s: npt.NDArray[np.int64]
    dtype: DType


@dataclass(frozen=True)
class _Listed:
    """Coded chunks whose places are listed, one entry per chunk."""

    popped: Popped
    n_expected: torch.Tensor
    n_coded: torch.Tensor
    """Of its changes, those that the coder has steps for."""


def decode_compact_all(work: Work) -> list[DeviceChanges]:
    """The changes every piece stands for.

    Raises:
        CorruptStream: streams that no encoder writes.
        StopError: old bits of different types or devices, or with gaps.
    """
    return _Decoder(work).decode()


class _Decoder:
    """Pieces on their way back to changes."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._device = work.olds[0].device
        sizes = np.array(sizes_of(work.olds), dtype=np.int64)
        self._old: Bucket = _bucket(work.olds, sizes)
        self._directory = read_directory(work.streams, work.chunk_log2s, sizes)
        self._coded = np.flatnonzero(self._directory.is_coded)
        self._dense = np.flatnonzero(self._directory.is_dense)
        self._models = DeviceModels(work.models, work.dtype, self._device)
        self._index: WeightIndex | None = None
        self._is_indexed: torch.cuda.Event | None = None

    def decode(self) -> list[DeviceChanges]:
        """Count what only the old bits can tell, then list."""
        found, work = self._directory, self._work
        sending = Sending(int(found.n_words.sum()), self._device)
        coded = found.at(self._coded, self._device)
        if len(coded):
            self._index = index_weights(self._old, coded, self._models, work.dtype)
        self._is_indexed = mark(self._device)
        check_heads(found, work.models, work.dtype)
        check_padding(found, work.streams, work.dtype)
        sending.send([streams.payload for streams in work.streams])
        payload = sending.arrived()
        dense = found.at(self._dense, self._device)
        counts = self._counts(dense, payload)
        firsts = np.cumsum(counts) - counts
        positions = torch.empty(int(counts.sum()), dtype=torch.int32, device=self._device)
        (first,) = send_tables([firsts[self._coded]], self._device)
        n_expected = int((counts - self._n_events)[self._coded].sum())
        found_places = self._find_places(coded, payload, n_expected, first, positions)
        # What comes now has its room instead of the sums, which nobody asks for any more.
        self._index = None
        bits = torch.empty(len(positions), dtype=work.olds[0].dtype, device=self._device)
        listed = self._merge(coded, found_places, first, positions, bits)
        if len(dense):
            (first_dense,) = send_tables([firsts[self._dense]], self._device)
            list_dense(self._old, dense, payload, work.dtype, first_dense, positions, bits)
        # Cut while the device still lists.
        shares = self._split(counts, positions, bits)
        if listed is not None:
            pop_steps(
                coded, listed.popped, payload, self._models, int(work.models.n_tokens.max()),
                work.dtype, listed.n_expected, listed.n_coded, first, positions, bits,
            )  # fmt: skip
        n_changed = found.by_piece(self._n_changed(counts, listed)).tolist()
        return [DeviceChanges(*share, n) for share, n in zip(shares, n_changed, strict=True)]

    @property
    def _n_events(self) -> npt.NDArray[np.int64]:
        """Of every chunk; none if it is not coded."""
        found = self._directory
        return np.where(found.is_coded, found.head & EVENT_MASK, 0)

    def _counts(self, dense: CodedChunks, payload: torch.Tensor) -> npt.NDArray[np.int64]:
        """What every chunk lists: changes, or events and expected elements."""
        counts = self._n_events
        if self._index is not None and self._models.has_expected:
            counts[self._coded] += to_host(self._index.marks.counts)
        if len(dense):
            counts[self._dense] = to_host(count_dense(self._old, dense, payload, self._work.dtype))
        return counts

    def _find_places(
        self,
        chunks: CodedChunks,
        payload: torch.Tensor,
        n_expected: int,
        first: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[Popped, Expected] | None:
        """Where coded chunks have events, if there are any; what they expect is listed beside that."""
        dtype, models, old, index = self._work.dtype, self._models, self._old, self._index
        if index is None:
            return None
        with beside(self._device, self._is_indexed):
            expected = list_expected(old, chunks, index.marks, models, dtype, n_expected)
            is_listed = mark(self._device)
        counts = index.marks.counts
        popped = pop_gaps(old, chunks, payload, models, dtype, index, counts, first, positions)
        if is_listed is not None:
            torch.cuda.current_stream(self._device).wait_event(is_listed)
        return popped, expected

    def _merge(
        self,
        chunks: CodedChunks,
        places: tuple[Popped, Expected] | None,
        first: torch.Tensor,
        positions: torch.Tensor,
        bits: torch.Tensor,
    ) -> _Listed | None:
        """Bring both together, with their old bits."""
        if places is None:
            return None
        popped, expected = places
        n_coded = merge_expected(
            self._old, chunks, popped, self._models, self._work.dtype, expected, first,
            positions, bits,
        )  # fmt: skip
        return _Listed(popped, expected.counts, n_coded)

    def _n_changed(
        self, counts: npt.NDArray[np.int64], listed: _Listed | None
    ) -> npt.NDArray[np.int64]:
        """How many changes every chunk has, once all is done."""
        if listed is None:
            return counts
        told = to_host(listed.popped.told)
        trouble = int(told[0].max())
        if trouble:
            raise CorruptStream(TROUBLES[trouble])
        n_changed: npt.NDArray[np.int64] = counts.copy()
        n_changed[self._coded] = told[1]
        return n_changed

    def _split(
        self, counts: npt.NDArray[np.int64], positions: torch.Tensor, bits: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every piece's share."""
        sizes = self._directory.by_piece(counts).tolist()
        return zip(positions.split(sizes), bits.split(sizes), strict=True)


def _bucket(olds: Sequence[torch.Tensor], sizes: npt.NDArray[np.int64]) -> Bucket:
    """Without spans: chunks say what is looked at."""
    addresses = np.array([old.data_ptr() for old in olds], dtype=np.int64)
    none = np.zeros(0, dtype=np.int32)
    return Bucket(tuple(olds), *send_tables([addresses, sizes, none, none], olds[0].device))
