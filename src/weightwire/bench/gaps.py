"""Positions as gaps, the way the published encodings write them, with no loop per element."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Positions: TypeAlias = npt.NDArray[np.intp]
"""Flat positions, ascending."""

MAX_GAP = 0xFFFF
"""Largest step that two bytes hold."""


def gaps_between(positions: Positions) -> Positions:
    """How far each position lies beyond the one before it; the first counts from zero."""
    gaps: Positions = positions.copy()
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    return gaps


def bridge(positions: Positions) -> Positions:
    """Add positions until no gap exceeds ``MAX_GAP``.

    The added ones are unchanged elements: a patch writes the value they have already (or XORs
    them with zero), so a reader needs no escape code at all.
    """
    gaps = gaps_between(positions)
    if not len(gaps) or gaps.max() <= MAX_GAP:
        return positions
    n_added = np.maximum(gaps - 1, 0) // MAX_GAP
    starts = np.repeat(positions - gaps, n_added)
    ranks = np.arange(len(starts)) - np.repeat(np.cumsum(n_added) - n_added, n_added)
    added = starts + (ranks + 1) * MAX_GAP
    return np.sort(np.concatenate((positions, added)), kind="stable")


def gaps_u16(positions: Positions) -> npt.NDArray[np.uint16]:
    """The gaps of bridged positions, in two bytes each."""
    gaps = positions.astype(np.uint16)
    gaps[1:] -= gaps[:-1].copy()
    return gaps


def positions_after(gaps: npt.NDArray[np.unsignedinteger]) -> Positions:
    """The inverse of both gap functions."""
    return np.cumsum(gaps, dtype=np.intp)


def encode_leb128(numbers: Positions) -> npt.NDArray[np.uint8]:
    """Seven bits per byte, lowest first; a set top bit says that another byte follows.

    Each round of the loop writes one byte place of all numbers that reach it.
    """
    lengths = _n_leb128_bytes(numbers)
    stream = np.empty(int(lengths.sum()), np.uint8)
    at = np.cumsum(lengths, dtype=np.intp) - lengths
    while len(numbers):
        longer = numbers > 0x7F
        stream[at] = numbers.astype(np.uint8) & 0x7F | longer.view(np.uint8) << 7
        rows = np.flatnonzero(longer)
        numbers, at = numbers[rows] >> 7, at[rows] + 1
    return stream


def decode_leb128(stream: npt.NDArray[np.uint8]) -> Positions:
    """The numbers ``encode_leb128`` wrote, again one byte place of all numbers per round."""
    ends = np.flatnonzero(stream < 0x80)
    at = ends.copy()
    at[1:] = ends[:-1] + 1
    at[:1] = 0
    numbers: Positions = (stream[at] & 0x7F).astype(np.intp)
    rows, shift = np.flatnonzero(at < ends), 7
    while len(rows):
        at[rows] += 1
        numbers[rows] |= (stream[at[rows]] & 0x7F).astype(np.intp) << shift
        rows, shift = rows[at[rows] < ends[rows]], shift + 7
    return numbers


def _n_leb128_bytes(numbers: Positions) -> npt.NDArray[np.uint8]:
    lengths = np.ones(len(numbers), np.uint8)
    largest, shift = int(numbers.max(initial=0)), 7
    while largest >> shift:
        lengths += numbers >= 1 << shift
        shift += 7
    return lengths
