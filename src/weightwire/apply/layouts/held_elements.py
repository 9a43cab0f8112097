"""The elements an engine holds, read in checkpoint coordinates: bits, digests, and what they cover."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from weightwire.apply.layouts.layout import Layout, Part
from weightwire.apply.layouts.regions import AT_ONCE, Box, strided
from weightwire.apply.needs import NOTHING, Span
from weightwire.digest import TensorDigest, digest_at, digest_bits
from weightwire.errors import BaseMismatch
from weightwire.model import Bits

ReadBox = Callable[[Part, Box], Bits]
"""Gives a box's published bits, shaped as its axes."""


def read_live(layout: Layout, part: Part, box: Box) -> Bits:
    """Published bits from the engine's memory.

    Raises:
        BaseMismatch: it holds bits that no exact cast gives: nobody published them.
    """
    bits = part.cast.narrow(layout.memories[part.memory].read(box))
    if bits is None:
        raise BaseMismatch(
            f"tensor {part.name!r:.200}: parameter {part.parameter!r:.200} holds bits that are not"
            f" a {part.cast.published.name} number; something else wrote to it"
        )
    return bits


def copy_live(layout: Layout, name: str, start: int, into: Bits) -> None:
    """Fill ``into``, which begins at ``start`` of the tensor, with all elements the engine holds."""
    for part in layout.parts_of(name):
        if part.is_copy:
            continue
        for box in part.box.within(start, start + len(into)):
            strides = [axis.source for axis in box.axes]
            room = strided(into, box.source - start, box.shape, strides)
            room[...] = read_live(layout, part, box)


def longest_run(parts: Sequence[Part]) -> Span:
    """The longest run of elements that parts hold together; maybe none."""
    mine = [part for part in parts if not part.is_copy]
    if not mine:
        return NOTHING
    hull = Span(min(p.box.source for p in mine), max(p.box.stop for p in mine))
    if sum(part.box.n_elements for part in mine) == hull.stop - hull.start:
        return hull
    dense = [p.box for p in mine if p.box.n_elements == p.box.stop - p.box.source]
    runs = _merged(sorted((box.source, box.stop) for box in dense))
    return max(runs, key=lambda run: run.stop - run.start, default=NOTHING)


def _merged(ranges: list[tuple[int, int]]) -> list[Span]:
    runs: list[Span] = []
    for start, stop in ranges:
        if runs and runs[-1].stop == start:
            runs[-1] = Span(runs[-1].start, stop)
        else:
            runs.append(Span(start, stop))
    return runs


def hull(layout: Layout, name: str) -> Span:
    """The smallest span with everything the engine holds of a tensor."""
    boxes = [part.box for part in layout.parts_of(name)]
    if not boxes:
        return NOTHING
    return Span(min(box.source for box in boxes), max(box.stop for box in boxes))


def digest_part(part: Part, read: ReadBox) -> TensorDigest:
    """Digest of a part's elements, by their places in the checkpoint tensor."""
    total = TensorDigest()
    for box in bounded(part.box):
        bits = read(part, box).reshape(-1)
        if box.n_elements == box.stop - box.source:
            total += digest_bits(np.ascontiguousarray(bits), box.source)
        else:
            total += digest_at(_as_unsigned(box), np.ascontiguousarray(bits), box.source)
    return total


def _as_unsigned(box: Box) -> Bits:
    positions: Bits = (box.source_positions() - box.source).astype(np.uint64)
    return positions


def bounded(box: Box) -> Iterator[Box]:
    """The box in pieces that are read at a time."""
    for start in range(box.source, box.stop, AT_ONCE):
        yield from box.within(start, start + AT_ONCE)
