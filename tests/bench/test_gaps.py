from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.bench.gaps import (
    MAX_GAP,
    bridge,
    decode_leb128,
    encode_leb128,
    gaps_between,
    gaps_u16,
    positions_after,
)

ascending = st.sets(st.integers(0, 1 << 20), max_size=20).map(
    lambda positions: np.array(sorted(positions), np.intp)
)


@given(st.lists(st.integers(0, (1 << 62) - 1)))
def test_leb128_gives_back_every_number(numbers: list[int]) -> None:
    assert decode_leb128(encode_leb128(np.array(numbers, np.intp))).tolist() == numbers


@pytest.mark.parametrize(
    ("number", "stream"),
    [(0, "00"), (127, "7f"), (128, "8001"), (624_485, "e58e26"), ((1 << 21) - 1, "ffff7f")],
)
def test_leb128_writes_the_bytes_of_its_definition(number: int, stream: str) -> None:
    assert encode_leb128(np.array([number], np.intp)).tobytes().hex() == stream


@given(ascending)
def test_gaps_give_back_their_positions(positions: np.ndarray) -> None:
    assert np.cumsum(gaps_between(positions)).tolist() == positions.tolist()


@given(ascending)
def test_bridged_positions_keep_all_and_step_no_further_than_two_bytes(
    positions: np.ndarray,
) -> None:
    bridged = bridge(positions)
    assert set(positions.tolist()) <= set(bridged.tolist())
    assert len(set(bridged.tolist())) == len(bridged)
    assert gaps_between(bridged).max(initial=0) <= MAX_GAP
    assert positions_after(gaps_u16(bridged)).tolist() == bridged.tolist()


@pytest.mark.parametrize(
    ("positions", "bridged"),
    [
        ([65_535], [65_535]),
        ([65_536], [65_535, 65_536]),
        ([131_070], [65_535, 131_070]),
        ([5, 65_541], [5, 65_540, 65_541]),
        ([131_071, 131_072], [65_535, 131_070, 131_071, 131_072]),
    ],
)
def test_a_gap_is_bridged_with_as_few_positions_as_possible(
    positions: list[int], bridged: list[int]
) -> None:
    assert bridge(np.array(positions, np.intp)).tolist() == bridged
