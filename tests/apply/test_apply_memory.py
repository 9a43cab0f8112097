"""Patches onto live tensors: everything is proven before the first write, and writes can be repeated."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

import weightwire as ww
from weightwire.apply.memory import activate, stage
from weightwire.errors import (
    BaseMismatch,
    MissingTensor,
    TargetMismatch,
    UnsupportedLayout,
    WeightwireError,
)

State = dict[str, np.ndarray]
both_codecs = pytest.mark.parametrize("codec", ["compact", "plain"])


def base_state() -> State:
    return {
        "w": np.arange(3000, dtype=np.float32).reshape(30, 100),
        "b": np.arange(64, dtype=np.float16),
        "same": np.arange(5),
    }


def target_state() -> State:
    state = base_state()
    state["w"][::3, 7] += 1
    state["b"] *= np.float16(-1)
    return state


def bits_of(state: State) -> dict[str, tuple[object, ...]]:
    return {name: (t.dtype, t.shape, t.tobytes()) for name, t in state.items()}


@both_codecs
def test_apply_brings_base_to_target(codec: str) -> None:
    live = base_state()
    patch = ww.diff(base_state(), target_state(), codec=codec)
    applied = ww.apply(live, patch)
    assert bits_of(live) == bits_of(target_state())
    assert (applied.digest, applied.n_changed) == (ww.digest(target_state()), 10 + 64)


@both_codecs
def test_apply_writes_into_the_tensors_it_was_given(codec: str) -> None:
    live = base_state()
    before = dict(live)
    ww.apply(live, ww.diff(base_state(), target_state(), codec=codec))
    assert all(live[name] is before[name] for name in before)


@both_codecs
def test_applying_twice_is_refused_and_changes_nothing(codec: str) -> None:
    live, patch = base_state(), ww.diff(base_state(), target_state(), codec=codec)
    ww.apply(live, patch)
    with pytest.raises(BaseMismatch):
        ww.apply(live, patch)
    assert bits_of(live) == bits_of(target_state())


@both_codecs
def test_wrong_base_is_refused_before_anything_is_written(codec: str) -> None:
    patch = ww.diff(base_state(), target_state(), codec=codec)
    for name in base_state():
        live = base_state()
        live[name].reshape(-1)[-1] += 1
        before = bits_of(live)
        with pytest.raises(BaseMismatch, match=name):
            ww.apply(live, patch)
        assert bits_of(live) == before


@both_codecs
def test_activation_can_be_repeated(codec: str) -> None:
    live = base_state()
    staged = stage(live, ww.diff(base_state(), target_state(), codec=codec))
    assert bits_of(live) == bits_of(base_state())
    for _ in range(3):
        activate(live, staged)
        assert bits_of(live) == bits_of(target_state())


@both_codecs
def test_activation_after_a_partial_one_converges(codec: str) -> None:
    patch = ww.diff(base_state(), target_state(), codec=codec)
    for n_written in range(0, 30, 7):
        live = base_state()
        staged = stage(live, patch)
        live["w"][:n_written] = target_state()["w"][:n_written]
        activate(live, staged)
        assert bits_of(live) == bits_of(target_state())


@both_codecs
def test_structural_activation_can_be_repeated(codec: str) -> None:
    base = {**base_state(), "gone": np.ones(3)}
    target = {**target_state(), "new": np.arange(4, dtype=np.int8)}
    target["b"] = target["b"].reshape(8, 8)
    live = {name: t.copy() for name, t in base.items()}
    staged = stage(live, ww.diff(base, target, codec=codec))
    for _ in range(2):
        activate(live, staged)
        assert bits_of(live) == bits_of(target)


def test_second_tensor_that_is_read_only_stops_the_first_from_being_written() -> None:
    live = base_state()
    live["b"].flags.writeable = False
    with pytest.raises(UnsupportedLayout, match="'b' is read-only"):
        ww.apply(live, ww.diff(base_state(), target_state()))
    assert bits_of(live) == bits_of(base_state())


def test_tensor_that_does_not_change_may_be_read_only() -> None:
    live = base_state()
    live["same"].flags.writeable = False
    ww.apply(live, ww.diff(base_state(), target_state()))
    assert bits_of(live) == bits_of(target_state())


def test_number_in_a_state_can_be_compared_but_not_written() -> None:
    patch = ww.diff(
        {"step": np.float32(1), "w": np.zeros(3)}, {"step": np.float32(2), "w": np.ones(3)}
    )
    live = {"step": np.float32(1), "w": np.zeros(3)}
    with pytest.raises(UnsupportedLayout, match="'step' is read-only"):
        ww.apply(live, patch)
    assert live["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("spoil", ["missing", "extra", "retyped", "reshaped", "renamed"])
def test_state_of_other_tensors_is_refused(spoil: str) -> None:
    live = base_state()
    if spoil in ("missing", "renamed"):
        moved = live.pop("b")
    if spoil == "renamed":
        live["B"] = moved
    if spoil == "extra":
        live["more"] = np.zeros(2)
    if spoil == "retyped":
        live["b"] = live["b"].view(np.int16)
    if spoil == "reshaped":
        live["b"] = live["b"].reshape(8, 8)
    before = bits_of(live)
    with pytest.raises((BaseMismatch, MissingTensor)):
        ww.apply(live, ww.diff(base_state(), target_state()))
    assert bits_of(live) == before


def test_missing_tensor_is_named_when_a_patch_is_laid_over_a_state() -> None:
    from weightwire.codec.patched import PatchedState
    from weightwire.diff.memory import MemoryState

    patch = ww.diff(base_state(), target_state())
    for name in ("b", "same"):
        state = {n: t for n, t in base_state().items() if n != name}
        with pytest.raises(MissingTensor, match=name):
            PatchedState(MemoryState(state.items()), patch)


def test_patch_that_restructures_needs_a_dict() -> None:
    patch = ww.diff({"a": np.zeros(3)}, {"a": np.zeros(3), "b": np.ones(2)})
    live = {"a": np.zeros(3)}
    for state in (MappingProxyType(live), list(live.items())):
        with pytest.raises(UnsupportedLayout, match="pass a dict"):
            ww.apply(state, patch)


def test_pairs_of_name_and_tensor_are_written_in_place() -> None:
    patch = ww.diff(base_state(), target_state())
    for make in (list, iter, lambda pairs: (pair for pair in pairs)):
        live = base_state()
        ww.apply(make(live.items()), patch)
        assert bits_of(live) == bits_of(target_state())


def test_views_that_overlap_with_other_targets_are_reported() -> None:
    def overlapping() -> tuple[np.ndarray, State]:
        buffer = np.arange(15.0)
        return buffer, {"a": buffer[:10], "b": buffer[5:]}

    target = {"a": np.arange(10.0), "b": np.arange(5.0, 15.0) * 2}
    _, live = overlapping()
    with pytest.raises(TargetMismatch):
        ww.apply(live, ww.diff(overlapping()[1], target))


def test_views_that_overlap_are_written_when_their_targets_agree() -> None:
    def overlapping(scale: float) -> State:
        buffer = np.arange(15.0) * scale
        return {"a": buffer[:10], "b": buffer[5:]}

    live = overlapping(1)
    ww.apply(live, ww.diff(overlapping(1), overlapping(3)))
    assert bits_of(live) == bits_of(overlapping(3))


def fortran(array: np.ndarray) -> np.ndarray:
    return np.asfortranarray(array)


def reversed_rows(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]


def every_other(array: np.ndarray) -> np.ndarray:
    wide = np.zeros((array.shape[0], 2 * array.shape[1]), array.dtype)
    wide[:, ::2] = array
    return wide[:, ::2]


def odd_address(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = raw.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@both_codecs
@pytest.mark.parametrize("layout", [fortran, reversed_rows, every_other, odd_address])
def test_any_strides_are_read_and_written(codec: str, layout: object) -> None:
    live = {**base_state(), "w": layout(base_state()["w"])}  # type: ignore[operator]
    target = {**target_state(), "w": layout(target_state()["w"])}  # type: ignore[operator]
    patch = ww.diff(base_state(), target_state(), codec=codec)
    assert ww.diff(live, target, codec=codec).index == patch.index
    tensor = live["w"]
    ww.apply(live, patch)
    assert live["w"] is tensor
    assert bits_of(live) == bits_of(target_state())


@both_codecs
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (5, 0, 2), (1, 1, 1)])
def test_tensors_of_one_element_or_none_are_patched(codec: str, shape: tuple[int, ...]) -> None:
    base, target = {"x": np.zeros(shape), "y": np.ones(1)}, {"x": np.ones(shape), "y": np.ones(1)}
    live = {name: t.copy() for name, t in base.items()}
    ww.apply(live, ww.diff(base, target, codec=codec))
    assert bits_of(live) == bits_of(target)


@pytest.fixture
def tied() -> State:
    embedding = np.arange(100.0)
    return {"embed": embedding, "head": embedding, "norm": np.ones(4)}


def doubled(state: State) -> State:
    embedding = state["embed"] * 2
    return {"embed": embedding, "head": embedding, "norm": state["norm"].copy()}


def test_tied_tensor_is_coded_once_and_stays_tied(tied: State) -> None:
    target = doubled(tied)
    patch = ww.diff(tied, target)
    assert list(patch.heads) == ["embed"]
    assert patch.index.tied == {"head": "embed"}
    ww.apply(tied, patch)
    assert tied["head"] is tied["embed"]
    assert bits_of(tied) == bits_of(target)


def test_copies_of_a_tied_tensor_are_both_written(tied: State) -> None:
    target, patch = doubled(tied), ww.diff(tied, doubled(tied))
    live = {name: t.copy() for name, t in tied.items()}
    staged = stage(live, patch)
    for _ in range(2):
        activate(live, staged)
        assert bits_of(live) == bits_of(target)
    assert live["head"] is not live["embed"]


def test_receiver_may_list_tied_names_in_another_order(tied: State) -> None:
    target, patch = doubled(tied), ww.diff(tied, doubled(tied))
    live = {name: tied[name] for name in ("norm", "head", "embed")}
    ww.apply(live, patch)
    assert bits_of(live) == bits_of({name: target[name] for name in live})


def test_alias_that_is_new_is_made(tied: State) -> None:
    live = {"embed": tied["embed"].copy(), "norm": tied["norm"].copy()}
    ww.apply(live, ww.diff(dict(live), doubled(tied)))
    assert live["head"] is live["embed"]


def test_copy_that_is_read_only_stops_the_tensor_from_being_written(tied: State) -> None:
    live = {name: t.copy() for name, t in tied.items()}
    live["head"].flags.writeable = False
    with pytest.raises(UnsupportedLayout, match="'head' is read-only"):
        ww.apply(live, ww.diff(tied, doubled(tied)))
    assert bits_of(live) == bits_of(tied)


@pytest.mark.parametrize("order", [("embed", "head", "norm"), ("head", "norm", "embed")])
@pytest.mark.parametrize("head", [np.zeros(100), np.zeros((3, 5), np.int8), np.arange(100.0)])
def test_tensors_that_become_tied_are_tied(
    tied: State, head: np.ndarray, order: tuple[str]
) -> None:
    for target in (doubled(tied), tied):
        base = {"embed": tied["embed"].copy(), "head": head.copy(), "norm": tied["norm"].copy()}
        live = {name: base[name].copy() for name in order}
        staged = stage(live, ww.diff(base, target))
        for _ in range(2):
            activate(live, staged)
            assert bits_of({name: live[name] for name in target}) == bits_of(target)


def test_tensors_that_become_untied_are_apart(tied: State) -> None:
    target = {name: t.copy() for name, t in doubled(tied).items()}
    target["head"][3] = -1
    ww.apply(tied, ww.diff(dict(tied), target))
    assert bits_of(tied) == bits_of(target)
    assert tied["head"] is not tied["embed"]


def test_tie_of_other_bits_cannot_be_made_in_pairs_and_nothing_is_written(tied: State) -> None:
    base = {"embed": tied["embed"].copy(), "head": np.zeros(100), "norm": tied["norm"].copy()}
    live = [(name, t.copy()) for name, t in base.items()]
    with pytest.raises(UnsupportedLayout, match="ties"):
        ww.apply(live, ww.diff(base, doubled(tied)))
    assert bits_of(dict(live)) == bits_of(base)


def test_every_refusal_is_a_weightwire_error() -> None:
    with pytest.raises(WeightwireError):
        ww.apply({}, ww.diff(base_state(), target_state()))
