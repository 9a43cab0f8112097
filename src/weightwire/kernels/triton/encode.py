"""The compact encoder on a GPU: pieces in, the reference's bytes out.

collect ─▶ arrange ─▶ gather ─▶ push ─▶ join
every      every      every     every chunk,
element    listed one chunk     a lane each
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from weightwire.kernels import kernels
from weightwire.kernels.contract import Streams
from weightwire.kernels.triton.arrange import arrange
from weightwire.kernels.triton.assemble import join, room_for_payload, rows_of
from weightwire.kernels.triton.collect import Segments, collect
from weightwire.kernels.triton.downloads import beside, mark, settle
from weightwire.kernels.triton.gather import MIN_STACK_ROOM, Gathered, gather
from weightwire.kernels.triton.push import push
from weightwire.kernels.triton.slabs import (
    Launched,
    Slab,
    Work,
    in_slabs,
    launched,
    nothing,
    split,
)

_LOG = logging.getLogger(__name__)


def encode_compact_all(works: Iterable[Work], *, budget_bytes: int) -> Iterator[Streams]:
    """Code every piece as the reference does; ``budget_bytes`` bounds what is allocated meanwhile.

    All of it is begun before the first comes; the rest comes as the device gets ready.
    """
    try:
        yield from in_slabs(works, budget_bytes, _Coder().launch, _finish, _on_host)
    except BaseException:
        # What was begun reads memory that is given up now.
        settle()
        raise


class _Coder:
    """Begins slab after slab: one is coded beside the next one's pass over memory.

    The coder keeps few lanes of a device busy for long, the pass keeps all of its memory busy.
    """

    def __init__(self) -> None:
        self._held: tuple[Segments, torch.cuda.Event | None] | None = None
        """The last slab's records, and the moment from which on nobody reads them."""

    def launch(self, slab: Slab) -> tuple[Slab, Launched]:
        """Begin a slab; nothing is waited for."""
        device = slab.cuts.device
        if not slab.cuts.n_chunks:
            return slab, nothing(slab)
        self._let_go(device)
        found = collect(slab.cuts, slab.models, slab.dtype)
        with beside(device, mark(device), "coder", is_urgent=True):
            gathered = _gather(slab, found)
            self._held = found, mark(device)
            return slab, _push(slab, gathered)

    def _let_go(self, device: torch.device) -> None:
        """From here on the last slab's records are the next one's memory.

        With room for those of more slabs, slabs would be shorter, and nothing would be gained.
        """
        if self._held is not None and self._held[1] is not None:
            torch.cuda.current_stream(device).wait_event(self._held[1])
        self._held = None


def _finish(begun: tuple[Slab, Launched]) -> dict[int, Streams]:
    """The pieces that could be coded, by number."""
    slab, coding = begun
    (heads, sizes, n_changed, is_short), words = coding.wait()
    directory = np.stack([heads, sizes], axis=1).view(np.uint32)
    return split(slab.cuts.chunk_counts, directory, sizes, n_changed, words, is_short)


def _gather(slab: Slab, found: Segments) -> Gathered:
    cuts, models, n_listed = slab.cuts, slab.models, slab.n_listed
    arranged = arrange(cuts, found, models, slab.dtype, n_listed)
    return gather(cuts, found, arranged, models, slab.dtype, n_listed, slab.step_bits)


def _push(slab: Slab, gathered: Gathered) -> Launched:
    cuts, n_room = slab.cuts, _stack_room(slab)
    stacks = push(gathered, slab.dtype, n_room)
    rows = rows_of(cuts, gathered, stacks, slab.dtype)
    n_words = room_for_payload(cuts.n_chunks, slab.n_listed, n_room)
    payload = join(cuts, gathered, stacks, rows, n_words, slab.dtype)
    return launched(rows.told, payload)


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
    old, new = (
        side[number].cpu().numpy().view(width) for side in (work.memories.olds, work.memories.news)
    )
    return kernels().encode_compact(
        old, new, work.dtype, work.models.model(number), int(work.chunk_log2s[number]),
        len(os.sched_getaffinity(0)),
    )  # fmt: skip
