"""Net changes of one tensor, however the patches that brought them were cut.

They are kept by *pages*: ranges of fixed size, those in which a publisher on one machine cuts. A
publisher of several ranks cuts at its shard borders, and its number of ranks may change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weightwire.diff.overlay import overlay
from weightwire.diff.spill import Spill
from weightwire.model import Bits, Changes


class Pages:
    """Each place at most once, with its latest bits."""

    def __init__(self, size: int, spill: Spill) -> None:
        """Keep pages of ``size`` elements; what does not fit in memory goes to ``spill``."""
        self._size = size
        self._spill = spill
        self._pages: dict[int, Changes] = {}

    def __iter__(self) -> Iterator[tuple[int, Changes]]:
        """First element of each page, and the changes within it."""
        for number in sorted(self._pages):
            yield number * self._size, self._pages[number]

    def add(self, start: int, changes: Changes) -> None:
        """Lay changes of a piece that begins at ``start`` over what is there."""
        if not len(changes):
            return
        first = (start + int(changes.positions[0])) // self._size
        last = (start + int(changes.positions[-1])) // self._size
        if first == last and start == first * self._size:
            self._merge(first, changes)
            return
        positions = changes.positions.astype(np.int64) + start
        for number in range(first, last + 1):
            at = number * self._size
            begin, end = np.searchsorted(positions, (at, at + self._size))
            places = (positions[begin:end] - at).astype(np.uint32)
            self._merge(number, Changes(places, changes.bits[begin:end]))

    def lay_over(self, start: int, bits: Bits) -> Bits:
        """Bits that begin at ``start``, changed; a copy only if there is something to change."""
        stop, patched = start + len(bits), None
        for number in range(start // self._size, -(-stop // self._size)):
            changes = self._pages.get(number)
            if changes is not None:
                patched = bits.copy() if patched is None else patched
                overlay(patched, start, number * self._size, changes)
        return bits if patched is None else patched

    def _merge(self, number: int, changes: Changes) -> None:
        before = self._pages.get(number)
        if len(changes):
            net = changes if before is None else _net(before, changes)
            self._pages[number] = self._spill.keep(net)


def _net(before: Changes, after: Changes) -> Changes:
    """Two changes as one: what came later counts."""
    positions = np.concatenate((before.positions, after.positions))
    # Stable: it merges two ascending runs, and of equal positions the later one stands last.
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    is_last = np.append(positions[1:] != positions[:-1], True)
    bits = np.concatenate((before.bits, after.bits))[order]
    return Changes(positions[is_last], bits[is_last])
