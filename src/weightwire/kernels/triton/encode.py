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
    coder = _Coder()
    try:
        yield from in_slabs(
            coder.between(works), budget_bytes, coder.launch, _Underway.finish, _on_host
        )
    except BaseException:
        # What was begun reads memory that is given up now.
        settle()
        raise


class _Underway:
    """A slab whose pass over memory was begun, and what brings its elements together."""

    def __init__(self, slab: Slab) -> None:
        """Begin it; nothing is waited for."""
        self._slab, self._device = slab, slab.cuts.device
        self._records: Segments | None = None
        self._elements: Gathered | None = None
        self._gathered: torch.cuda.Event | None = None
        self._launched: Launched | None = None
        if slab.cuts.n_chunks:
            self._records = collect(slab.cuts, slab.models, slab.dtype)
        self._listed = mark(self._device)

    def gather(self) -> None:
        """Begin to bring together what was listed."""
        if self._records is not None:
            with beside(self._device, self._listed, "coder", is_urgent=True):
                self._elements = _gather(self._slab, self._records)
                self._gathered = mark(self._device)

    def push(self) -> Launched:
        """Begin all the rest."""
        if self._elements is not None:
            with beside(self._device, self._gathered, "coder", is_urgent=True):
                self._launched = _push(self._slab, self._elements)
            self._elements = None
        return self._launched or nothing(self._slab)

    def let_go(self) -> None:
        """From here on its records are the next slab's memory.

        With room for those of more slabs, slabs would be shorter, and nothing would be gained.
        """
        if self._gathered is not None:
            torch.cuda.current_stream(self._device).wait_event(self._gathered)
        self._records = None

    def finish(self) -> dict[int, Streams]:
        """The pieces that could be coded, by number."""
        (heads, sizes, n_changed, is_short), words = self.push().wait()
        directory = np.stack([heads, sizes], axis=1).view(np.uint32)
        counts = self._slab.cuts.chunk_counts
        return split(counts, directory, sizes, n_changed, words, is_short)


class _Coder:
    """Begins slab after slab: one is coded beside the next one's pass over memory.

    The coder keeps few lanes of a device busy for long, the pass keeps all of its memory busy: so the
    next pass is begun before the coder of the last, and what the host does for it takes no time.
    """

    def __init__(self) -> None:
        self._last: _Underway | None = None

    def launch(self, slab: Slab) -> _Underway:
        """Begin a slab; nothing is waited for."""
        if self._last is not None:
            self._last.let_go()
        underway = _Underway(slab)
        self.push_last()
        underway.gather()
        self._last = underway
        return underway

    def push_last(self) -> None:
        """Begin what is left to begin."""
        if self._last is not None:
            self._last.push()

    def between(self, works: Iterable[Work]) -> Iterator[Work]:
        """The same works; nothing is left to begin while the host is busy with the next one."""
        for work in works:
            yield work
            self.push_last()


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
        old, new, work.dtype, work.models.model(number), int(work.models.chunk_log2[number]),
        len(os.sched_getaffinity(0)),
    )  # fmt: skip
