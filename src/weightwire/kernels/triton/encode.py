"""The compact encoder on a GPU: pieces in, the reference's bytes out.

    collect ─▶ arrange ─▶ push ─▶ join
    every      every      every chunk,
    element    listed one a lane each

Pieces are coded in *slabs*, as many at a time as the memory budget allows. A slab costs the host
two looks at a few numbers, however many tensors it holds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels import kernels
from weightwire.kernels.contract import Streams
from weightwire.kernels.triton.arrange import Chunks, add_up, arrange
from weightwire.kernels.triton.assemble import join, pairs_of, rows_of
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.collect import TILE_ELEMENTS, Tiles, collect
from weightwire.kernels.triton.launch import Bucket, make_bucket, spans_of, to_device
from weightwire.kernels.triton.models import DeviceModels, ModelArrays, upload
from weightwire.kernels.triton.push import push
from weightwire.kernels.triton.staging import to_host
from weightwire.model import DType

_LOG = logging.getLogger(__name__)

_PLACE_BYTES = 4
"""For each listed element that a tile has room for."""

_LISTED_BYTES = 20
"""For each listed element on its way through the coder."""

_TILE_BYTES = 40
"""A tile's sums, and its share of the tables that lead to it."""

_ROOMS = np.array([16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, TILE_ELEMENTS])
"""Few different ones, so that most pieces are coded together."""

MIN_BUDGET = 64 << 20


@dataclass(frozen=True)
class Coded:
    """A coded piece: streams on the host, and the changes on the device where they were kept."""

    streams: Streams
    changes: DeviceChanges | None = None


@dataclass(frozen=True)
class Work:
    """Pieces of one element type, with their models: everything the encoder is told."""

    olds: Sequence[torch.Tensor]
    news: Sequence[torch.Tensor]
    dtype: DType
    models: ModelArrays
    chunk_log2s: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]
    """How many elements of each piece's sample are listed: changed, or expected to."""

    def some(self, numbers: Sequence[int]) -> Work:
        """A few of the pieces."""
        at = np.array(numbers, dtype=np.intp)
        return Work(
            [self.olds[n] for n in numbers], [self.news[n] for n in numbers], self.dtype,
            self.models.some(at), self.chunk_log2s[at], self.rates[at],
        )  # fmt: skip


