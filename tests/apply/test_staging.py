from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_cuts import cut_patch

import weightwire as ww
from sample_training import Weights, bits_of, train, weights
from weightwire.apply.pages import Pages
from weightwire.apply.staging import Staging
from weightwire.diff.memory import open_state
from weightwire.diff.spill import Spill
from weightwire.digest import TensorDigest, digest_state
from weightwire.errors import BaseMismatch
from weightwire.model import Changes

relaxed = settings(deadline=None)


def versions(n: int, share: float = 0.1) -> list[Weights]:
    state = weights(n_elements=500)
    found = []
    for seed in range(n):
        found.append({name: tensor.copy() for name, tensor in state.items()})
        train(state, seed, share)
    return found


def read_all(state: Staging) -> dict[str, bytes]:
    return {n: state.read(n, 0, spec.n_elements).tobytes() for n, spec in state.specs.items()}


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_chain_of_patches_reads_as_its_last_version_and_writes_nothing(codec: str) -> None:
    chain = versions(6)
    live = {name: tensor.copy() for name, tensor in chain[0].items()}
    staging = Staging(open_state(live))
    for old, new in pairwise(chain):
        staging.take(ww.diff(old, new, codec=codec))
        assert read_all(staging) == bits_of(new)
    assert bits_of(live) == bits_of(chain[0])


def test_net_changes_are_each_place_once() -> None:
    chain = versions(6, share=0.5)
    staging = Staging(open_state(chain[0]))
    for old, new in pairwise(chain):
        staging.take(ww.diff(old, new))
    for _, _, changes in staging.writes():
        assert (np.diff(changes.positions.astype(np.int64)) > 0).all()


def test_result_has_the_digests_of_its_tensors() -> None:
    first, second = versions(2)
    staging = Staging(open_state(first))
    staging.take(ww.diff(first, second))
    assert dict(staging.digests) == digest_state(open_state(second))[1]


def test_patch_of_another_base_is_refused() -> None:
    first, second, third = versions(3)
    staging = Staging(open_state(first))
    with pytest.raises(BaseMismatch):
        staging.take(ww.diff(second, third))


def test_unchanged_tensor_that_is_another_one_is_refused_without_reading_it() -> None:
    first, second = versions(2)
    known = dict(digest_state(open_state(first))[1])
    known["norm"] += TensorDigest(1, 0)
    staging = Staging(open_state(first), known)
    with pytest.raises(BaseMismatch, match="norm"):
        staging.take(ww.diff(first, second))


@relaxed
@given(
    st.lists(
        st.sampled_from(["train", "drop", "add", "reshape", "retype", "grow"]),
        min_size=1,
        max_size=6,
    )
)
def test_tensors_may_come_go_and_change_anywhere_in_a_chain(events: list[str]) -> None:
    state = weights(n_elements=60)
    live = {name: tensor.copy() for name, tensor in state.items()}
    staging = Staging(open_state(live))
    for number, event in enumerate(events):
        before = {name: tensor.copy() for name, tensor in state.items()}
        change(state, event, number)
        staging.take(ww.diff(before, state))
        assert read_all(staging) == bits_of(state)
        assert {n: s.shape for n, s in staging.specs.items()} == {
            n: t.shape for n, t in state.items()
        }


def change(state: Weights, event: str, number: int) -> None:
    if event == "train" and {"embed", "mlp"} <= state.keys():
        train(state, number, 0.2)
    elif event == "drop":
        state.pop("mlp", None)
    elif event == "add":
        state["mlp"] = np.full(30 + number, number, np.float32)
    elif event == "reshape":
        state["embed"] = state["embed"].reshape(-1, 2 + number % 2 * 3).copy()
    elif event == "retype":
        state["norm"] = state["norm"].astype(np.float32 if number % 2 else np.float64)
    elif event == "grow":
        state["steps"] = np.arange(len(state["steps"]) + 1)


CUTS = st.lists(st.integers(1, 599), max_size=5)


@relaxed
@given(st.lists(CUTS, min_size=1, max_size=5), st.sampled_from(["compact", "plain"]))
def test_patches_of_a_chain_may_cut_a_tensor_anywhere(cuts: list[list[int]], codec: str) -> None:
    source = np.random.default_rng(len(cuts))
    first = source.standard_normal(600).astype(np.float32)
    staging, now = Staging(open_state({"w": first})), first
    for number, each in enumerate(cuts):
        before, now = now, now.copy()
        places = source.choice(600, 60, replace=False)
        now.view(np.uint32)[places] += 1 + number
        staging.take(cut_patch("w", before, now, each, codec))
        assert staging.read("w", 0, 600).tobytes() == now.tobytes()
        assert staging.read("w", 37, 411).tobytes() == now[37:411].tobytes()
    assert staging.n_changed == 60 * len(cuts)
    written = first.copy()
    for _, start, changes in staging.writes():
        assert (np.diff(changes.positions.astype(np.int64)) > 0).all()
        written.view(np.uint32)[start + changes.positions.astype(np.int64)] = changes.bits
    assert written.tobytes() == now.tobytes()


@relaxed
@given(
    st.lists(st.tuples(st.integers(0, 500), st.sets(st.integers(0, 99), min_size=1)), max_size=8)
)
def test_pages_hold_each_place_once_with_its_latest_bits(
    pieces: list[tuple[int, set[int]]],
) -> None:
    pages, wanted = Pages(64, Spill()), np.zeros(600, np.uint16)
    for number, (start, places) in enumerate(pieces, start=1):
        positions = np.array(sorted(places), np.uint32)
        pages.add(start, Changes(positions, np.full(len(positions), number, np.uint16)))
        wanted[start + positions.astype(np.int64)] = number
    written = np.zeros(600, np.uint16)
    for start, changes in pages:
        assert start % 64 == 0
        assert changes.positions.max() < 64
        assert (np.diff(changes.positions.astype(np.int64)) > 0).all()
        written[start + changes.positions.astype(np.int64)] = changes.bits
    assert written.tobytes() == wanted.tobytes()
    bits = np.zeros(333, np.uint16)
    assert pages.lay_over(67, bits).tobytes() == wanted[67:400].tobytes()
    assert not bits.any()
