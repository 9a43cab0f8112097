"""The digest sees every single change, and can be added up and moved."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightwire as ww
from weightwire.digest import TensorDigest, combine, digest_at, digest_bits
from weightwire.model import TensorSpec, dtype_named

WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64)
every_width = pytest.mark.parametrize("width", WIDTHS)


def noise(n: int, width: type, seed: int = 1) -> np.ndarray:
    mixed = (np.arange(n, dtype=np.uint64) + np.uint64(seed << 40)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(7)).astype(width)


def assert_both_lanes_differ(one: TensorDigest, other: TensorDigest) -> None:
    assert one.low != other.low
    assert one.high != other.high


@every_width
@pytest.mark.parametrize("fill", ["zeros", "ones", "noise"])
def test_every_flipped_bit_changes_both_lanes(width: type, fill: str) -> None:
    n, n_bits = 259, 8 * np.dtype(width).itemsize
    bits = (
        noise(n, width)
        if fill == "noise"
        else np.full(n, 0 if fill == "zeros" else -1).astype(width)
    )
    whole = digest_bits(bits)
    for place, bit in itertools.product(range(n), range(n_bits)):
        at = np.array([place], np.uint32)
        old = bits[at]
        moved = whole - digest_at(at, old) + digest_at(at, old ^ width(1 << bit))
        assert_both_lanes_differ(whole, moved)


@every_width
def test_every_swap_of_unequal_elements_changes_both_lanes(width: type) -> None:
    bits = noise(600, width)
    whole = digest_bits(bits)
    for a, b in itertools.product((0, 1, 7, 255, 256, 511, 512), range(0, 600, 3)):
        if bits[a] == bits[b]:
            continue
        swapped = bits.copy()
        swapped[[a, b]] = bits[[b, a]]
        assert_both_lanes_differ(whole, digest_bits(swapped))


@every_width
def test_shifts_and_rotations_change_both_lanes(width: type) -> None:
    bits = noise(1000, width)
    whole = digest_bits(bits)
    for by in (1, 2, 16, 128, 255, 256, 257, 512, 768):
        assert_both_lanes_differ(whole, digest_bits(np.roll(bits, by)))
        assert_both_lanes_differ(whole, digest_bits(bits, by))


@every_width
def test_pairs_swapped_in_opposite_directions_do_not_cancel(width: type) -> None:
    for gap, distance in itertools.product((1, 3, 256, 300), (1, 2, 256, 512)):
        bits = noise(1600, width)
        places = [5, 5 + gap, 5 + distance + 700, 5 + gap + distance + 700]
        bits[places] = np.array([9, 77, 77, 9], width)
        swapped = bits.copy()
        swapped[places] = np.array([77, 9, 9, 77], width)
        assert_both_lanes_differ(digest_bits(bits), digest_bits(swapped))


def test_moves_of_plus_and_minus_one_do_not_cancel() -> None:
    bits = np.full(512, 1000, np.uint16)
    seen = set()
    for a, b in itertools.permutations(range(0, 512, 5), 2):
        at = np.array([a, b], np.uint32)
        seen.add(digest_at(at, np.array([1001, 999], np.uint16)) - digest_at(at, bits[at]))
    assert TensorDigest() not in seen
    assert len(seen) == 103 * 102


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_no_two_small_states_collide(backend: str) -> None:
    ww.use_backend(backend)
    try:
        singles = np.arange(256, dtype=np.uint8)
        digests = [[digest_bits(singles[v : v + 1], p) for v in range(256)] for p in range(2)]
        pairs = {digests[0][a] + digests[1][b] for a in range(256) for b in range(256)}
        lengths = {digest_bits(np.zeros(n, np.uint8)) for n in range(600)}
    finally:
        ww.use_backend(None)
    assert len(pairs) == 1 << 16
    assert len({pair.low for pair in pairs}) == len({pair.high for pair in pairs}) == 1 << 16
    assert len(lengths) == 600


@given(st.lists(st.integers(0, 900), max_size=6), st.sampled_from(WIDTHS), st.integers(0, 1 << 37))
@settings(max_examples=60, deadline=None)
def test_digests_of_pieces_add_up(cuts: list[int], width: type, first: int) -> None:
    bits = noise(900, width)
    borders = [0, *sorted(cuts), 900]
    parts = (digest_bits(bits[a:b], first + a) for a, b in itertools.pairwise(borders))
    assert sum(parts, TensorDigest()) == digest_bits(bits, first)


@given(st.sets(st.integers(0, 699)), st.sampled_from(WIDTHS), st.sampled_from([0, 3, 1 << 33]))
@settings(max_examples=60, deadline=None)
def test_moved_digest_is_the_one_from_scratch(places: set[int], width: type, first: int) -> None:
    old = noise(700, width)
    new, at = old.copy(), np.array(sorted(places), np.uint32)
    new[at] = ~old[at]
    moved = digest_bits(old, first) - digest_at(at, old[at], first) + digest_at(at, new[at], first)
    assert moved == digest_bits(new, first)


def test_digest_does_not_depend_on_threads() -> None:
    bits = noise(1 << 20, np.uint16)
    assert len({digest_bits(bits, 17, n_threads=n) for n in (1, 2, 5)}) == 1


def test_state_digest_binds_name_type_shape_and_bits() -> None:
    base = {"a": np.arange(6, dtype=np.uint16), "b": np.zeros(2)}
    others = [
        {"A": base["a"], "b": base["b"]},
        {"a": base["a"].astype(np.int16), "b": base["b"]},
        {"a": base["a"].astype(np.uint8), "b": base["b"]},
        {"a": base["a"].reshape(2, 3), "b": base["b"]},
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"].reshape(6, 1), "b": base["b"]},
        {"a": base["a"][::-1], "b": base["b"]},
        {"a": base["b"], "b": base["a"]},
        {"a": base["a"]},
        {**base, "c": np.zeros(0)},
        {},
    ]
    digests = [ww.digest(state) for state in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert ww.digest(dict(reversed(base.items()))) == digests[0]


def test_names_cannot_be_shifted_into_one_another() -> None:
    byte = dtype_named("U8")
    one = [
        (TensorSpec("ab", byte, ()), TensorDigest()),
        (TensorSpec("c", byte, ()), TensorDigest()),
    ]
    two = [
        (TensorSpec("a", byte, ()), TensorDigest()),
        (TensorSpec("bc", byte, ()), TensorDigest()),
    ]
    assert combine(one) != combine(two)


def test_signed_zeros_and_nan_payloads_are_told_apart() -> None:
    bits = np.array([0, 1 << 31, 0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    digests = {ww.digest({"x": bits[i : i + 1].view(np.float32)}) for i in range(len(bits))}
    assert len(digests) == len(bits)
