"""From a survey of a piece to the model that codes it: classes, weights, step tables.

Integers only, so that every machine makes the same model and thus the same bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightwire import limits
from weightwire.kernels.contract import (
    ALL_ALIKE,
    N_CLASSES,
    ONE_STEP,
    OUTLIERS,
    PROBABILITY_SUM,
    ClassModel,
    StepTable,
    Survey,
)
from weightwire.kernels.steps import max_token
from weightwire.model import DType

MAX_LOG2_WEIGHT = 8
"""A weight less one then fits a byte, and vector units look up sixteen bytes at once."""

_RARE_TO_SKIP_CODING = 1024
"""A class whose other steps are rarer than this is coded as always taking its main step."""

_SPARE_TOKENS = 3
"""A coded class can also say steps this many tokens beyond those its sample has shown."""

_TWICE_CHANGES_LOG2 = 23
"""A chunk aims at no more than 2^(23/2) changes, and at more than half of that.

Its 20 bytes of overhead stay about 1 %. A GPU reads all chunks at once, each in order: the longest
says how long that takes.
"""

_MANY = 1 << 16
"""Elements per change from which on chunks are the largest there are."""


UNUSED_MODEL = ALL_ALIKE
"""The shortest model there is, for pieces without a coded chunk."""


def build_model(survey: Survey, dtype: DType) -> ClassModel:
    """Choose how to code a piece that looks like this."""
    base_key = find_base_key(survey.n_by_key)
    n_elements = sums_by_class(survey.n_by_key, base_key)
    n_changed = sums_by_class(survey.n_changed_by_key_token, base_key)
    return model_of_classes(base_key, n_elements, n_changed, max_token(dtype))


def choose_chunk_log2(survey: Survey) -> int:
    """The chunk size that gives chunks of so many changes as is aimed at."""
    return chunk_log2_of(int(survey.n_by_key.sum()), int(survey.n_changed_by_key_token.sum()))


def model_of_classes(
    base_key: int,
    n_elements: npt.NDArray[np.int64],
    by_token: npt.NDArray[np.int64],
    last_token: int,
) -> ClassModel:
    """The model of a piece with so many elements in each class, and changes by class and token.

    The last class, of the largest numbers, has weight 1 and is never expected to change: it is the
    coldest in practice, and fixing it lets vector look-ups past the end of a table stand for it.
    """
    n_changed = by_token.sum(axis=1)
    expected = 2 * n_changed > n_elements
    n_events = np.where(expected, n_elements - n_changed, n_changed)
    nearest = _nearest_present(n_elements)
    tables = _step_tables(by_token, last_token)
    log2_weights = _log2_weights(n_events.tolist(), n_elements.tolist())
    return ClassModel(
        base_key=base_key,
        log2_weights=(*(log2_weights[c] for c in nearest[:-1]), 0),
        expected=(*(bool(expected[c]) for c in nearest[:-1]), False),
        steps=tuple(tables[c] for c in nearest),
    )


def chunk_log2_of(n_elements: int, n_changed: int) -> int:
    """The chunk size for a sample of so many elements with so many changes."""
    per_change = max(1, min(n_elements // max(1, n_changed), _MANY))
    # floor(log2(2^(23/2) * per_change)): the log2 of its square, halved.
    wanted = ((per_change * per_change << _TWICE_CHANGES_LOG2).bit_length() - 1) // 2
    return min(max(wanted, limits.MIN_CHUNK_LOG2), limits.MAX_CHUNK_LOG2)


def find_base_key(n_by_key: npt.NDArray[np.int64]) -> int:
    """The window's lowest key: its top is the highest key that is not an outlier."""
    above = np.cumsum(n_by_key[::-1])[::-1] - n_by_key
    top = int(np.argmax(above * OUTLIERS <= n_by_key.sum()))
    return max(0, top - N_CLASSES + 1)


def sums_by_class(by_key: npt.NDArray[np.int64], base_key: int) -> npt.NDArray[np.int64]:
    """Sums over the keys of each class; the outer classes take all keys beyond the window."""
    borders = base_key + np.arange(N_CLASSES)
    borders[0] = 0
    padded = np.zeros((base_key + N_CLASSES, *by_key.shape[1:]), dtype=np.int64)
    padded[: len(by_key)] = by_key[: len(padded)]
    padded[-1] += by_key[len(padded) :].sum(axis=0)
    return np.add.reduceat(padded, borders)


def _nearest_present(n_elements: npt.NDArray[np.int64]) -> list[int]:
    """For each class the nearest one the sample has seen: what the unseen ones go by."""
    present = np.flatnonzero(n_elements).tolist() or list(range(N_CLASSES))
    seen = set(present)
    return [c if c in seen else min(present, key=lambda p: abs(p - c)) for c in range(N_CLASSES)]


def _log2_weights(n_events: list[int], n_elements: list[int]) -> list[int]:
    """Rates rounded to powers of two, relative to the class with the most events."""
    rates = [_rate(e, n) for e, n in zip(n_events, n_elements, strict=True)]
    anchor = rates[n_events.index(max(n_events))]
    relative = [_rounded_log2(r[0] * anchor[1], r[1] * anchor[0]) for r in rates]
    present = [w for w, n in zip(relative, n_elements, strict=True) if n] or [0]
    floor = max(min(present), max(present) - MAX_LOG2_WEIGHT)
    return [min(max(w - floor, 0), MAX_LOG2_WEIGHT) for w in relative]


def _rate(n_events: int, n_elements: int) -> tuple[int, int]:
    """Events per element as a fraction: -ln(1 - p), to third order in p, with p never 0."""
    odd, even = 2 * n_events + 1, 2 * n_elements + 2
    return 2 * odd, 2 * even - odd


def _rounded_log2(numerator: int, denominator: int) -> int:
    """round(log2(numerator / denominator)), exactly: the log2 of the squared ratio, halved."""
    square, unit = numerator * numerator, denominator * denominator
    power = square.bit_length() - unit.bit_length()
    reached = square >= unit << power if power >= 0 else square << -power >= unit
    return ((power if reached else power - 1) + 1) // 2


def _step_tables(by_token: npt.NDArray[np.int64], last_token: int) -> list[StepTable]:
    totals, mains = by_token.sum(axis=1).tolist(), by_token.argmax(axis=1).tolist()
    peaks = by_token.max(axis=1).tolist()
    return [
        ONE_STEP
        if total == 0
        else StepTable((main,), (PROBABILITY_SUM,))
        if (total - peak) * _RARE_TO_SKIP_CODING <= total
        else _coded_table(by_token[c].tolist(), last_token)
        for c, (total, main, peak) in enumerate(zip(totals, mains, peaks, strict=True))
    ]


def _coded_table(counts: list[int], last_token: int) -> StepTable:
    """A table of all tokens the sample has shown in a class, and a few beyond on either side."""
    seen = [token for token, count in enumerate(counts) if count]
    first = max(0, seen[0] - _SPARE_TOKENS)
    last = min(last_token, seen[-1] + _SPARE_TOKENS)
    return StepTable(tuple(range(first, last + 1)), _normalised(counts[first : last + 1]))


def _normalised(counts: list[int]) -> tuple[int, ...]:
    """Frequencies that sum to 2^12, none zero; the largest takes up the rounding."""
    total = sum(counts)
    frequencies = [max(1, count * PROBABILITY_SUM // total) for count in counts]
    frequencies[counts.index(max(counts))] += PROBABILITY_SUM - sum(frequencies)
    return tuple(frequencies)
