"""Chunk tables made by the compiled loop are those that numpy makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import DENSE

pytest.importorskip("triton", reason="triton is not installed: nothing reads the tables")

from weightwire.kernels.triton.directory import _read_by_numpy, read_directories
from weightwire.kernels.triton.weight_index import SPAN_ELEMENTS

PIECE = st.tuples(st.integers(0, 40_000), st.integers(10, 20))


def directories_for(
    pieces: list[tuple[int, int]], seed: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Heads of all kinds, and sizes of which many are zero."""
    rng = np.random.default_rng(seed)
    sizes, log2s = np.array(pieces, dtype=np.int64).reshape(-1, 2).T.copy()
    counts = (-(-sizes >> log2s)).tolist()
    heads = [rng.choice([0, 7, DENSE, DENSE | 3, (1 << 32) - 1], count) for count in counts]
    words = [rng.choice([0, 0, 1, 900, (1 << 32) - 1], count) for count in counts]
    both = zip(heads, words, strict=True)
    return [np.stack(each, axis=1).astype(np.uint32) for each in both], log2s, sizes


@given(st.lists(PIECE, min_size=1, max_size=9), st.integers(0, 99))
def test_both_give_the_same_tables(pieces: list[tuple[int, int]], seed: int) -> None:
    given_to_both = directories_for(pieces, seed)
    wanted, found = _read_by_numpy(*given_to_both), read_directories(*given_to_both)
    for name in wanted._fields:
        one, other = getattr(wanted, name), getattr(found, name)
        assert one.dtype == other.dtype, name
        assert one.tolist() == other.tolist(), name


@pytest.mark.parametrize("n_rows", [0, 1, 3])
def test_a_directory_that_does_not_match_its_piece_is_refused(n_rows: int) -> None:
    rows = [np.zeros((n_rows, 2), dtype=np.uint32)]
    for read in (_read_by_numpy, read_directories):
        with pytest.raises(CorruptStream, match="more or fewer chunks"):
            read(rows, np.array([10]), np.array([1500]))


def test_spans_are_as_long_as_the_kernels_say() -> None:
    (rows,), log2s, sizes = directories_for([(3 << 14, 14)], 0)
    first_span = read_directories([rows], log2s, sizes).first_span
    assert first_span.tolist() == [0, (1 << 14) // SPAN_ELEMENTS, (2 << 14) // SPAN_ELEMENTS]
