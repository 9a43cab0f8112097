from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.bench import zstd
from weightwire.bench.contender import Span, cut
from weightwire.bench.generate import Pair
from weightwire.bench.published import BEST_PUBLISHED, PUBLISHED, Parts, SliceEncoding
from weightwire.bench.sliced import PublishedContender, slice_elements
from weightwire.errors import StopError
from weightwire.model import Bits, dtype_named

WIDTHS = (1, 2, 4, 8)
every_encoding = pytest.mark.parametrize("encoding", PUBLISHED, ids=lambda e: e.name)
every_width = pytest.mark.parametrize("width", WIDTHS)


def bits_type(width: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{width}")


def random_bits(source: np.random.Generator, n_elements: int, width: int) -> Bits:
    return np.frombuffer(source.bytes(n_elements * width), bits_type(width)).copy()


def apply(encoding: SliceEncoding, old: Bits, parts: Parts) -> Bits:
    out = old.copy()
    encoding.decode_into(out, parts)
    return out


def changed_at(n_elements: int, width: int, positions: list[int]) -> tuple[Bits, Bits]:
    old = random_bits(np.random.default_rng(0), n_elements, width)
    new = old.copy()
    new[positions] ^= 1
    return old, new


@every_encoding
@settings(max_examples=60, deadline=None)
@given(
    n_elements=st.integers(0, 3000),
    width=st.sampled_from(WIDTHS),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_change_of_any_width_is_restored_bit_for_bit(
    encoding: SliceEncoding, n_elements: int, width: int, share: float, seed: int
) -> None:
    source = np.random.default_rng(seed)
    old = random_bits(source, n_elements, width)
    new = np.where(source.random(n_elements) < share, random_bits(source, n_elements, width), old)
    new = new.astype(old.dtype)
    assert np.array_equal(apply(encoding, old, encoding.encode(old, new)), new)


@every_encoding
@settings(max_examples=25, deadline=None)
@given(positions=st.sets(st.integers(0, 399_999), max_size=8), width=st.sampled_from(WIDTHS))
def test_gaps_of_any_length_are_restored(
    encoding: SliceEncoding, positions: set[int], width: int
) -> None:
    old, new = changed_at(400_000, width, sorted(positions))
    assert np.array_equal(apply(encoding, old, encoding.encode(old, new)), new)


@every_encoding
@every_width
def test_an_empty_slice_stays_empty(encoding: SliceEncoding, width: int) -> None:
    nothing = np.empty(0, bits_type(width))
    assert apply(encoding, nothing, encoding.encode(nothing, nothing)).size == 0


@every_encoding
@every_width
def test_a_slice_where_nothing_changed_is_left_as_it_is(
    encoding: SliceEncoding, width: int
) -> None:
    old, new = changed_at(5000, width, [])
    assert np.array_equal(apply(encoding, old, encoding.encode(old, new)), new)


@every_encoding
@every_width
def test_a_slice_where_everything_changed_is_restored(encoding: SliceEncoding, width: int) -> None:
    old, new = changed_at(5000, width, list(range(5000)))
    assert np.array_equal(apply(encoding, old, encoding.encode(old, new)), new)


@every_encoding
@pytest.mark.parametrize(
    "position", [0, 1, 126, 127, 128, 254, 255, 256, 65_534, 65_535, 65_536, 131_070, 131_071]
)
def test_a_gap_at_the_border_of_a_code_is_restored(encoding: SliceEncoding, position: int) -> None:
    old, new = changed_at(300_000, 2, [position, 2 * position + 1])
    assert np.array_equal(apply(encoding, old, encoding.encode(old, new)), new)


@every_encoding
def test_the_sign_of_zero_and_the_payload_of_a_nan_are_changes(encoding: SliceEncoding) -> None:
    old = np.array([0x0000, 0x7FC0, 0x7F80, 0x0001], "<u2")
    new = np.array([0x8000, 0x7FC1, 0xFF80, 0x0001], "<u2")
    assert np.array_equal(apply(encoding, old, encoding.encode(old, new)), new)


@every_encoding
def test_an_encoding_never_writes_to_what_it_is_given(encoding: SliceEncoding) -> None:
    old, new = changed_at(200_000, 2, [3, 150_000])
    old.flags.writeable = False
    new.flags.writeable = False
    encoding.encode(old, new)


def test_uncompressed_encodings_have_the_sizes_their_names_promise() -> None:
    old, new = changed_at(1000, 2, [10, 20, 400])
    sizes = {e.name: sum(part.nbytes for part in e.encode(old, new)) for e in PUBLISHED}
    assert sizes["int32 position + value"] == 3 * 6
    assert sizes["u16 gap + value"] == 3 * 4
    assert sizes["LEB128 gap + value"] == 3 * 3 + 1


def test_names_are_distinct_and_the_best_one_is_among_them() -> None:
    names = [encoding.name for encoding in PUBLISHED]
    assert len(set(names)) == len(PUBLISHED) == 6
    assert BEST_PUBLISHED in names


def test_cut_covers_every_element_once() -> None:
    spans = cut([5, 0, 2], 2)
    assert spans == (Span(0, 0, 2), Span(0, 2, 4), Span(0, 4, 5), Span(2, 0, 2))


@pytest.mark.parametrize(
    ("n_elements", "n_threads", "expected"),
    [
        (1 << 27, 2, 1 << 22),
        (1 << 22, 2, 1 << 21),
        (1 << 24, 16, 1 << 20),
        (1 << 20, 16, 1 << 18),
        (0, 1, 1 << 18),
    ],
)
def test_slices_shrink_only_to_keep_all_threads_at_work(
    n_elements: int, n_threads: int, expected: int
) -> None:
    assert slice_elements(n_elements, n_threads) == expected


@every_encoding
def test_slices_on_threads_restore_every_tensor(
    encoding: SliceEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.bench.sliced.SLICE_ELEMENTS", 1000)
    versions = [changed_at(n, 2, list(range(0, n, 7))) for n in (0, 1, 999, 1000, 4321)]
    pairs = [Pair(old, new, dtype_named("BF16"), 1 / 7) for old, new in versions]
    outs = [pair.old.copy() for pair in pairs]
    with ThreadPoolExecutor(2) as pool:
        patch = PublishedContender(encoding, 2, pool).encode(pairs)
        patch.decode_into(outs)
    assert all(np.array_equal(out, pair.new) for out, pair in zip(outs, pairs, strict=True))
    assert patch.n_bytes == sum(part.nbytes for parts in patch.parts for part in parts)


def test_a_missing_zstandard_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    zstd._contexts.cache_clear()
    with pytest.raises(StopError, match=r"weightwire\[bench\]"):
        zstd.compress(np.zeros(1, np.uint8))
