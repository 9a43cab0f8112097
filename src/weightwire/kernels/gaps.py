"""The eight fixed tables that code gaps between events; constants of the format.

A gap in weight space is geometric. With mean 2^(2 + k + f/8) slots it is split into k raw low bits
and a quotient of mean 2^(2 + f/8), coded with table f. Symbol 24 means "24 more, and again": a
geometric gap has no memory, so the same table serves on.
"""

from __future__ import annotations

from weightwire.kernels.contract import PROBABILITY_SUM

CONTINUE = 24
"""The symbol that adds 24 to the quotient and is followed by another one."""

MAX_GAP_SHIFT = 20
"""Most raw bits in a gap: keeps the coder's state within 64 bits with one renormalisation."""

MAX_RATE = 8 * MAX_GAP_SHIFT + 7
"""Largest rate index; index 8k + f stands for a mean gap of 2^(2 + k + f/8) slots."""

HEADROOM_LOG2 = 2
"""A weight may exceed 2^k by this much: no frequency below exceeds 2^12 / 2^2."""

_DECAY_Q16 = (51039, 52110, 53111, 54045, 54917, 55729, 56484, 57185)
"""round(2^16 · exp(-1 / 2^(2 + f/8))): the chance, in 2^-16, that a quotient goes on by one."""

RATE_BORDERS_Q16 = (62757, 68438, 74632, 81386, 88752, 96785, 105545, 115098)
"""round(2^16 · 2^((f - 1/2) / 8)): the border below which a mean gap belongs to table f - 1."""


def _cumulative(decay: int) -> tuple[int, ...]:
    tail = PROBABILITY_SUM << 16
    cumulative = []
    for _ in range(CONTINUE + 1):
        cumulative.append(PROBABILITY_SUM - ((tail + 0x8000) >> 16))
        tail = (tail * decay) >> 16
    return (*cumulative, PROBABILITY_SUM)


GAP_CUMULATIVE = tuple(_cumulative(decay) for decay in _DECAY_Q16)
"""Per table: 26 cumulative frequencies; symbol s has slots [c[s], c[s + 1])."""


def choose_rate(n_events: int, total_weight: int, max_log2_weight: int) -> int:
    """The rate index nearest to the mean gap, and high enough for the heaviest class."""
    rate = 8 * max(0, max_log2_weight - HEADROOM_LOG2)
    while rate < MAX_RATE and _mean_gap_reaches(rate + 1, n_events, total_weight):
        rate += 1
    return rate


def _mean_gap_reaches(rate: int, n_events: int, total_weight: int) -> bool:
    border = RATE_BORDERS_Q16[rate % 8] << (2 + rate // 8)
    return total_weight << 16 >= n_events * border
