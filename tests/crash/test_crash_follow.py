"""A subscriber that dies at any of its store operations goes on from its disk, exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_worlds import (
    World,
    bits_of,
    check_late_joiner,
    commits,
    fresh_folders,
    report,
    run_of,
    zeros,
)

import weightwire as ww
from weightwire.checkpoint import Checkpoint
from weightwire.codec.writer import PatchWriter
from weightwire.digest import digest_state
from weightwire.store.counting import CountingStore
from weightwire.store.retention import Retention, collect
from weightwire.store.run import Run, require_identity
from weightwire.subscriber import State
from weightwire.testing.crash_points import CrashingStore, CrashPoint, Fuse, enumerate_crashes

Act = Callable[[World], object]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets per patch even for a small state."""
    monkeypatch.setattr(
        PatchWriter.__init__, "__defaults__", (200, *PatchWriter.__init__.__defaults__[1:])
    )


def target_of(kind: str, world: World) -> Any:
    """Memory dies with its process, a folder does not."""
    return world.folder / "target" if kind == "folder" else zeros(world.state)


def follower(world: World, kind: str) -> ww.Subscriber:
    return world.open_subscriber(target_of(kind, world), cache=world.folder / "cache")


def behind_by(n_versions: int, kind: str, folder: Path) -> World:
    """A subscriber that is up to date, and then is not."""
    world = run_of(folder, 2)
    follower(world, kind).update()
    for _ in range(n_versions):
        world.publish()
    return world


def subscriber_of(world: World) -> ww.Subscriber:
    assert world.subscriber is not None
    return world.subscriber


def check_restart(crash: CrashPoint[World], kind: str, n_fresh_bytes: int) -> None:
    """A new process over the same cache and folder ends exact, and downloads no more than a newcomer."""
    world = crash.world
    world.restart()
    target = target_of(kind, world)
    subscriber = world.open_subscriber(target, cache=world.folder / "cache")
    updated = subscriber.update()
    assert subscriber.version == max(commits(world)), str(crash)
    assert subscriber.state is State.IDLE
    assert updated is None or updated.n_bytes <= n_fresh_bytes, str(crash)
    check_target(world, target)
    subscriber.close()


def check_target(world: World, target: Any) -> None:
    if not isinstance(target, Path):
        assert bits_of(target) == bits_of(world.state)
        return
    with Checkpoint.open(target) as checkpoint:
        assert digest_state(checkpoint)[0] == ww.digest(world.state)


def bytes_of_a_newcomer(world: World) -> int:
    subscriber = world.open_subscriber(zeros(world.state), cache=world.folder / "newcomer")
    updated = subscriber.update()
    assert updated is not None
    subscriber.close()
    return updated.n_bytes


ACTIONS: dict[str, tuple[int, Act, Act]] = {
    # versions it is behind, what happened before, what it dies in
    "stage": (3, lambda _: None, lambda world: subscriber_of(world).stage()),
    "activate": (
        3,
        lambda world: subscriber_of(world).stage(),
        lambda world: subscriber_of(world).activate(),
    ),
    "update along a chain": (5, lambda _: None, lambda world: subscriber_of(world).update()),
}


@pytest.mark.parametrize("kind", ["memory", "folder"])
@pytest.mark.parametrize("name", ACTIONS)
def test_a_subscriber_survives_a_crash_at_every_operation(
    tmp_path: Path, name: str, kind: str
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0
    n_behind, prepare, act = ACTIONS[name]

    def begin() -> World:
        world = behind_by(n_behind, kind, fresh())
        prepare(world)
        return world

    def die(world: World, fuse: Fuse) -> None:
        world.door.fuse = fuse
        act(world)

    n_fresh_bytes = bytes_of_a_newcomer(begin())
    for crash in enumerate_crashes(begin, die):
        n_points += 1
        check_restart(crash, kind, n_fresh_bytes)
    report(f"{name}, target in {kind}", n_points)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_newcomer_survives_a_crash_at_every_operation(tmp_path: Path, kind: str) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def join(world: World, fuse: Fuse) -> None:
        world.door.fuse = fuse
        follower(world, kind).update()

    n_fresh_bytes = bytes_of_a_newcomer(run_of(fresh(), 4))
    for crash in enumerate_crashes(lambda: run_of(fresh(), 4), join):
        n_points += 1
        check_restart(crash, kind, n_fresh_bytes)
    report(f"update from an anchor, target in {kind}", n_points)


def test_what_was_fetched_before_a_crash_is_not_fetched_again(tmp_path: Path) -> None:
    """Dying in the very last operation leaves everything on disk: nothing is downloaded twice."""

    def join(world: World, fuse: Fuse) -> None:
        world.door.fuse = fuse
        follower(world, "memory").update()

    fresh = fresh_folders(tmp_path)
    last = list(enumerate_crashes(lambda: run_of(fresh(), 4), join))[-1]
    last.world.restart()
    subscriber = follower(last.world, "memory")
    updated = subscriber.update()
    assert updated is not None
    assert updated.n_bytes < bytes_of_a_newcomer(last.world) // 10
    subscriber.close()


def collectable(folder: Path) -> World:
    """Many versions, a few anchors, someone who is still at an old version, and orphans."""
    world = run_of(folder, 4, anchors=ww.AnchorPolicy(every=2), skips=(2,))
    world.engine = zeros(world.state)  # type: ignore[attr-defined]
    world.open_subscriber(world.engine).update()  # type: ignore[attr-defined]
    for _ in range(2):
        world.publish()
    world.store.put("patches/000000000004-000000000003-" + "f" * 32 + "/patch.json", b"an orphan")
    world.clock.time += 7200
    return world


def sweep(world: World, fuse: Fuse) -> None:
    store = CrashingStore(world.store, fuse)
    policy = Retention(keep_versions=2, keep_anchors=1, receipt_grace_s=1e6)
    collect(Run(store, require_identity(store)), policy, world.clock)


def keys_of(world: World) -> set[str]:
    return {info.key for info in world.store.list("")}


def test_a_collection_survives_a_crash_at_every_operation(tmp_path: Path) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0
    whole = collectable(fresh())
    n_before = len(keys_of(whole))
    sweep(whole, Fuse())
    assert len(keys_of(whole)) < n_before, "nothing was collected: the test tests nothing"
    for crash in enumerate_crashes(lambda: collectable(fresh()), sweep):
        n_points += 1
        _check_after_collection(crash, keys_of(whole))
    report("collect", n_points)


def _check_after_collection(crash: CrashPoint[World], wanted: set[str]) -> None:
    world = crash.world
    living = subscriber_of(world)
    world.restart()
    check_late_joiner(world)
    sweep(world, Fuse())
    assert keys_of(world) - {"receipts/w.json"} == wanted - {"receipts/w.json"}, str(crash)
    living.update()
    assert bits_of(world.engine) == bits_of(world.state), str(crash)  # type: ignore[attr-defined]
    world.open_publisher()
    world.publish()
    check_late_joiner(world)


def test_counting_and_dying_see_the_same_operations(tmp_path: Path) -> None:
    """A guard on the tool itself: what the fuse counts is what the store is asked."""
    world, fuse = run_of(tmp_path, 3), Fuse()
    counted = CountingStore(world.store)
    subscriber = ww.Subscriber(CrashingStore(counted, fuse), zeros(world.state), worker="w")
    subscriber.update()
    subscriber.close()
    counts = counted.snapshot()
    n_asked = counts.n_put + counts.n_create + counts.n_read + counts.n_list + counts.n_delete
    assert len(fuse.effects) == n_asked > 0
