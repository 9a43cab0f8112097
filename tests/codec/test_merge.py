"""Merging a chain of patches: one net patch to the same target."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightwire as ww
from weightwire.errors import BaseMismatch, IncompatiblePatches

State = dict[str, np.ndarray]


def version(number: int) -> State:
    """A state per number; consecutive ones differ in a few elements."""
    state = {
        "w": (np.arange(400) % 89).astype(np.float32).reshape(20, 20),
        "b": np.arange(50, dtype=np.float16),
        "same": np.arange(5),
    }
    for step in range(number):
        state["w"].reshape(-1)[step::17] += np.float32(1)
        state["b"][step::5] *= np.float16(-1)
    return state


def chain(codec: str, *numbers: int) -> list[ww.Patch]:
    return [ww.diff(version(a), version(b), codec=codec) for a, b in pairwise(numbers)]


def assert_leads(base: State, patch: ww.Patch, target: State) -> None:
    ww.apply(base, patch)
    assert {n: a.tobytes() for n, a in base.items()} == {n: a.tobytes() for n, a in target.items()}


def bodies(patch: ww.Patch) -> list[tuple[str, bytes]]:
    return [(record.head.key, record.body.tobytes()) for record in patch.records()]


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_merge_with_a_base_is_the_diff_of_its_ends(codec: str) -> None:
    merged = ww.merge(version(0), *chain(codec, 0, 1, 2, 3))
    straight = ww.diff(version(0), version(3), codec=codec)
    assert merged.index == straight.index
    assert bodies(merged) == bodies(straight)
    assert_leads(version(0), merged, version(3))


def test_plain_patches_merge_without_a_base() -> None:
    merged = ww.merge(None, *chain("plain", 0, 1, 2, 3))
    straight = ww.diff(version(0), version(3), codec="plain")
    assert merged.target_digest == straight.target_digest
    assert merged.base_digest == straight.base_digest
    assert set(straight.heads) <= set(merged.heads)
    assert_leads(version(0), merged, version(3))


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_there_and_back_merges_to_nothing(codec: str) -> None:
    merged = ww.merge(version(0), *chain(codec, 0, 2, 0))
    assert (merged.n_changed, merged.index.buckets) == (0, ())
    assert merged.base_digest == merged.target_digest == ww.digest(version(0))


def test_there_and_back_without_a_base_leads_back() -> None:
    assert_leads(version(0), ww.merge(None, *chain("plain", 0, 2, 0)), version(0))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_merging_in_any_grouping_gives_the_same_state(numbers: list[int], cut: int) -> None:
    patches = chain("plain", *numbers)
    cut = min(cut, len(patches))
    halves = [ww.merge(None, *part) for part in (patches[:cut], patches[cut:]) if part]
    assert_leads(version(numbers[0]), ww.merge(None, *halves), version(numbers[-1]))
    assert_leads(version(numbers[0]), ww.merge(None, *patches), version(numbers[-1]))


@pytest.mark.parametrize("with_base", [True, False])
def test_tensors_that_come_go_and_change_shape_merge(with_base: bool) -> None:
    a = {"x": np.arange(6), "y": np.arange(3), "z": np.ones((2, 3), np.int8)}
    b = {"x": np.arange(6) + 1, "z": np.ones((3, 2), np.int8), "n": np.arange(4, dtype=np.float32)}
    c = {"x": np.arange(6.0), "z": np.zeros((6,), np.int8), "n": b["n"] * 2, "y": np.arange(9)}
    patches = [ww.diff(a, b, codec="plain"), ww.diff(b, c, codec="plain")]
    merged = ww.merge({n: t.copy() for n, t in a.items()} if with_base else None, *patches)
    ww.apply(a, merged)
    assert {n: (t.dtype, t.shape, t.tobytes()) for n, t in a.items()} == {
        n: (t.dtype, t.shape, t.tobytes()) for n, t in c.items()
    }


def test_compact_patches_without_a_base_are_refused() -> None:
    with pytest.raises(IncompatiblePatches, match="need their base"):
        ww.merge(None, *chain("compact", 0, 1, 2))


def test_no_patches_are_refused() -> None:
    with pytest.raises(IncompatiblePatches, match="no patches"):
        ww.merge(version(0))


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_chain_with_a_gap_is_refused(codec: str) -> None:
    first, _, third = chain(codec, 0, 1, 2, 3)
    for base in (None, version(0)):
        with pytest.raises(IncompatiblePatches, match="patch 1 leads to"):
            ww.merge(base, first, third)


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_another_base_is_refused(codec: str) -> None:
    with pytest.raises((BaseMismatch, IncompatiblePatches)):
        ww.merge(version(1), *chain(codec, 0, 1, 2))
