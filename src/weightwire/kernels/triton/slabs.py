"""Many pieces, coded in *slabs*: as many at a time as a memory budget allows.

A slab begins with the pass over both states; what follows is the codec's. Nothing of a slab is
waited for before the next one has been begun: room is set aside by what samples showed, and pieces
for which that was too little are coded again, by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels.contract import Streams
from weightwire.kernels.devices import unless_out_of_memory
from weightwire.kernels.model_batch import ModelBatch
from weightwire.kernels.triton.collect import GROUP_ELEMENTS
from weightwire.kernels.triton.cuts import Cuts, cut
from weightwire.kernels.triton.downloads import Arriving, mark, send_to_host, settle
from weightwire.kernels.triton.memories import Memories
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

_LOG = logging.getLogger(__name__)
_Begun = TypeVar("_Begun")

_MARGIN = 1.15
"""Room for so many times as many elements as a sample has listed: changes are no even rain."""

_MORE = 4.0
_MORE_RATE = 0.001
"""So many times that much, and some more, for pieces that had too little; then room for everything."""

_RECORD_BYTES = 6 * 1.25
"""A record and its marks, and what a segment sets aside beyond what is likely."""

_LISTED_BYTES = 13
"""An event, a symbol, and its share of a stack."""

_PAYLOAD_BYTES = 1.5

_LAST_SHARE = 0.7
"""What the last slab has of the others' size, if that saves it without one more."""

_FIXED_SHARE = 1 / 256
"""What sums and tables take, per element."""

MIN_BUDGET = 64 << 20


@dataclass(frozen=True)
class Work:
    """Pieces of one element type, with their models: everything the encoder is told."""

    memories: Memories
    dtype: DType
    models: ModelBatch
    rates: npt.NDArray[np.float64]
    """How many elements of each piece's sample are listed: changed, or expected to."""
    is_last: bool = True
    """Nothing else is begun after it."""
    meanwhile: Callable[[], None] | None = None
    """What the host does as soon as the device has something to do."""

    def some(self, numbers: Sequence[int], more: float) -> Work:
        """A few of the pieces, so many times as crowded as their samples say."""
        at = np.array(numbers, dtype=np.intp)
        olds, news = self.memories.olds, self.memories.news
        return Work(
            Memories([olds[n] for n in numbers], [news[n] for n in numbers]), self.dtype,
            self.models.some(at), more * self.rates[at] + _MORE_RATE,
        )  # fmt: skip


def in_slabs(
    works: Iterable[Work],
    budget_bytes: int,
    launch: Callable[[Slab], _Begun],
    finish: Callable[[_Begun], dict[int, Streams]],
    on_host: Callable[[Work, int], Streams],
) -> Iterator[Streams]:
    """Code every piece: ``launch`` waits for nothing, ``finish`` gives what could be coded, by number.

    Each work's slabs are begun before the next work is asked for, and all before the first is waited
    for. What a slab had too little room for is coded again with more, then by itself with room for
    everything, and ``on_host`` if even that does not do.
    """
    begun = [(work, _begin(work, _slabs(work, budget_bytes), launch)) for work in works]
    for work, slabs in begun:
        done = _finish(slabs, finish)
        left = [number for number in range(len(work.rates)) if number not in done]
        if left:
            _LOG.info("%d pieces change more than their samples showed; once more", len(left))
            some = work.some(left, _MORE)
            again = _finish(_begin(some, _slabs(some, budget_bytes), launch), finish)
            done.update({left[number]: streams for number, streams in again.items()})
        for number in [number for number in left if number not in done]:
            done[number] = _alone(work, number, launch, finish) or on_host(work, number)
        yield from (done[number] for number in range(len(work.rates)))


def _alone(
    work: Work,
    number: int,
    launch: Callable[[Slab], _Begun],
    finish: Callable[[_Begun], dict[int, Streams]],
) -> Streams | None:
    """A piece with room for everything, which is twenty times its size; None if that does not do."""

    def code() -> dict[int, Streams]:
        begun = _begin(work.some([number], 1), [slice(0, 1)], launch, is_roomy=True)
        return _finish(begun, finish)

    coded = unless_out_of_memory(code)
    if coded is None:
        settle()
        return None
    return coded.get(0)


def _begin(
    work: Work,
    slabs: Sequence[slice],
    launch: Callable[[Slab], _Begun],
    *,
    is_roomy: bool = False,
) -> list[tuple[slice, _Begun]]:
    memories = work.memories
    models = DeviceModels(work.models, work.dtype, memories.device)
    chunk_log2s = work.models.chunk_log2.astype(np.int64)
    rates = np.ones(len(memories.sizes)) if is_roomy else _MARGIN * work.rates
    launched = []
    for slab in slabs:
        cuts = cut(memories, slab, chunk_log2s[slab], rates[slab])
        likely = float((rates[slab] * memories.sizes[slab]).sum())
        n_listed = int(min(likely + 8 * likely**0.5 + 1024, cuts.n_elements))
        begun = launch(Slab(work.dtype, cuts, models.part(slab), n_listed, is_roomy))
        launched.append((slab, begun))
        if work.meanwhile is not None and len(launched) == 1:
            work.meanwhile()
    return launched


