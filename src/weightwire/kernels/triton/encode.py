"""The compact encoder on a GPU: pieces in, the reference's bytes out.

collect ─▶ arrange ─▶ push ─▶ join
every      every      every chunk,
element    listed one a lane each
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import numpy as np
import torch

from weightwire.kernels import kernels
from weightwire.kernels.triton.arrange import Chunks, arrange
from weightwire.kernels.triton.assemble import join, pairs_of, rows_of
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.launch import to_device
from weightwire.kernels.triton.push import push
from weightwire.kernels.triton.slabs import Coded, Slab, Work, in_slabs, split
from weightwire.kernels.triton.staging import to_host

_LOG = logging.getLogger(__name__)


def encode_compact_all(work: Work, *, budget_bytes: int, keep_changes: bool = False) -> list[Coded]:
    """Code every piece as the reference does; ``budget_bytes`` bounds what is allocated meanwhile."""
    return in_slabs(
        work,
        budget_bytes,
        lambda slab: _encode(slab, keep_changes),
        lambda number: _on_host(work, number, keep_changes),
    )


def _encode(slab: Slab, keep_changes: bool) -> dict[int, Coded]:
    """The pieces that could be coded, by number; the others need more room."""
    if not slab.n_tiles:
        return slab.nothing(2, keep_changes)
    dtype = slab.work.dtype
    tiles, chunks, crowded = slab.collect()
    rooms = _rooms(chunks, dtype.n_bytes)
    n_room, n_listed = torch.stack([rooms.sum(), chunks.n_listed.sum()]).tolist()
    arranged = arrange(
        tiles, chunks, slab.old, slab.new, slab.first_tile, slab.models, dtype, n_listed
    )
    stacks = push(arranged, dtype, rooms, n_room)
    rows = rows_of(chunks, arranged, stacks, dtype.n_bytes)
    short = rows.is_short.int()
    host = to_host(torch.stack([rows.heads, rows.sizes, arranged.n_changed, short]))
    payload = join(
        chunks, arranged, stacks, rows, slab.new, slab.first_tile, int(host[1].sum()), dtype
    )
    words = to_host(payload)
    kept = None
    if keep_changes:
        n_changed = int(host[2].sum())
        counts = arranged.n_changed
        kept = pairs_of(
            tiles, chunks, counts, slab.old, slab.new, slab.first_tile, n_changed, dtype
        )
    piece = np.repeat(np.arange(len(slab.chunk_counts)), slab.chunk_counts)
    left_out = crowded.union(piece[host[3] != 0].tolist())
    directory = np.ascontiguousarray(host[:2].T).view(np.uint32)
    return split(slab.chunk_counts, directory, host[1], host[2], words, kept, left_out)


def _rooms(chunks: Chunks, n_bytes: int) -> torch.Tensor:
    """Words set aside for each chunk's stack; coded chunks hardly ever need as many."""
    wide = 2 if n_bytes == 4 else 1
    dense = (chunks.n_elements * n_bytes + 3) // 4
    return torch.minimum(wide * chunks.n_listed.long() + 64, dense).int()


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
