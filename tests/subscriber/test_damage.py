from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sample_following import Training, flip

import weightwire as ww
from sample_training import Weights, bits_of, inline, train, zeros_like
from weightwire.apply.targets import MemoryTarget, Ready
from weightwire.checkpoint import Checkpoint
from weightwire.errors import (
    Dirty,
    FencedWriter,
    NoWay,
    RolledBack,
)
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.store.receipts import read_receipts
from weightwire.subscriber import State, require_sound


def test_damaged_patch_is_gone_around_by_another_way() -> None:
    training = Training(skips=(4,), anchors=ww.AnchorPolicy(every=100))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish(4)
    flip(training.store, "patches/000000000004-000000000000")  # type: ignore[arg-type]
    done = sub.update()
    assert done is not None
    assert (done.n_detours, done.n_steps, done.was_whole) == (1, 4, False)
    assert bits_of(live) == bits_of(training.state)


def test_damaged_chain_is_gone_around_by_an_anchor() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=3))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish(4)
    flip(training.store, "patches/000000000002-")  # type: ignore[arg-type]
    done = sub.update()
    assert done is not None
    assert done.was_whole
    assert bits_of(live) == bits_of(training.state)


def test_when_no_way_leads_on_the_receiver_keeps_what_it_has_and_says_so() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    before = bits_of(live)
    training.publish()
    flip(training.store, "patches/")  # type: ignore[arg-type]
    flip(training.store, "model.safetensors")  # type: ignore[arg-type]
    with pytest.raises(NoWay):
        sub.update()
    assert (sub.state, sub.version, bits_of(live)) == (State.IDLE, 0, before)


def test_live_weights_changed_by_someone_else_are_found_and_healed(training: Training) -> None:
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    live["mlp"][5] = 42.0
    training.publish()
    done = sub.update()
    assert done is not None
    assert done.was_whole
    assert sub.n_heals == 1
    assert bits_of(live) == bits_of(training.state)


def test_damaged_target_is_dirty_until_there_is_a_way_to_heal_it() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    live["mlp"][5] = 42.0
    training.publish()
    flip(training.store, "model.safetensors")  # type: ignore[arg-type]
    sub._cache.keep_only([])
    with pytest.raises(NoWay):
        sub.update()
    assert sub.state is State.DIRTY
    flip(training.store, "model.safetensors")  # type: ignore[arg-type]
    sub.update()
    assert (sub.state, sub.n_heals) == (State.IDLE, 1)
    assert bits_of(live) == bits_of(training.state)


def test_silent_damage_in_a_tensor_nobody_updates_is_found_within_the_stated_versions() -> None:
    training = Training()
    live = zeros_like(training.state)
    sub = training.subscriber(live, scrub_versions=4)
    sub.update()
    live["norm"][3] = 7.0
    for _ in range(4):
        training.publish()
        sub.update()
    assert sub.n_heals == 1
    assert bits_of(live) == bits_of(training.state)


class Interrupted(MemoryTarget):
    """Dies half way through an activation, once."""

    def __init__(self, state: Weights) -> None:
        super().__init__(state)
        self.is_armed = False
        self._weights = state

    def activate(self, ready: Ready) -> None:
        if self.is_armed:
            self.is_armed = False
            self._weights["mlp"][:] = 0
            raise RuntimeError("interrupted")
        super().activate(ready)


def test_interrupted_activation_is_dirty_and_activating_again_does_not_help_itself_to_less(
    training: Training,
) -> None:
    live = zeros_like(training.state)
    target = Interrupted(live)
    sub = training.subscriber(target)
    sub.update()
    training.publish()
    sub.stage()
    target.is_armed = True
    with pytest.raises(RuntimeError):
        sub.activate()
    assert sub.state is State.DIRTY
    with pytest.raises(Dirty):
        require_sound(sub)
    sub.update()
    require_sound(sub)
    assert bits_of(live) == bits_of(training.state)


class Forgetful(MemoryTarget):
    """Says it wrote, and did not; as often as told."""

    def __init__(self, state: Weights) -> None:
        super().__init__(state)
        self.n_lies = 0

    def activate(self, ready: Ready) -> None:
        if self.n_lies:
            self.n_lies -= 1
            return
        super().activate(ready)