def _finish(
    slabs: Sequence[tuple[slice, _Begun]], finish: Callable[[_Begun], dict[int, Streams]]
) -> dict[int, Streams]:
    """What could be coded, by number in its work."""
    return {
        slab.start + number: streams
        for slab, launched in slabs
        for number, streams in finish(launched).items()
    }


def _slabs(work: Work, budget_bytes: int) -> list[slice]:
    """Pieces that are coded together: in order, about equally many bytes at a time.

    The last are fewer: nothing hides what is done with them.
    """
    sizes = work.memories.sizes.astype(np.float64)
    listed = np.minimum(_MARGIN * work.rates, 1)
    records = np.minimum(listed, 1 / GROUP_ELEMENTS)
    needed = sizes * (listed * _LISTED_BYTES + records * _RECORD_BYTES + _FIXED_SHARE)
    whole = max(budget_bytes, MIN_BUDGET)
    # Every slab's payload is there until the last slab was begun.
    budget = max(whole - float((sizes * listed).sum()) * _PAYLOAD_BYTES, whole / 4)
    n_slabs = max(1, int(np.ceil(needed.sum() / budget)))
    even = needed.sum() / n_slabs
    shorter = needed.sum() / (n_slabs - 1 + _LAST_SHARE)
    each = min(max(budget, even), shorter) if work.is_last else even
    borders = np.searchsorted(np.cumsum(needed), each * np.arange(1, n_slabs))
    ends = np.unique([0, *borders.tolist(), len(sizes)])
    return [slice(first, last) for first, last in pairwise(ends.tolist())]


@dataclass(frozen=True)
class Slab:
    """Some pieces on their way to code: how they are cut, and how much room there is."""

    dtype: DType
    cuts: Cuts
    models: DeviceModels
    n_listed: int
    """How many elements there is room for."""
    is_roomy: bool
    """With room for everything that could be listed, not only for what is likely."""

    @property
    def step_bits(self) -> int:
        """Bits of a step, and what a gap takes beyond its logarithm: finer types take more of them."""
        if self.is_roomy:
            return 96
        is_float = bool(self.dtype.key_mask)
        return 3 + (max(0, self.dtype.key_shift - 7) if is_float else 8 * self.dtype.n_bytes)


@dataclass(frozen=True)
class Launched:
    """A slab that is being coded: rows on their way to the host, a payload that waits on the device."""

    rows: Arriving
    """int32 [4, chunk]: heads, sizes, changes, and whether it must be coded again."""
    payload: torch.Tensor
    done: torch.cuda.Event | None
    """When the payload is whole."""

    def wait(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The rows, and the words that they speak of."""
        rows: npt.NDArray[np.int32] = self.rows.wait()
        words = send_to_host(self.payload[: int(rows[1].sum())], self.done).wait()
        return rows, words


def launched(told: torch.Tensor, payload: torch.Tensor) -> Launched:
    """A slab whose last kernel was just launched; ``told`` are its rows."""
    return Launched(send_to_host(told), payload, mark(told.device))


def nothing(slab: Slab) -> Launched:
    """What comes of a slab without chunks."""
    rows = torch.empty((4, 0), dtype=torch.int32, device=slab.cuts.device)
    return Launched(send_to_host(rows), rows[0], None)


def split(
    chunk_counts: npt.NDArray[np.int64],
    directory: npt.NDArray[np.uint32],
    sizes: npt.NDArray[np.int32],
    n_changed: npt.NDArray[np.int32],
    payload: npt.NDArray[np.int32],
    is_short: npt.NDArray[np.int32],
) -> dict[int, Streams]:
    """Every piece's share of what a slab gave, by number; pieces with a short chunk are left out."""
    ends = np.concatenate([[0], np.cumsum(chunk_counts)])
    words, changes, short = (
        pairwise(np.concatenate([[0], np.cumsum(by_chunk, dtype=np.int64)])[ends].tolist())
        for by_chunk in (sizes, n_changed, is_short)
    )
    # One by one, views would take longer than all else.
    raw = payload.view(np.uint8)
    return {
        number: Streams(directory[row:next_row], raw[4 * word : 4 * next_word], after - before)
        for number, ((row, next_row), (word, next_word), (before, after), (n, now)) in enumerate(
            zip(pairwise(ends.tolist()), words, changes, short, strict=True)
        )
        if n == now
    }
