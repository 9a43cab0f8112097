"""The race itself: every encoding on the same tensors, in turns, every result checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from weightwire.bench.cases import Case
from weightwire.bench.contender import Contender
from weightwire.bench.results import CaseResult, Measurement
from weightwire.errors import TargetMismatch
from weightwire.model import Bits

Clock: TypeAlias = Callable[[], float]
"""Seconds since some fixed moment."""


@dataclass(frozen=True)
class Lap:
    """One encoding's turn: one encode, one decode."""

    n_bytes: int
    encode_s: float
    decode_s: float


def race(case: Case, contenders: Sequence[Contender], n_repeats: int, clock: Clock) -> CaseResult:
    """Time every contender ``n_repeats`` times and keep the best of each direction.

    They take turns within each repetition, so that a noisy moment of the machine hits all alike.

    Raises:
        TargetMismatch: a decoded patch did not give the new bits.
    """
    outs = [np.empty_like(pair.old) for pair in case.pairs]
    laps: list[list[Lap]] = [[] for _ in contenders]
    for _ in range(n_repeats):
        for own_laps, contender in zip(laps, contenders, strict=True):
            own_laps.append(run_lap(case, contender, outs, clock))
    n_changed = case.n_changed
    measurements = tuple(
        _best(case, contender, own_laps, n_changed)
        for own_laps, contender in zip(laps, contenders, strict=True)
    )
    return CaseResult(case.name, case.group, case.dtype, case.n_elements, n_changed, measurements)


def run_lap(case: Case, contender: Contender, outs: Sequence[Bits], clock: Clock) -> Lap:
    """Encode and decode once; copying the old bits and comparing the result are not timed.

    Raises:
        TargetMismatch: the decoded patch did not give the new bits.
    """
    start = clock()
    patch = contender.encode(case.pairs)
    encode_s = clock() - start
    for out, pair in zip(outs, case.pairs, strict=True):
        np.copyto(out, pair.old)
    start = clock()
    patch.decode_into(outs)
    decode_s = clock() - start
    _check(case, contender, outs)
    return Lap(patch.n_bytes, encode_s, decode_s)


def _check(case: Case, contender: Contender, outs: Sequence[Bits]) -> None:
    for index, (out, pair) in enumerate(zip(outs, case.pairs, strict=True)):
        if not np.array_equal(out, pair.new):
            reason = f"{contender.name!r} did not restore tensor {index} of case {case.name!r}"
            raise TargetMismatch(reason)


def _best(case: Case, contender: Contender, laps: Sequence[Lap], n_changed: int) -> Measurement:
    return Measurement(
        encoding=contender.name,
        source=contender.source,
        n_threads=contender.n_threads,
        n_bytes=laps[0].n_bytes,
        n_changed=n_changed,
        n_model_bytes=case.n_bytes,
        encode_s=min(lap.encode_s for lap in laps),
        decode_s=min(lap.decode_s for lap in laps),
    )
