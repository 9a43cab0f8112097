"""The compact decoder on a GPU: coded pieces in, changes out, beside the weights they are for.

Nothing is written to the weights. While the device looks at the old bits, the host checks heads and
sizes, joins the payload and sends it. What only the streams can tell is checked by the kernels that
read them, and told after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import CorruptStream, StopError
from weightwire.kernels.contract import Streams
from weightwire.kernels.model_batch import ModelBatch
from weightwire.kernels.reference import EVENT_MASK
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.dense import count_dense, list_dense
from weightwire.kernels.triton.directory import (
    Numbers,
    borders_of,
    check_heads,
    check_padding,
    check_payloads,
    numbers_of,
    read_directories,
)
from weightwire.kernels.triton.downloads import beside, mark, to_host
from weightwire.kernels.triton.launch import Bucket
from weightwire.kernels.triton.memories import addresses_of, alignment_of, check_alike, sizes_of
from weightwire.kernels.triton.merge import merge_expected
from weightwire.kernels.triton.models import DeviceModels
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
    n_elements: Sequence[int]
    streams: Sequence[Streams]
    models: ModelBatch
    dtype: DType


@dataclass(frozen=True)
class _Chosen:
    """The numbers of some chunks, to choose them by: on the host, and on the device."""

    here: Numbers
    there: slice | torch.Tensor


@dataclass(frozen=True)
class _Room:
    """What every chunk lists, and where."""

    counts: torch.Tensor
    """int32, per chunk: changes, or events and expected elements."""
    first: torch.Tensor
    """int64, per chunk."""
    by_piece: list[int]
    n_expected: int


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
        StopError: old bits of different types or devices, with gaps, or not all of a piece's.
    """
    return _Decoder(work).decode()


class _Decoder:
    """Pieces on their way back to changes."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._device = work.olds[0].device
        # First of all: it takes as long as to look at the weights, and goes by itself.
        self._payloads = [streams.payload for streams in work.streams]
        self._sending = Sending(self._payloads, self._device)
        check_alike(work.olds)
        sizes = sizes_of(work.olds)
        if sizes.tolist() != list(work.n_elements):
            raise StopError("a compact piece is decoded against its old bits, all of them")
        chunk_log2s = work.models.chunk_log2.astype(np.int64)
        directories = [streams.directory for streams in work.streams]
        self._chunks = read_directories(directories, chunk_log2s, sizes)
        self._borders = borders_of(sizes, chunk_log2s)
        self._old, self._sent_borders = self._send(sizes)
        self._coded = self._chosen(self._chunks.is_coded)
        self._dense = self._chosen(self._chunks.is_dense)
        self._models = DeviceModels(work.models, work.dtype, self._device)
        self._index: WeightIndex | None = None
        self._is_indexed: torch.cuda.Event | None = None

    def _send(self, sizes: npt.NDArray[np.int64]) -> tuple[Bucket, torch.Tensor]:
        """The old bits, without spans: chunks say what is looked at; and the pieces' borders."""
        olds = self._work.olds
        addresses = addresses_of(olds)
        at, lengths, sent = send_tables([addresses, sizes, self._borders], self._device)
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        alignment = alignment_of(addresses, self._work.dtype.n_bytes)
        return Bucket(tuple(olds), at, lengths, none, none, alignment), sent

    def decode(self) -> list[DeviceChanges]:
        """Count what only the old bits can tell, then list."""
        found, work = self._chunks, self._work
        coded = found.at(self._coded.here, self._device)
        if len(coded):
            self._index = index_weights(self._old, coded, self._models, work.dtype)
        self._is_indexed = mark(self._device)
        check_payloads(found, self._borders, self._payloads)
        check_heads(found, work.models, work.dtype)
        check_padding(found, work.streams, work.dtype)
        dense = found.at(self._dense.here, self._device)
        payload = self._sending.arrived()
        room = self._room(coded, dense, payload)
        positions = torch.empty(sum(room.by_piece), dtype=torch.int32, device=self._device)
        first = room.first[self._coded.there]
        found_places = self._find_places(coded, payload, room.n_expected, first, positions)
        # What comes now has its room instead of the sums, which nobody asks for any more.
        self._index = None
        bits = torch.empty(len(positions), dtype=work.olds[0].dtype, device=self._device)
        listed = self._merge(coded, found_places, first, positions, bits)
        if len(dense):
            first_dense = room.first[self._dense.there]
            list_dense(self._old, dense, payload, work.dtype, first_dense, positions, bits)
        # Cut while the device still lists.
        shares = positions.split(room.by_piece), bits.split(room.by_piece)
        if listed is not None:
            pop_steps(
                coded, listed.popped, payload, self._models, int(work.models.n_tokens.max()),
                work.dtype, listed.n_expected, listed.n_coded, first, positions, bits,
            )  # fmt: skip
        return list(map(DeviceChanges, *shares, self._n_changed(room, listed)))

    def _room(self, coded: CodedChunks, dense: CodedChunks, payload: torch.Tensor) -> _Room:
        """What every chunk has room for; waits until that is known."""
        counts = torch.zeros(len(self._chunks.piece), dtype=torch.int32, device=self._device)
        n_expected = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._index is not None:
            expected = self._index.marks.counts
            counts[self._coded.there] = (coded.head & EVENT_MASK) + expected
            n_expected = expected.sum(0, keepdim=True)
        if len(dense):
            counted = count_dense(self._old, dense, payload, self._work.dtype)
            counts[self._dense.there] = counted
        ends = counts.cumsum(0, dtype=torch.int64)
        *by_piece, n_all_expected = to_host(torch.cat([self._by_piece(ends), n_expected])).tolist()
        return _Room(counts, ends - counts, by_piece, n_all_expected)

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
        counts = index.marks.counts
        # First: its lanes wait for memory most of the time, and leave room for the other.
        popped = pop_gaps(old, chunks, payload, models, dtype, index, counts, first, positions)
        with beside(self._device, self._is_indexed, "expected", is_urgent=False):
            expected = list_expected(old, chunks, index.marks, models, dtype, n_expected)
            is_listed = mark(self._device)
        if is_listed is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(is_listed)
            # Made over there, and given up here.
            expected.places.record_stream(here)
            expected.first.record_stream(here)
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

    def _n_changed(self, room: _Room, listed: _Listed | None) -> list[int]:
        """How many changes every piece has, once all is done."""
        if listed is None:
            return room.by_piece
        trouble, n_changed = listed.popped.told
        room.counts[self._coded.there] = n_changed
        sums = self._by_piece(room.counts.cumsum(0, dtype=torch.int64))
        by_piece: list[int]
        *by_piece, worst = to_host(torch.cat([sums, trouble.max().long()[None]])).tolist()
        if worst:
            raise CorruptStream(TROUBLES[worst])
        return by_piece

    def _by_piece(self, ends: torch.Tensor) -> torch.Tensor:
        """Sums over every piece's chunks, from those up to every chunk."""
        return torch.cat([ends.new_zeros(1), ends])[self._sent_borders].diff()

    def _chosen(self, is_chosen: npt.NDArray[np.bool_]) -> _Chosen:
        here = numbers_of(is_chosen)
        there = here if isinstance(here, slice) else send_tables([here], self._device)[0]
        return _Chosen(here, there)
