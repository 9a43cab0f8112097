"""Many pieces, coded in *slabs*: as many at a time as a memory budget allows.

A slab begins with the pass over both states. What follows is the codec's; each costs the host a few
looks at a few numbers, however many tensors a slab holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels.contract import Streams
from weightwire.kernels.triton.arrange import Chunks, add_up
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.collect import TILE_ELEMENTS, Tiles, collect
from weightwire.kernels.triton.launch import Bucket, make_bucket, spans_of, to_device
from weightwire.kernels.triton.models import DeviceModels, ModelArrays, upload
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


def in_slabs(
    work: Work,
    budget_bytes: int,
    code: Callable[[Slab], dict[int, Coded]],
    on_host: Callable[[int], Coded],
) -> list[Coded]:
    """Code every piece; ``code`` gives those of a slab that could be, by number.

    What a slab had too little room for is coded by itself with room for everything, and
    ``on_host`` if even that does not do.
    """
    done: dict[int, Coded] = {}
    crowded: list[int] = []
    for room, numbers in _slabs(work, budget_bytes):
        found = code(Slab(work.some(numbers), room))
        done.update({numbers[n]: coded for n, coded in found.items()})
        crowded += [n for n in numbers if n not in done]
    if crowded:
        _LOG.info("%d pieces change more than their samples showed; once more", len(crowded))
    for number in crowded:
        again = code(Slab(work.some([number]), TILE_ELEMENTS))
        done[number] = again.get(0) or on_host(number)
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


class Slab:
    """Some pieces on their way to code: where everything lies, and how the pass over it is made."""

    def __init__(self, work: Work, room: int) -> None:
        self.work, self._room = work, room
        device = work.olds[0].device
        sizes = np.array([old.numel() for old in work.olds], dtype=np.int64)
        n_tiles = -(-sizes // TILE_ELEMENTS)
        self.n_tiles = int(n_tiles.sum())
        self.old: Bucket = make_bucket(work.olds, TILE_ELEMENTS)
        self.new: Bucket = make_bucket(work.news, TILE_ELEMENTS)
        self.first_tile = to_device(np.cumsum(n_tiles) - n_tiles, device)
        self.models: DeviceModels = upload(work.models, work.dtype, device)
        self.chunk_counts = -(-sizes >> work.chunk_log2s)
        self._chunk_log2s = to_device(work.chunk_log2s.astype(np.int64), device)

    def collect(self) -> tuple[Tiles, Chunks, set[int]]:
        """Look at every element; pieces with a tile that had too little room count as unchanged."""
        tiles = collect(
            self.old,
            self.new,
            self.first_tile,
            self.n_tiles,
            self.models,
            self.work.dtype,
            self._room,
        )
        piece, number = spans_of(self.chunk_counts, self.old.device)
        log2 = self._chunk_log2s[piece.long()]
        start = number.long() << log2
        size = torch.minimum(self.old.sizes[piece.long()] - start, torch.ones_like(start) << log2)
        first_tile = self.first_tile[piece.long()] + start // TILE_ELEMENTS
        chunks = add_up(tiles, piece, first_tile, size)
        if not bool(chunks.is_crowded.any()):
            return tiles, chunks, set()
        crowded = torch.unique(piece[chunks.is_crowded != 0])
        tiles.n_listed.masked_fill_(torch.isin(self.old.span_memory, crowded), 0)
        return tiles, add_up(tiles, piece, first_tile, size), set(crowded.tolist())

    def nothing(self, width: int, keep_changes: bool) -> dict[int, Coded]:
        """What comes of a slab without elements; ``width``: columns of a directory."""
        directory, payload = np.empty((0, width), dtype=np.uint32), np.empty(0, dtype=np.uint8)
        empty = self.work.news[0][:0]
        changes = DeviceChanges(empty.to(torch.int32), empty, 0) if keep_changes else None
        coded = Coded(Streams(directory, payload, 0), changes)
        return dict.fromkeys(range(len(self.work.olds)), coded)


def split(
    chunk_counts: npt.NDArray[np.int64],
    directory: npt.NDArray[np.uint32],
    sizes: npt.NDArray[np.int32],
    n_changed: npt.NDArray[np.int32],
    payload: npt.NDArray[np.int32],
    kept: tuple[torch.Tensor, torch.Tensor] | None,
    left_out: set[int],
) -> dict[int, Coded]:
    """Every piece's share of what a slab gave, by number; ``sizes`` are a chunk's words."""
    ends = [0, *np.cumsum(chunk_counts).tolist()]
    words, changes = (
        pairwise(np.concatenate([[0], np.cumsum(by_chunk, dtype=np.int64)])[ends].tolist())
        for by_chunk in (sizes, n_changed)
    )
    return {
        number: Coded(
            Streams(
                directory[slice(*rows)],
                payload[slice(*body)].view(np.uint8),
                changed[1] - changed[0],
            ),
            _part(kept, *changed),
        )
        for number, (rows, body, changed) in enumerate(
            zip(pairwise(ends), words, changes, strict=True)
        )
        if number not in left_out
    }


def _part(
    kept: tuple[torch.Tensor, torch.Tensor] | None, first: int, last: int
) -> DeviceChanges | None:
    """One piece's share of a slab's changes."""
    if kept is None:
        return None
    return DeviceChanges(kept[0][first:last], kept[1][first:last], last - first)