def test_version_is_not_held_until_live_memory_proves_it(training: Training) -> None:
    live = zeros_like(training.state)
    target = Forgetful(live)
    sub = training.subscriber(target, worker="engine")
    sub.update()
    training.publish()
    target.n_lies = 1
    sub.stage()
    sub.activate()
    assert sub.state is State.DIRTY
    [receipt] = read_receipts(training.store)  # type: ignore[arg-type]
    assert receipt.version == 0
    done = sub.update()
    assert done is not None
    assert done.was_whole
    [receipt] = read_receipts(training.store)  # type: ignore[arg-type]
    assert receipt.version == 1
    assert bits_of(live) == bits_of(training.state)


def test_damaged_cache_is_noticed_and_fetched_again(training: Training, tmp_path: Path) -> None:
    with training.subscriber(zeros_like(training.state), cache=tmp_path) as sub:
        sub.update()
        training.publish(2)
        sub.update()
    for file in tmp_path.rglob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1
        file.write_bytes(raw)
    live = zeros_like(training.state)
    with training.subscriber(live, cache=tmp_path) as sub:
        sub.update()
    assert bits_of(live) == bits_of(training.state)


def test_folder_too_damaged_to_open_is_written_anew(training: Training, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with training.subscriber(out) as sub:
        sub.update()
    (out / "model.safetensors").write_bytes(b"\xff" * 64)
    with training.subscriber(out) as sub:
        done = sub.update()
        assert done is not None
        assert done.was_whole
    with Checkpoint.open(out) as checkpoint:
        assert ww.digest(checkpoint) == ww.digest(training.state)


def test_store_that_went_back_in_time_is_noticed_across_restarts(
    training: Training, tmp_path: Path
) -> None:
    copy = MemoryStore()
    for info in training.store.list(""):  # type: ignore[attr-defined]
        copy.put(info.key, training.store.read(info.key))  # type: ignore[attr-defined]
    training.publish(2)
    with training.subscriber(zeros_like(training.state), cache=tmp_path) as sub:
        sub.update()
    live = zeros_like(training.state)
    with training.subscriber(live, copy, cache=tmp_path) as sub, pytest.raises(RolledBack):
        sub.update()
    assert bits_of(live) == bits_of(zeros_like(training.state))


def test_rotten_commit_record_is_gone_around_and_a_new_publisher_starts_afresh() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live, other = zeros_like(training.state), zeros_like(training.state)
    sub = training.subscriber(live)
    training.publish(2)
    sub.update()
    training.publish()
    flip(training.store, "000000000003-commit")  # type: ignore[arg-type]
    assert sub.update() is None
    again = Publisher(training.store, training.state, background=inline)  # type: ignore[arg-type]
    train(training.state, 50)
    done = again.publish().result()
    assert (done.version, done.n_changed) == (4, done.n_elements)
    for subscriber, weights_held in ((sub, live), (training.subscriber(other), other)):
        subscriber.update()
        assert bits_of(weights_held) == bits_of(training.state)
    train(training.state, 51)
    with pytest.raises(FencedWriter):
        training.pub.publish().result()


def test_rotten_record_in_the_middle_is_gone_around_by_an_anchor() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=3))
    training.publish(5)
    flip(training.store, "000000000002-commit")  # type: ignore[arg-type]
    live = zeros_like(training.state)
    training.subscriber(live).update()
    assert bits_of(live) == bits_of(training.state)
    again = Publisher(training.store, training.state, background=inline)  # type: ignore[arg-type]
    assert again.version == 6


def test_tensor_the_run_dropped_goes_whichever_way_the_version_came() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live = {**zeros_like(training.state), "mine": np.ones(2)}
    sub = training.subscriber(live)
    sub.update()
    del training.state["norm"]
    training.publish()
    again = Publisher(training.store, training.state, background=inline)  # type: ignore[arg-type]
    again._head = replace(again._head, needs_anchor=True)
    again.publish().result()
    live["mlp"][0] = 9  # damage: only the anchor is left
    done = sub.update()
    assert done is not None
    assert done.was_whole
    assert bits_of({n: t for n, t in live.items() if n != "mine"}) == bits_of(training.state)
    assert "mine" in live
