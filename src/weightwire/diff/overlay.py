"""Changes laid over bits: the small moves that staging and the baseline share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightwire.codec.record import RecordHead
from weightwire.model import Bits, Changes


def overlay(bits: Bits, start: int, at: int, changes: Changes) -> None:
    """Write the changes of a piece that begins at ``at`` into bits that begin at ``start``."""
    places = changes.positions.astype(np.int64) + (at - start)
    first, last = np.searchsorted(places, (0, len(bits)))
    bits[places[first:last]] = changes.bits[first:last]


def first_of(entries: Sequence[Changes]) -> Changes:
    """Of all entries of a position, the earliest."""
    positions, first = np.unique(
        np.concatenate([entry.positions for entry in entries]), return_index=True
    )
    return Changes(positions, np.concatenate([entry.bits for entry in entries])[first])


def room_for(made: dict[str, Bits], head: RecordHead) -> Bits:
    """Where a piece goes of a tensor that is made anew; the tensor is made with its first piece."""
    name, spec = head.spec.name, head.spec
    if name not in made:
        made[name] = np.empty(spec.n_elements, spec.dtype.bits_dtype)
    return made[name][head.start : head.stop]
