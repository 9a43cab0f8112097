"""A publisher that dies at any of its store operations loses nothing and needs no hands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_worlds import (
    World,
    bits_of,
    check_late_joiner,
    check_recovery,
    commits,
    fresh_folders,
    report,
    run_of,
    zeros,
)

import weightwire as ww
from weightwire.codec.writer import PatchWriter
from weightwire.store.retention import Retention, collect
from weightwire.store.run import Run, require_identity
from weightwire.testing.crash_points import Fuse, enumerate_crashes

EXTRAS = {"anchors": ww.AnchorPolicy(every=2), "skips": (2,)}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets per patch even for a small state."""
    monkeypatch.setattr(
        PatchWriter.__init__, "__defaults__", (200, *PatchWriter.__init__.__defaults__[1:])
    )


def options_of(kind: str, folder: Path) -> dict[str, Any]:
    return {"baseline": folder / "baseline"} if kind == "file" else {}


def follower_at(world: World) -> dict[str, Any]:
    """An engine that holds the newest version and goes on living."""
    engine = zeros(world.state)
    world.open_subscriber(engine).update()
    assert bits_of(engine) == bits_of(world.state)
    return engine


def publish_at(world: World, fuse: Fuse) -> None:
    world.door.fuse = fuse
    world.again.publish().result()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_first_version_survives_a_crash_at_every_operation(tmp_path: Path, kind: str) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def publish(world: World, fuse: Fuse) -> None:
        world.door.fuse = fuse
        world.open_publisher(**options_of(kind, world.folder)).publish().result()

    for crash in enumerate_crashes(lambda: World(fresh()), publish):
        n_points += 1
        before = commits(crash.world)
        published = check_recovery(crash, before, **options_of(kind, crash.world.folder))
        assert published.epoch == (2 if before else 1)
    report(f"first version, baseline in {kind}", n_points)


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("is_changed", [True, False], ids=["patch", "empty"])
def test_a_version_survives_a_crash_at_every_operation(
    tmp_path: Path, kind: str, is_changed: bool
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        folder = fresh()
        world = run_of(folder, 3, **options_of(kind, folder))
        if is_changed:
            world.train()
        return world

    before = commits(begin())
    for crash in enumerate_crashes(begin, publish_at):
        n_points += 1
        check_recovery(crash, before, **options_of(kind, crash.world.folder))
    report(f"{'patch' if is_changed else 'empty'} version, baseline in {kind}", n_points)


def test_a_version_with_a_skip_patch_and_an_anchor_due_survives_a_crash_at_every_operation(
    tmp_path: Path,
) -> None:
    fresh, n_points, kinds = fresh_folders(tmp_path), 0, set()

    def begin() -> World:
        world = run_of(fresh(), 4, **EXTRAS)
        world.train()
        return world

    before = commits(begin())
    for crash in enumerate_crashes(begin, publish_at):
        n_points += 1
        kinds.add(crash.effect.split("/")[0])
        check_recovery(crash, before, **EXTRAS)
    assert {"put patches", "put anchors", "put log", "create log"} <= kinds
    report("version with skip patch and anchor", n_points)


def test_an_engine_that_lives_on_gets_what_the_next_publisher_makes(tmp_path: Path) -> None:
    fresh = fresh_folders(tmp_path)
    engines: dict[int, dict[str, Any]] = {}

    def begin() -> World:
        world = run_of(fresh(), 3)
        engines[id(world)] = follower_at(world)
        world.train()
        return world

    n_points = 0
    for crash in enumerate_crashes(begin, publish_at):
        n_points += 1
        world = crash.world
        engine, living = engines[id(world)], world.subscriber
        assert living is not None
        check_recovery(crash, {})
        world.door.fuse = Fuse()
        living._run.store._store.fuse = Fuse()  # the engine's process did not die
        living.update()
        assert bits_of(engine) == bits_of(world.state), str(crash)
    report("patch version, seen by a living engine", n_points)


TAKE_OVERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "baseline in memory": lambda _: {},
    "baseline in a file": lambda folder: {"baseline": folder / "baseline"},
}


@pytest.mark.parametrize("kind", TAKE_OVERS)
@pytest.mark.parametrize("is_stale", [False, True], ids=["current", "stale"])
def test_a_take_over_survives_a_crash_at_every_operation(
    tmp_path: Path, kind: str, is_stale: bool
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0
    options = TAKE_OVERS[kind]

    def begin() -> World:
        folder = fresh()
        world = run_of(folder, 4, **options(folder))
        if is_stale:
            world.open_publisher()
            world.publish()
        return world

    def take_over(world: World, fuse: Fuse) -> None:
        world.door.fuse = fuse
        world.open_publisher(**options(world.folder))

    before = commits(begin())
    for crash in enumerate_crashes(begin, take_over):
        n_points += 1
        check_recovery(crash, before, **options(crash.world.folder))
    report(f"take-over, {kind}{', stale' if is_stale else ''}", n_points)


@pytest.mark.parametrize("is_collected", [False, True], ids=["slot taken", "slot collected"])
def test_the_dead_publisher_that_was_only_asleep_is_fenced(
    tmp_path: Path, is_collected: bool
) -> None:
    """It froze at any operation of a publish, another took over, and it wakes and goes on."""
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        world = run_of(fresh(), 3)
        world.train()
        return world

    for crash in enumerate_crashes(begin, publish_at):
        n_points += 1
        world, sleeper = crash.world, crash.world.publisher
        assert sleeper is not None
        world.restart()
        world.open_publisher(anchors=ww.AnchorPolicy(every=1))
        world.publish()
        world.publish()
        if is_collected:
            _collect(world)
        newest = commits(world)
        assert (3 in newest) != is_collected, "its slot must be free again, or this tests nothing"
        sleeper._run.store._store.fuse = Fuse()  # it wakes
        sleeper._last = None
        with pytest.raises(ww.errors.FencedWriter):
            sleeper.publish().result()
        assert commits(world) == newest, str(crash)
        check_late_joiner(world)
    report(f"publish, asleep instead of dead, {'collected' if is_collected else 'taken'}", n_points)


def _collect(world: World) -> None:
    world.clock.time += 10_000
    policy = Retention(keep_versions=1, keep_anchors=1)
    collect(Run(world.store, require_identity(world.store)), policy, world.clock)
