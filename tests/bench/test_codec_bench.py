from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from weightwire.bench.cases import GENERATED, Case, generated_case, generated_cases
from weightwire.bench.codec_bench import race
from weightwire.bench.generate import Pair
from weightwire.bench.published import PUBLISHED
from weightwire.bench.results import ratio
from weightwire.bench.sliced import published_contenders
from weightwire.errors import TargetMismatch
from weightwire.model import Bits, dtype_named

BF16 = dtype_named("BF16")


@dataclass
class CopyOfNew:
    """A patch that is the new version itself, less the tensors it forgets."""

    pairs: Sequence[Pair]
    n_forgotten: int
    n_bytes: int = 10

    def decode_into(self, outs: Sequence[Bits]) -> None:
        for out, pair in list(zip(outs, self.pairs, strict=True))[self.n_forgotten :]:
            out[:] = pair.new


@dataclass
class Copier:
    """A contender whose every turn is written to a shared log."""

    name: str
    log: list[str]
    n_forgotten: int = 0
    source: str = "a test"
    n_threads: int = 1

    def encode(self, pairs: Sequence[Pair]) -> CopyOfNew:
        self.log.append(self.name)
        return CopyOfNew(pairs, self.n_forgotten)


def small_case() -> Case:
    old = np.array([1, 2, 3, 4], "<u2")
    new = np.array([1, 9, 3, 9], "<u2")
    return Case("small", GENERATED, (Pair(old, new, BF16, 0.5), Pair(new, old, BF16, 0.5)))


def ticks(durations: Sequence[float]) -> Iterator[float]:
    """A clock that starts and stops once for each duration."""
    for start, duration in zip(count(0, 1000), durations, strict=False):
        yield start
        yield start + duration


def test_contenders_take_turns_in_every_repetition() -> None:
    log: list[str] = []
    clock = ticks([1.0] * 12)
    race(small_case(), [Copier("a", log), Copier("b", log)], 3, lambda: next(clock))
    assert log == ["a", "b", "a", "b", "a", "b"]


def test_the_best_time_of_each_direction_counts() -> None:
    clock = ticks([5.0, 2.0, 3.0, 4.0])
    result = race(small_case(), [Copier("a", [])], 2, lambda: next(clock))
    assert (result.of("a").encode_s, result.of("a").decode_s) == (3.0, 2.0)


def test_sizes_and_rates_follow_from_what_was_counted() -> None:
    clock = ticks([2.0, 4.0])
    measured = race(small_case(), [Copier("a", [])], 1, lambda: next(clock)).of("a")
    assert (measured.n_changed, measured.n_model_bytes) == (4, 16)
    assert (measured.bytes_per_change, measured.times_smaller) == (2.5, 1.6)
    assert (measured.encode_gb_per_s, measured.decode_gb_per_s) == (8e-9, 4e-9)


def test_a_contender_that_restores_wrong_bits_ends_the_benchmark() -> None:
    clock = ticks([1.0] * 4)
    with pytest.raises(TargetMismatch, match="'liar' did not restore tensor 0 of case 'small'"):
        race(small_case(), [Copier("liar", [], n_forgotten=1)], 1, lambda: next(clock))


def test_a_ratio_above_one_means_smaller_or_faster() -> None:
    clock = ticks([1.0, 2.0, 4.0, 6.0])
    result = race(small_case(), [Copier("a", []), Copier("b", [])], 1, lambda: next(clock))
    found = ratio(result, "a", "b")
    assert (found.times_smaller, found.encode_speedup, found.decode_speedup) == (1.0, 4.0, 3.0)


def test_an_encoding_that_took_no_part_has_no_measurement() -> None:
    clock = ticks([1.0] * 2)
    with pytest.raises(KeyError):
        race(small_case(), [Copier("a", [])], 1, lambda: next(clock)).of("b")


def test_every_published_encoding_restores_every_generated_case() -> None:
    clock = count(0.0, 1.0)
    with ThreadPoolExecutor(2) as pool:
        contenders = published_contenders(2, pool)
        results = [
            race(case, contenders, 1, lambda: next(clock)) for case in generated_cases(20_000)
        ]
    assert [len(result.measurements) for result in results] == [len(PUBLISHED)] * 10
    assert {result.dtype for result in results} == {"BF16", "F16", "F32", "F8_E4M3"}


def test_a_case_is_named_after_its_type_and_density() -> None:
    assert generated_case(100, "BF16", 0.003).name == "BF16 0.3 %"
