"""The compact encoder on a GPU: pieces in, the reference's bytes out.

collect ─▶ arrange ─▶ gather ─▶ push ─▶ join
every      every      every     every chunk,
element    listed one chunk     a lane each
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np
import torch

from weightwire.kernels import kernels
from weightwire.kernels.contract import Streams
from weightwire.kernels.triton.arrange import arrange
from weightwire.kernels.triton.assemble import join, room_for_payload, rows_of
from weightwire.kernels.triton.collect import collect
from weightwire.kernels.triton.gather import MIN_STACK_ROOM, Gathered, gather
from weightwire.kernels.triton.push import push
from weightwire.kernels.triton.slabs import Slab, Work, in_slabs, split
from weightwire.kernels.triton.downloads import Arriving, beside, mark, send_to_host

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launched:
    """A slab under way: its rows are on their way to the host, its payload waits on the device."""

    slab: Slab
    rows: Arriving
    """int32 [4, chunk]: heads, sizes, changes, and whether it must be coded again."""
    payload: torch.Tensor
    done: torch.cuda.Event | None
    """When the payload is whole."""


def encode_compact_all(work: Work, *, budget_bytes: int) -> list[Streams]:
    """Code every piece as the reference does; ``budget_bytes`` bounds what is allocated meanwhile."""
    launch = _Launcher().launch
    return in_slabs(work, budget_bytes, launch, _finish, lambda number: _on_host(work, number))


class _Launcher:
    """Begins slab after slab: one is pushed beside the next one's pass over memory.

    Pushing keeps few lanes of a device busy for long, the pass keeps all of its memory busy.
    """

    def __init__(self) -> None:
        self._pushed: tuple[Gathered, torch.cuda.Event | None] | None = None

    def launch(self, slab: Slab) -> _Launched:
        """Begin a slab; nothing is waited for."""
        dtype, cuts, models, n_listed = slab.dtype, slab.cuts, slab.models, slab.n_listed
        if not cuts.n_chunks:
            nothing = torch.empty((4, 0), dtype=torch.int32, device=cuts.device)
            return _Launched(slab, send_to_host(nothing), nothing[0], None)
        found = collect(cuts, models, dtype)
        self._await_last()
        arranged = arrange(cuts, found, models, dtype, n_listed)
        gathered = gather(cuts, found, arranged, models, dtype, n_listed, slab.step_bits)
        with beside(cuts.device):
            launched = _push(slab, gathered)
        self._pushed = (gathered, launched.done)
        return launched

    def _await_last(self) -> None:
        """From here on the last slab's memory is the next one's: there is not room for both."""
        if self._pushed is not None and self._pushed[1] is not None:
            torch.cuda.current_stream(self._pushed[0].first.device).wait_event(self._pushed[1])
        self._pushed = None


def _push(slab: Slab, gathered: Gathered) -> _Launched:
    cuts, n_room = slab.cuts, _stack_room(slab)
    stacks = push(gathered, slab.dtype, n_room)
    rows = rows_of(cuts, gathered, stacks, slab.dtype)
    n_words = room_for_payload(cuts.n_chunks, slab.n_listed, n_room)
    payload = join(cuts, gathered, stacks, rows, n_words, slab.dtype)
    return _Launched(slab, send_to_host(rows.told), payload, mark(cuts.device))


def _finish(launched: _Launched) -> dict[int, Streams]:
    """The pieces that could be coded, by number."""
    heads, sizes, n_changed, is_short = launched.rows.wait()
    words = send_to_host(launched.payload[: int(sizes.sum())], launched.done).wait()
    directory = np.stack([heads, sizes], axis=1).view(np.uint32)
    return split(launched.slab.cuts.chunk_counts, directory, sizes, n_changed, words, is_short)


def _stack_room(slab: Slab) -> int:
    """Words for the stacks of all chunks: as many as one chunk of all elements would be given.

    By gap and step an element takes least where they are spread evenly, so all chunks together ask
    for no more than that.
    """
    cuts, n_listed = slab.cuts, max(slab.n_listed, 1)
    gap = np.log2(cuts.n_elements / n_listed) + 1
    return int(n_listed * (gap + slab.step_bits) / 32) + (MIN_STACK_ROOM + 1) * cuts.n_chunks


def _on_host(work: Work, number: int) -> Streams:
    """A piece that no room on the device was enough for: its chunks hold what no sample foretold."""
    _LOG.warning("a piece is coded on the host: its steps are unlike those of its sample")
    width = work.dtype.bits_dtype
    old, new = (side[number].cpu().numpy().view(width) for side in (work.olds, work.news))
    return kernels().encode_compact(
        old, new, work.dtype, work.models.model(number), int(work.chunk_log2s[number]),
        len(os.sched_getaffinity(0)),
    )  # fmt: skip
