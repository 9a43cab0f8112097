"""Dying, or failing, in the middle of writing weights: every tensor, every file effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_worlds import (
    World,
    bits_of,
    commits,
    fresh_folders,
    report,
    run_of,
    train,
    zeros,
)

import weightwire as ww
from weightwire.diff.views import TensorView
from weightwire.errors import Dirty
from weightwire.model import Bits, Changes
from weightwire.subscriber import State, require_sound
from weightwire.testing.crash_points import Crash, CrashPoint, Fuse, enumerate_crashes


@pytest.fixture
def burn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fuse], None]:
    """Makes every write to a tensor two effects of a fuse, one per half."""
    fuses = [Fuse()]
    write, overwrite = TensorView.write, TensorView.overwrite

    def write_halves(view: TensorView, start: int, changes: Changes, n_threads: int) -> None:
        half = len(changes) // 2
        for part in (slice(0, half), slice(half, None)):
            piece = Changes(changes.positions[part], changes.bits[part])
            fuses[-1].effect(view.spec.name, lambda p=piece: write(view, start, p, n_threads))

    def overwrite_halves(view: TensorView, start: int, bits: Bits) -> None:
        half = len(bits) // 2
        for at, part in ((start, bits[:half]), (start + half, bits[half:])):
            fuses[-1].effect(view.spec.name, lambda a=at, p=part: overwrite(view, a, p))

    monkeypatch.setattr(TensorView, "write", write_halves)
    monkeypatch.setattr(TensorView, "overwrite", overwrite_halves)
    return fuses.append


def behind(folder: Path, n_versions: int, *, joined: bool) -> World:
    """An engine about to be updated: from an older version, or from nothing."""
    world = run_of(folder, 2)
    engine = zeros(world.state)
    subscriber = world.open_subscriber(engine, scrub_versions=1_000_000)
    if joined:
        subscriber.update()
    for _ in range(n_versions):
        world.publish()
    subscriber.stage()
    world.engine = engine  # type: ignore[attr-defined]
    return world


REPAIRS: dict[str, Callable[[ww.Subscriber], object]] = {
    "activate again": lambda subscriber: subscriber.activate(),
    "update": lambda subscriber: subscriber.update(),
    "stage twice": lambda subscriber: [subscriber.stage(), subscriber.update()],
    "abort and update": lambda subscriber: [
        subscriber.stage(),
        subscriber.abort(),
        subscriber.update(),
    ],
}


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("joined", [True, False], ids=["patches", "anchor"])
def test_an_activation_that_fails_at_any_write_is_dirty_and_repairs_itself(
    tmp_path: Path, burn: Callable[[Fuse], None], joined: bool, repair: str
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def activate(world: World, fuse: Fuse) -> None:
        burn(fuse)
        try:
            world.subscriber.activate()  # type: ignore[union-attr]
        finally:
            burn(Fuse())

    for crash in enumerate_crashes(lambda: behind(fresh(), 3, joined=joined), activate):
        n_points += 1
        _check_repair(crash, REPAIRS[repair])
    report(f"tensor writes of {'patches' if joined else 'an anchor'}, then {repair}", n_points)


def _check_repair(crash: CrashPoint[World], repair: Callable[[ww.Subscriber], object]) -> None:
    world = crash.world
    subscriber, engine = world.subscriber, world.engine  # type: ignore[attr-defined]
    assert subscriber is not None
    assert subscriber.state is State.DIRTY, str(crash)
    with pytest.raises(Dirty):
        require_sound(subscriber)
    repair(subscriber)
    # An anchor leaves alone what the run does not have, so only the run's own tensors are compared.
    found = {name: tensor for name, tensor in engine.items() if name in world.state}
    assert bits_of(found) == bits_of(world.state), str(crash)
    assert subscriber.state is State.IDLE
    assert subscriber.version == max(commits(world))
    require_sound(subscriber)


def test_a_dirty_engine_stays_dirty_until_something_repaired_it(
    tmp_path: Path, burn: Callable[[Fuse], None]
) -> None:
    """Staging the repair, and giving it up, does not make half-written weights whole."""
    world = behind(tmp_path, 3, joined=True)
    subscriber = world.subscriber
    assert subscriber is not None
    burn(Fuse(3))
    with pytest.raises(Crash):
        subscriber.activate()
    burn(Fuse())
    subscriber.stage()
    with pytest.raises(Dirty):
        require_sound(subscriber)
    subscriber.abort()
    assert subscriber.state is State.DIRTY
    with pytest.raises(Dirty):
        require_sound(subscriber)


def test_a_half_written_tensor_is_repaired_although_no_later_patch_speaks_of_it(
    tmp_path: Path, burn: Callable[[Fuse], None]
) -> None:
    """The way past the interrupted version does not touch what it touched: only an anchor helps."""
    world = run_of(tmp_path, 3, skips=(2,))
    engine = zeros(world.state)
    subscriber = world.open_subscriber(engine, scrub_versions=1_000_000)
    subscriber.update()
    old = world.state["layer.1"].copy()
    train({"layer.1": world.state["layer.1"]}, 50)
    world.publish(changed=False)
    subscriber.stage()
    burn(Fuse(1))
    with pytest.raises(Crash):
        subscriber.activate()
    burn(Fuse())
    world.state["layer.1"][...] = old
    train({"layer.0": world.state["layer.0"]}, 51)
    world.publish(changed=False)
    subscriber.update()
    assert subscriber.digest == ww.digest(world.state)
    assert bits_of(engine) == bits_of(world.state)


class FusedTensors(dict[str, Any]):
    """A state whose every change of its set of tensors is an effect."""

    fuse = Fuse()

    def __setitem__(self, name: str, tensor: Any) -> None:
        self.fuse.effect(f"set {name}", lambda: super(FusedTensors, self).__setitem__(name, tensor))

    def update(self, *others: Any, **named: Any) -> None:
        for name, tensor in dict(*others, **named).items():
            self[name] = tensor

    def pop(self, name: str, *default: Any) -> Any:
        return self.fuse.effect(
            f"pop {name}", lambda: super(FusedTensors, self).pop(name, *default)
        )


def restructured(folder: Path) -> World:
    """A version that adds, removes, reshapes and retypes tensors beside changing values."""
    world = run_of(folder, 2)
    engine = FusedTensors(zeros(world.state))
    subscriber = world.open_subscriber(engine)
    subscriber.update()
    world.train()
    del world.state["layer.1"]
    world.state["layer.0"] = world.state["layer.0"].reshape(30, 30)
    world.state["steps"] = np.array(8, np.int32)
    world.state["new"] = np.arange(50, dtype=np.float16)
    world.note()
    world.publish(changed=False)
    subscriber.stage()
    world.engine = engine  # type: ignore[attr-defined]
    return world


@pytest.mark.parametrize("repair", ["activate again", "update"])
def test_a_version_with_other_tensors_fails_at_any_effect_and_repairs_itself(
    tmp_path: Path, burn: Callable[[Fuse], None], repair: str
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def activate(world: World, fuse: Fuse) -> None:
        burn(fuse)
        world.engine.fuse = fuse  # type: ignore[attr-defined]
        try:
            world.subscriber.activate()  # type: ignore[union-attr]
        finally:
            world.engine.fuse = Fuse()  # type: ignore[attr-defined]
            burn(Fuse())

    for crash in enumerate_crashes(lambda: restructured(fresh()), activate):
        n_points += 1
        _check_repair(crash, REPAIRS[repair])
    report(f"writes of other tensors, then {repair}", n_points)


@pytest.mark.parametrize("repair", REPAIRS)
def test_an_exchange_of_tensors_fails_at_any_effect_and_repairs_itself(
    tmp_path: Path, repair: str
) -> None:
    """With tensors kept twice, dying half way leaves some of the new and some of the old in use."""
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        world = run_of(fresh(), 2)
        engine = FusedTensors(zeros(world.state))
        subscriber = world.open_subscriber(engine, double_buffer=True, scrub_versions=1_000_000)
        for _ in range(2):
            subscriber.update()
            world.publish()
        subscriber.stage()
        world.engine = engine  # type: ignore[attr-defined]
        return world

    def activate(world: World, fuse: Fuse) -> None:
        world.engine.fuse = fuse  # type: ignore[attr-defined]
        try:
            world.subscriber.activate()  # type: ignore[union-attr]
        finally:
            world.engine.fuse = Fuse()  # type: ignore[attr-defined]

    for crash in enumerate_crashes(begin, activate):
        n_points += 1
        _check_repair(crash, REPAIRS[repair])
        for _ in range(3):
            crash.world.publish()
            crash.world.subscriber.update()  # type: ignore[union-attr]
            found = crash.world.engine  # type: ignore[attr-defined]
            assert bits_of(found) == bits_of(crash.world.state), str(crash)
    report(f"exchange of tensors, then {repair}", n_points)
