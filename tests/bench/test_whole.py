"""The straightforward contender restores every bit and costs what its encoding costs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.bench.generate import Pair, generate_pair
from weightwire.bench.published import BEST_PUBLISHED, ShortGapsXor
from weightwire.bench.sliced import PublishedContender
from weightwire.bench.whole import WHOLE_TENSORS, WholeTensors
from weightwire.model import Bits, dtype_named

every_thread_count = pytest.mark.parametrize("n_threads", [1, 2])


def pair_of(old: Bits, new: Bits) -> Pair:
    return Pair(old, new, dtype_named(f"U{8 * old.itemsize}"), 0.0)


def restored(pairs: list[Pair], n_threads: int = 1) -> list[bytes]:
    outs = [pair.old.copy() for pair in pairs]
    WholeTensors(n_threads).encode(pairs).decode_into(outs)
    return [out.tobytes() for out in outs]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 2000), max_size=4),
    width=st.sampled_from([1, 2, 4, 8]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_change_of_any_width_is_restored_bit_for_bit(
    sizes: list[int], width: int, share: float, seed: int
) -> None:
    source = np.random.default_rng(seed)
    pairs = []
    for n in sizes:
        old = source.integers(0, 256, n * width, np.uint8).view(f"<u{width}")
        pairs.append(pair_of(old, np.where(source.random(n) < share, ~old, old)))
    assert restored(pairs) == [pair.new.tobytes() for pair in pairs]


@every_thread_count
@settings(max_examples=15, deadline=None)
@given(positions=st.sets(st.integers(0, 399_999), max_size=8))
def test_gaps_of_any_length_are_restored(n_threads: int, positions: set[int]) -> None:
    old = np.arange(400_000).astype("<u2")
    new = old.copy()
    new[sorted(positions)] ^= 1
    assert restored([pair_of(old, new)], n_threads) == [new.tobytes()]


@every_thread_count
def test_frames_made_with_several_threads_are_restored(n_threads: int) -> None:
    pair = generate_pair(1 << 21, dtype_named("BF16"), 1.0, 3)
    assert restored([pair], n_threads) == [pair.new.tobytes()]


def test_it_never_writes_to_what_it_is_given() -> None:
    old, new = np.zeros(1000, "<u2"), np.ones(1000, "<u2")
    old.flags.writeable = new.flags.writeable = False
    WholeTensors(1).encode([pair_of(old, new)])


def test_its_size_is_that_of_the_sliced_version_within_three_percent() -> None:
    pairs = [generate_pair(1 << 20, dtype_named("BF16"), 0.01, seed) for seed in (1, 2)]
    patch = WholeTensors(2).encode(pairs)
    with ThreadPoolExecutor(1) as pool:
        sliced = PublishedContender(ShortGapsXor(), 1, pool).encode(pairs)
    assert patch.n_bytes == sum(len(frame) for frame in patch.frames)
    assert abs(patch.n_bytes / sliced.n_bytes - 1) < 0.03


def test_its_name_says_which_encoding_it_is_and_how_it_works() -> None:
    assert WHOLE_TENSORS == "u16 gap + XOR + zstd-1, whole tensors"
    assert WholeTensors(1).name.startswith(BEST_PUBLISHED)
    assert WholeTensors(3).n_threads == 3
