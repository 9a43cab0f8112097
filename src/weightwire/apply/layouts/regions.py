"""Strided boxes: which elements of a flat tensor lie where in another flat memory.

A loader only ever takes views of what it is given: it narrows, transposes, selects, reshapes. So
what it copies is a box with strides on both sides, and a flat position is a number in a mixed
radix: dividing by one stride after another gives the place on the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightwire.errors import UnsupportedLayout

MAX_REPEATS = 4096
"""Places one element may be spread over: a scale per row at most, never a whole tensor."""

AT_ONCE = 1 << 20
"""Elements that are read, proven or loaded at a time: some 32 MB of work space, whatever the tensor."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """One dimension of a box: its length, and what a step costs on either side."""

    n: int
    source: int
    place: int


@dataclass(frozen=True)
class Box:
    """Elements of a flat source and the places that hold them, in elements.

    ``axes`` are sorted by falling source stride, and one step of an axis is longer than everything
    the later ones span: source positions and boxes of indices are the same thing.
    """

    source: int
    place: int
    axes: tuple[Axis, ...]

    @property
    def n_elements(self) -> int:
        """How many elements it has."""
        n = 1
        for axis in self.axes:
            n *= axis.n
        return n

    @property
    def stop(self) -> int:
        """The source position after its last one."""
        return self.source + _span(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return tuple(axis.n for axis in self.axes)

    @property
    def is_run(self) -> bool:
        """Whether both sides are runs of neighbouring elements."""
        return not self.axes or (
            len(self.axes) == 1 and self.axes[0] == Axis(self.n_elements, 1, 1)
        )

    def within(self, start: int, stop: int) -> Iterator[Box]:
        """The box's elements from ``start`` to ``stop`` of the source, as boxes: a few, not many."""
        if stop <= self.source or self.stop <= start:
            return
        if start <= self.source and self.stop <= stop:
            yield self
            return
        yield from self._cut(start, stop)

    def _cut(self, start: int, stop: int) -> Iterator[Box]:
        axis, inner = self.axes[0], self.axes[1:]
        first = max(0, -(-(start - self.source) // axis.source))
        last = min(axis.n, (stop - _span(inner) - self.source) // axis.source + 1)
        ends = sorted({first - 1, max(last, first - 1)})
        for index in (index for index in ends if index < first):
            yield from self._at(index, inner).within(start, stop) if index >= 0 else ()
        if first < last:
            begin = self._at(first, inner)
            yield replace(begin, axes=(replace(axis, n=last - first), *inner))
        for index in (index for index in ends if index >= first):
            yield from self._at(index, inner).within(start, stop) if index < axis.n else ()

    def _at(self, index: int, inner: tuple[Axis, ...]) -> Box:
        axis = self.axes[0]
        return Box(self.source + index * axis.source, self.place + index * axis.place, inner)

    def find(self, positions: Positions) -> tuple[slice, npt.NDArray[np.bool_] | None, Positions]:
        """Of ascending source positions: the slice that may be in the box, which of it are, and where.

        None for "all of the slice": the places are then as many as the slice is long.
        """
        first, last = np.searchsorted(positions, (self.source, self.stop))
        rest = positions[first:last] - self.source
        if self.is_run:
            return slice(first, last), None, rest + self.place
        places = np.full(len(rest), self.place, np.int64)
        inside = np.ones(len(rest), bool)
        for axis in self.axes:
            index, rest = np.divmod(rest, axis.source)
            inside &= index < axis.n
            places += index * axis.place
        inside &= rest == 0
        return slice(first, last), inside, places[inside]

    def source_positions(self) -> Positions:
        """Every source position, in the order of the axes: ascending."""
        positions = np.full(1, self.source, np.int64)
        for axis in self.axes:
            steps = np.arange(axis.n, dtype=np.int64) * axis.source
            positions = (positions[:, None] + steps).reshape(-1)
        return positions


def boxes(source: int, place: int, axes: Sequence[Axis]) -> tuple[Box, ...]:
    """Axes as a loader left them, in order and joined; several boxes where elements are repeated.

    Raises:
        UnsupportedLayout: source positions that are no mixed radix, or repeated too often.
    """
    repeated = [axis for axis in axes if axis.source == 0 and axis.n > 1]
    ordered = sorted((a for a in axes if a.n > 1 and a.source), key=lambda axis: -axis.source)
    if any(axis.n == 0 for axis in axes):
        return ()
    for number, axis in enumerate(ordered):
        if axis.source < _span(ordered[number + 1 :]):
            raise UnsupportedLayout("elements of the checkpoint tensor overlap in the view")
    places = np.full(1, place, np.int64)
    for axis in repeated:
        places = (places[:, None] + np.arange(axis.n) * axis.place).reshape(-1)
        if len(places) > MAX_REPEATS:
            raise UnsupportedLayout(f"one element is spread over more than {MAX_REPEATS} places")
    joined = _joined(ordered)
    return tuple(Box(source, int(each), joined) for each in places)


def _joined(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Axes that continue one another on both sides are one."""
    joined: list[Axis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if last and (last.source, last.place) == (axis.n * axis.source, axis.n * axis.place):
            joined[-1] = Axis(last.n * axis.n, axis.source, axis.place)
        else:
            joined.append(axis)
    return tuple(joined)


def _span(axes: Sequence[Axis]) -> int:
    return 1 + sum((axis.n - 1) * axis.source for axis in axes)


def strided(
    flat: npt.NDArray[np.unsignedinteger], offset: int, shape: Sequence[int], strides: Sequence[int]
) -> npt.NDArray[np.unsignedinteger]:
    """A box of a flat array as an array of its own shape, sharing its memory.

    Raises:
        UnsupportedLayout: it reaches outside of the array.
    """
    reach = offset + sum((n - 1) * max(s, 0) for n, s in zip(shape, strides, strict=True))
    low = offset + sum((n - 1) * min(s, 0) for n, s in zip(shape, strides, strict=True))
    if low < 0 or reach >= len(flat):
        raise UnsupportedLayout(f"elements {low} to {reach} of {len(flat)}")
    return np.lib.stride_tricks.as_strided(
        flat[offset:], tuple(shape), tuple(s * flat.itemsize for s in strides)
    )
