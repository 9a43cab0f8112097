from __future__ import annotations

import numpy as np
import pytest

from weightwire.bench import generate
from weightwire.bench.generate import format_of, generate_pair, round_masters
from weightwire.errors import StopError, UnsupportedDType
from weightwire.model import dtype_named

FLOATS = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")
BF16 = dtype_named("BF16")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_the_wanted_density_is_reached(name: str, density: float) -> None:
    pair = generate_pair(1 << 18, dtype_named(name), density, seed=3)
    assert np.mean(pair.old != pair.new) == pytest.approx(density, rel=0.15)
    assert pair.density == density


@pytest.mark.parametrize("name", FLOATS)
def test_full_density_changes_every_element(name: str) -> None:
    pair = generate_pair(50_000, dtype_named(name), 1.0, seed=3)
    assert np.all(pair.old != pair.new)


@pytest.mark.parametrize("name", FLOATS)
def test_no_density_changes_no_element(name: str) -> None:
    pair = generate_pair(50_000, dtype_named(name), 0.0, seed=3)
    assert np.array_equal(pair.old, pair.new)


@pytest.mark.parametrize("name", FLOATS)
def test_all_elements_are_finite(name: str) -> None:
    dtype = dtype_named(name)
    pair = generate_pair(1 << 16, dtype, 0.01, seed=3)
    floats = pair.new.view(np.dtype(format_of(dtype).float_type)).astype(np.float64)
    assert np.isfinite(floats).all()


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    first, again, other = (generate_pair(10_000, BF16, 0.01, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.old, again.old)
    assert np.array_equal(first.new, again.new)
    assert not np.array_equal(first.old, other.old)


def test_blocks_differ_and_do_not_depend_on_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "BLOCK_ELEMENTS", 4096)
    pair = generate_pair(3 * 4096 + 5, BF16, 1.0, seed=1)
    shorter = generate_pair(2 * 4096, BF16, 1.0, seed=1)
    assert np.array_equal(pair.old[: 2 * 4096], shorter.old)
    assert not np.array_equal(pair.old[:4096], pair.old[4096:8192])


def test_small_weights_change_more_often_than_large_ones() -> None:
    pair = generate_pair(1 << 18, BF16, 0.03, seed=1)
    magnitudes = pair.old & 0x7FFF
    small = magnitudes < np.median(magnitudes)
    changed = pair.old != pair.new
    assert changed[small].mean() > 2 * changed[~small].mean()


def test_most_changes_are_one_unit_in_the_last_place() -> None:
    pair = generate_pair(1 << 18, BF16, 0.01, seed=1)
    changed = np.flatnonzero(pair.old != pair.new)
    steps = np.abs(pair.old[changed].astype(np.int64) - pair.new[changed].astype(np.int64))
    assert np.mean(steps == 1) > 0.6


def test_masters_round_to_nearest_even() -> None:
    masters = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert round_masters(masters, format_of(BF16)).tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_no_elements_are_a_pair_too() -> None:
    assert generate_pair(0, BF16, 0.01, seed=1).old.size == 0


@pytest.mark.parametrize("density", [-0.1, 1.1, float("nan")])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(StopError, match="density"):
        generate_pair(10, BF16, density, seed=1)


def test_an_integer_type_is_refused() -> None:
    with pytest.raises(UnsupportedDType, match="I32"):
        generate_pair(10, dtype_named("I32"), 0.01, seed=1)
