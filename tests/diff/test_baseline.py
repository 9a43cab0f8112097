from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightwire as ww
from sample_training import Weights, bits_of, train, weights
from weightwire.checkpoint import Checkpoint
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.memory import open_state
from weightwire.diff.redo import RedoLog
from weightwire.diff.spill import Spill
from weightwire.diff.state import StateReader
from weightwire.errors import StateMoved
from weightwire.model import Changes
from weightwire.store.upload import NoUpload

MODULE = import_module("weightwire.diff.frozen")


def read_all(state: StateReader) -> dict[str, bytes]:
    return {n: state.read(n, 0, spec.n_elements).tobytes() for n, spec in state.specs.items()}


def follow(baseline: Baseline, state: Weights, codec: str = "compact") -> None:
    """What a publisher does between reading a state and having committed it."""
    redo, live = RedoLog(), open_state(state)
    diff_states(baseline, live, NoUpload(), codec, log=redo)
    baseline.advance(redo, live.specs, live.ties)


@pytest.fixture(params=["memory", "file"])
def baseline(request: pytest.FixtureRequest, tmp_path: Path) -> Baseline:
    return Baseline(tmp_path / "baseline" if request.param == "file" else None)


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_baseline_becomes_the_state_it_follows(baseline: Baseline, codec: str) -> None:
    state = weights()
    baseline.fill(open_state(state))
    for seed in range(3):
        train(state, seed, share=0.3)
        follow(baseline, state, codec)
        assert read_all(baseline) == bits_of(state)
        assert ww.digest(baseline) == ww.digest(state)


def test_baseline_follows_tensors_that_come_go_and_change_shape(baseline: Baseline) -> None:
    state = weights()
    baseline.fill(open_state(state))
    frozen = baseline.freeze()
    before = bits_of(state)
    del state["norm"]
    state["embed"] = state["embed"].reshape(-1).copy()
    state["mlp"] = state["mlp"].astype(np.float64)
    state["new"] = np.arange(7)
    follow(baseline, state)
    train(state, 1)
    state["new"] += 1
    follow(baseline, state)
    assert read_all(baseline) == bits_of(state)
    assert read_all(frozen) == before


def test_advancing_twice_is_advancing_once(baseline: Baseline) -> None:
    state = weights()
    baseline.fill(open_state(state))
    train(state, 1)
    redo, live = RedoLog(), open_state(state)
    diff_states(baseline, live, NoUpload(), log=redo)
    baseline.advance(redo, live.specs, live.ties)
    baseline.advance(redo, live.specs, live.ties)
    assert read_all(baseline) == bits_of(state)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["step", "freeze", "close"]), max_size=40), st.integers(0, 99))
def test_frozen_views_keep_what_they_saw(events: list[str], seed: int) -> None:
    state, baseline = weights(n_elements=200), Baseline()
    baseline.fill(open_state(state))
    views = []
    for number, event in enumerate(events):
        if event == "step":
            train(state, seed + number, share=0.2)
            follow(baseline, state)
        elif event == "freeze":
            views.append((baseline.freeze(), bits_of(state)))
        elif views:
            views.pop(0)[0].close()
        for frozen, before in views:
            assert read_all(frozen) == before
    for frozen, _ in views:
        frozen.close()
    assert baseline.n_undo_bytes == 0


def test_frozen_view_beyond_its_memory_goes_on_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_UNDO_BYTES", 5000)
    state, baseline = weights(n_elements=60_000), Baseline()
    baseline.fill(open_state(state))
    frozen, before = baseline.freeze(), bits_of(state)
    for seed in range(20):
        train(state, seed)
        follow(baseline, state)
        assert baseline.n_undo_bytes <= 5000
    assert read_all(frozen) == before


def test_frozen_view_is_given_up_when_too_much_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_UNDO_BYTES", 500)
    state, baseline = weights(), Baseline()
    baseline.fill(open_state(state))
    frozen = baseline.freeze()
    for seed in range(20):
        train(state, seed, share=1.0)
        follow(baseline, state)
    with pytest.raises(StateMoved, match="too much"):
        frozen.read("mlp", 0, 1)
    assert read_all(baseline) == bits_of(state)


def test_full_disk_costs_a_frozen_view_and_not_the_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MODULE, "_UNDO_BYTES", 500)
    state, baseline = weights(), Baseline()
    baseline.fill(open_state(state))
    frozen = baseline.freeze()
    train(state, 1, share=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        follow(baseline, state)
    assert read_all(baseline) == bits_of(state)
    with pytest.raises(StateMoved):
        frozen.read("mlp", 0, 1)


def test_frozen_view_survives_a_baseline_that_starts_anew(baseline: Baseline) -> None:
    state = weights()
    baseline.fill(open_state(state))
    before = bits_of(state)
    frozen = baseline.freeze()
    other = weights(seed=5)
    baseline.fill(open_state(other))
    train(other, 1, share=0.5)
    follow(baseline, other)
    assert read_all(frozen) == before


def test_baseline_file_is_a_checkpoint_and_is_found_again(tmp_path: Path) -> None:
    state = weights()
    first = Baseline(tmp_path)
    first.fill(open_state(state))
    train(state, 1)
    follow(first, state)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert ww.digest(checkpoint) == ww.digest(state)
    assert read_all(Baseline(tmp_path)) == bits_of(state)


def test_damaged_baseline_file_is_no_baseline(tmp_path: Path) -> None:
    Baseline(tmp_path).fill(open_state(weights()))
    (tmp_path / "model.safetensors").write_bytes(b"half a head")
    assert not Baseline(tmp_path).specs


def test_changes_beyond_the_cap_go_to_a_file_and_come_back_the_same() -> None:
    spill = Spill(max_bytes=100)
    kept = []
    for size in (5, 50, 0, 500, 7):
        positions = np.arange(size, dtype=np.uint32)
        changes = Changes(positions, (positions * 3).astype(np.uint16))
        kept.append((changes, spill.keep(changes)))
    assert spill.n_bytes <= 100
    for before, after in kept:
        assert after.positions.tobytes() == before.positions.tobytes()
        assert after.bits.tobytes() == before.bits.tobytes()