def rooms_for(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """How many listed elements a tile is likely to have at most, given their rate in a sample.

    Changes cluster, so this is more than chance alone would ask for; tiles that need still more
    are found out, and their pieces looked at again.
    """
    mean = rates * TILE_ELEMENTS
    likely = np.ceil(1.5 * mean + 6 * np.sqrt(mean) + 6)
    rooms: npt.NDArray[np.int64] = _ROOMS[np.searchsorted(_ROOMS, np.minimum(likely, _ROOMS[-1]))]
    return rooms


def encode_compact_all(work: Work, *, budget_bytes: int, keep_changes: bool = False) -> list[Coded]:
    """Code every piece as the reference does; ``budget_bytes`` bounds what is allocated meanwhile."""
    done: dict[int, Coded] = {}
    crowded: list[int] = []
    for room, numbers in _slabs(work, budget_bytes):
        found = _Slab(work.some(numbers), room).encode(keep_changes)
        done.update({numbers[n]: coded for n, coded in found.items()})
        crowded += [n for n in numbers if n not in done]
    if crowded:
        _LOG.info("%d pieces change more than their samples showed; once more", len(crowded))
    for number in crowded:
        again = _Slab(work.some([number]), TILE_ELEMENTS).encode(keep_changes)
        done[number] = again.get(0) or _on_host(work, number, keep_changes)
    return [done[number] for number in range(len(work.olds))]


def _slabs(work: Work, budget_bytes: int) -> Iterator[tuple[int, list[int]]]:
    """Pieces that are coded together: with room for the same number, and within the budget."""
    budget = max(budget_bytes, MIN_BUDGET)
    rooms = rooms_for(work.rates)
    for room in np.unique(rooms).tolist():
        slab: list[int] = []
        n_bytes = 0
        for number in np.flatnonzero(rooms == room).tolist():
            n_tiles = -(-work.olds[number].numel() // TILE_ELEMENTS)
            n_listed = float(work.rates[number]) * TILE_ELEMENTS
            tile_bytes = room * _PLACE_BYTES + n_listed * _LISTED_BYTES + _TILE_BYTES
            needed = int(n_tiles * tile_bytes)
            if slab and n_bytes + needed > budget:
                yield room, slab
                slab, n_bytes = [], 0
            slab.append(number)
            n_bytes += needed
        if slab:
            yield room, slab


class _Slab:
    """Some pieces on their way to code."""

    def __init__(self, work: Work, room: int) -> None:
        self._work, self._room = work, room
        device = work.olds[0].device
        sizes = np.array([old.numel() for old in work.olds], dtype=np.int64)
        n_tiles = -(-sizes // TILE_ELEMENTS)
        self._n_tiles = int(n_tiles.sum())
        self._old: Bucket = make_bucket(work.olds, TILE_ELEMENTS)
        self._new: Bucket = make_bucket(work.news, TILE_ELEMENTS)
        self._first_tile = to_device(np.cumsum(n_tiles) - n_tiles, device)
        self._models: DeviceModels = upload(work.models, work.dtype, device)
        self._chunk_counts = -(-sizes >> work.chunk_log2s)
        self._chunk_log2s = to_device(work.chunk_log2s.astype(np.int64), device)

    def encode(self, keep_changes: bool) -> dict[int, Coded]:
        """The pieces that could be coded, by number; the others need more room."""
        if not self._n_tiles:
            return {n: _nothing(self._work, keep_changes) for n in range(len(self._work.olds))}
        dtype = self._work.dtype
        tiles = collect(
            self._old, self._new, self._first_tile, self._n_tiles, self._models, dtype, self._room,
        )  # fmt: skip
        chunks, crowded = self._chunks(tiles)
        rooms = self._rooms(chunks)
        n_room, n_listed = torch.stack([rooms.sum(), chunks.n_listed.sum()]).tolist()
        arranged = arrange(
            tiles, chunks, self._old, self._new, self._first_tile, self._models, dtype, n_listed
        )
        stacks = push(arranged, dtype, rooms, n_room)
        rows = rows_of(chunks, arranged, stacks, dtype.n_bytes)
        short = rows.is_short.int()
        host = to_host(torch.stack([rows.heads, rows.sizes, arranged.n_changed, short]))
        payload = join(
            chunks, arranged, stacks, rows, self._new, self._first_tile, int(host[1].sum()), dtype
        )
        words = to_host(payload)
        kept = None
        if keep_changes:
            kept = pairs_of(
                tiles, chunks, arranged, self._old, self._new, self._first_tile,
                int(host[2].sum()), dtype,
            )  # fmt: skip
        return self._split(host, words, crowded, kept)

    def _chunks(self, tiles: Tiles) -> tuple[Chunks, set[int]]:
        """Every chunk's sums; pieces with a tile that had too little room count as unchanged."""
        device = self._old.device
        piece, number = spans_of(self._chunk_counts, device)
        log2 = self._chunk_log2s[piece.long()]
        start = number.long() << log2
        size = torch.minimum(self._old.sizes[piece.long()] - start, torch.ones_like(start) << log2)
        first_tile = self._first_tile[piece.long()] + start // TILE_ELEMENTS
        chunks = add_up(tiles, piece, first_tile, size)
        if not bool(chunks.is_crowded.any()):
            return chunks, set()
        crowded = torch.unique(piece[chunks.is_crowded != 0])
        is_out = torch.isin(self._old.span_memory, crowded)
        tiles.n_listed.masked_fill_(is_out, 0)
        return add_up(tiles, piece, first_tile, size), set(crowded.tolist())

    def _rooms(self, chunks: Chunks) -> torch.Tensor:
        """Words set aside for each chunk's stack; coded chunks hardly ever need as many."""
        wide = 2 if self._work.dtype.n_bytes == 4 else 1
        dense = (chunks.n_elements * self._work.dtype.n_bytes + 3) // 4
        return torch.minimum(wide * chunks.n_listed.long() + 64, dense).int()

    def _split(
        self,
        host: npt.NDArray[np.int32],
        payload: npt.NDArray[np.int32],
        crowded: set[int],
        kept: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> dict[int, Coded]:
        """Every piece's share of what the slab gave."""
        chunk_ends = np.cumsum(self._chunk_counts)
        sums = np.cumsum(np.pad(host[1:].astype(np.int64), ((0, 0), (1, 0))), axis=1)
        chunks = pairwise([0, *chunk_ends.tolist()])
        words, changes, shorts = (pairwise(row[[0, *chunk_ends]].tolist()) for row in sums)
        directory = np.ascontiguousarray(host[:2].T).view(np.uint32)
        done = {}
        for number, (rows, body, changed, short) in enumerate(
            zip(chunks, words, changes, shorts, strict=True)
        ):
            if number not in crowded and short[0] == short[1]:
                part = payload[slice(*body)].view(np.uint8)
                streams = Streams(directory[slice(*rows)], part, changed[1] - changed[0])
                done[number] = Coded(streams, _part(kept, *changed))
        return done


def _part(
    kept: tuple[torch.Tensor, torch.Tensor] | None, first: int, last: int
) -> DeviceChanges | None:
    return (
        None
        if kept is None
        else DeviceChanges(kept[0][first:last], kept[1][first:last], last - first)
    )


def _nothing(work: Work, keep_changes: bool) -> Coded:
    directory, payload = np.empty((0, 2), dtype=np.uint32), np.empty(0, dtype=np.uint8)
    empty = work.news[0][:0]
    changes = DeviceChanges(empty.to(torch.int32), empty, 0) if keep_changes else None
    return Coded(Streams(directory, payload, 0), changes)


def _on_host(work: Work, number: int, keep_changes: bool) -> Coded:
    """A piece that no room on the device was enough for: its chunks hold what no sample foretold."""
    _LOG.warning("a piece is coded on the host: its steps are unlike those of its sample")
    device, width = work.olds[number].device, work.dtype.bits_dtype
    old, new = (side[number].cpu().numpy().view(width) for side in (work.olds, work.news))
    streams = kernels().encode_compact(
        old, new, work.dtype, work.models.model(number), int(work.chunk_log2s[number]),
        len(os.sched_getaffinity(0)), keep_changes,
    )  # fmt: skip
    if streams.changes is None:
        return Coded(streams)
    positions = to_device(streams.changes.positions.view(np.int32), device)
    bits = to_device(streams.changes.bits.view(work.news[number].cpu().numpy().dtype), device)
    return Coded(replace(streams, changes=None), DeviceChanges(positions, bits, streams.n_changed))
