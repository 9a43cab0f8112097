"""How pieces are cut for the encoder: chunks are coded by themselves, segments are looked at at once.

A chunk is a whole number of segments, a segment a whole number of tiles; only a piece's last ones
are shorter. All tables come from the host in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels.triton.launch import owners_of
from weightwire.kernels.triton.memories import Memories
from weightwire.kernels.triton.uploads import send_tables

TILE_ELEMENTS = 1024
"""Elements that are looked at together; every chunk is a whole number of tiles."""

MAX_SEGMENT_LOG2 = 16
"""Long enough to be worth a warp's beginning, short enough that there are many for all processors.

A record has thirteen bits for a group's number in its segment; a plain chunk is a segment.
"""


@dataclass(frozen=True)
class Cuts:
    """Some pieces, cut. Tables per piece unless they say otherwise."""

    memories: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    """Held here so that no address outlives its memory."""
    device: torch.device
    alignment: int
    n_chunks: int
    n_segments: int
    n_tiles: int
    n_records: int
    n_elements: int
    chunk_counts: npt.NDArray[np.int64]
    olds: torch.Tensor
    """int64 addresses."""
    news: torch.Tensor
    sizes: torch.Tensor
    """int64, in elements."""
    chunk_log2: torch.Tensor
    """int32"""
    segment_log2: torch.Tensor
    """int32"""
    first_chunk: torch.Tensor
    """int64"""
    first_segment: torch.Tensor
    """int64"""
    first_tile: torch.Tensor
    """int64"""
    first_record: torch.Tensor
    """int64"""
    room: torch.Tensor
    """int32: records that each of its segments has room for."""
    chunk_piece: torch.Tensor
    """int32, per chunk."""
    chunk_number: torch.Tensor
    """int32, per chunk: its number in its piece."""
    segment_piece: torch.Tensor
    """int32, per segment."""
    segment_number: torch.Tensor
    """int32, per segment: its number in its piece."""


def cut(
    memories: Memories,
    numbers: slice,
    chunk_log2s: npt.NDArray[np.int64],
    rooms_per_element: npt.NDArray[np.float64],
) -> Cuts:
    """Cut some pieces into chunks of these sizes; segments have room for so many records an element."""
    sizes, device = memories.sizes[numbers], memories.device
    segment_log2s = np.minimum(chunk_log2s, MAX_SEGMENT_LOG2)
    n_chunks, n_segments = -(-sizes >> chunk_log2s), -(-sizes >> segment_log2s)
    n_tiles = -(-sizes // TILE_ELEMENTS)
    rooms = _rooms(rooms_per_element, segment_log2s)
    n_records = rooms * n_segments
    tables = [
        *memories.addresses[:, numbers],
        sizes,
        chunk_log2s.astype(np.int32),
        segment_log2s.astype(np.int32),
        *map(_before, (n_chunks, n_segments, n_tiles, n_records)),
        rooms.astype(np.int32),
        *owners_of(n_chunks),
        *owners_of(n_segments),
    ]
    return Cuts(
        (tuple(memories.olds[numbers]), tuple(memories.news[numbers])), device, memories.alignment,
        int(n_chunks.sum()), int(n_segments.sum()), int(n_tiles.sum()), int(n_records.sum()),
        int(sizes.sum()), n_chunks, *send_tables(tables, device),
    )  # fmt: skip


def _rooms(
    per_element: npt.NDArray[np.float64], segment_log2s: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Some more than likely, by chance alone; no more than a segment has groups."""
    likely = per_element * (1 << segment_log2s)
    wanted: npt.NDArray[np.int64] = np.ceil(likely + 6 * np.sqrt(likely) + 16).astype(np.int64)
    rooms: npt.NDArray[np.int64] = np.minimum(wanted, 1 << (segment_log2s - 3))
    return rooms


def _before(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.cumsum(counts) - counts
