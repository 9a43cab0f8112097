"""A full or failing disk under each place that writes: a typed error, nothing half-done, then recovery."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_states import first_state, sha256_of, sha256_of_folder, train
from small_disk import SmallDisk

import weightwire as ww
from weightwire.checkpoint import journal
from weightwire.checkpoint.disk import LocalDisk
from weightwire.clock import SystemClock
from weightwire.errors import DiskTrouble, StoreRefused, StoreUnavailable
from weightwire.store import layout
from weightwire.store.folder import FolderStore
from weightwire.store.folder_disk import LocalFolderDisk
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy

ONCE = RetryPolicy(n_attempts=1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path / "disk") as made:
        yield made


class Run:
    """A trainer and its publisher."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.state, self._rng = first_state(), np.random.default_rng(2)
        self.publisher = ww.Publisher(store, self.state, retry=ONCE, **options)

    def publish(self) -> ww.Published:
        train(self.state, self._rng)
        return self.publisher.publish().result()


def zeros() -> dict[str, Any]:
    return {name: np.zeros_like(tensor) for name, tensor in first_state().items()}


def check_followed(store: Any, run: Run) -> None:
    """A newcomer gets exactly what the trainer has."""
    live = zeros()
    with ww.Subscriber(store, live, receipts=False) as subscriber:
        subscriber.update()
        assert subscriber.version == run.publisher.version
    assert sha256_of(live) == sha256_of(run.state)


def log_of(store: Any) -> list[str]:
    return [info.key for info in store.list(layout.LOG)]


@pytest.mark.parametrize("n_before", [0, 2], ids=["first version", "later version"])
def test_a_full_folder_store_refuses_and_goes_on_when_there_is_room(
    disk: SmallDisk, n_before: int
) -> None:
    store = FolderStore(disk.path / "store")
    run = Run(store)
    for _ in range(n_before):
        run.publish()
    before = log_of(store)
    disk.fill()
    for _ in range(2):
        with pytest.raises(StoreRefused, match=r"free some space|of this size"):
            run.publish()
    assert log_of(store) == before
    assert run.publisher.version == n_before - 1
    disk.free()
    assert run.publish().version == n_before
    check_followed(store, run)
    run.publisher.close()


def test_a_baseline_that_finds_no_room_publishes_nothing_until_it_does(disk: SmallDisk) -> None:
    store = MemoryStore()
    run = Run(store, baseline=disk.path / "baseline")
    disk.fill()
    with pytest.raises(DiskTrouble, match="baseline"):
        run.publish()
    assert log_of(store) == []
    disk.free()
    run.publish()
    run.publish()
    check_followed(store, run)
    run.publisher.close()


def test_a_new_tensor_for_which_the_baseline_has_no_room_is_not_lost(disk: SmallDisk) -> None:
    """The version is committed before the baseline grows: the next publish must settle it."""
    store = MemoryStore()
    run = Run(store, baseline=disk.path / "baseline")
    run.publish()
    run.state["new"] = np.arange(1000, dtype=np.float32)
    disk.fill()
    with pytest.raises(DiskTrouble, match="baseline"):
        run.publish()
    disk.free()
    run.publish()
    live: dict[str, Any] = {}
    with ww.Subscriber(store, live) as subscriber:
        subscriber.update()
    assert sha256_of(live) == sha256_of(run.state)
    run.publisher.close()


def test_a_cache_without_room_for_an_anchor_says_so_and_recovers(disk: SmallDisk) -> None:
    store = MemoryStore()
    run, live = Run(store), zeros()
    run.publish()
    with ww.Subscriber(store, live, cache=disk.path / "cache") as subscriber:
        disk.fill()
        with pytest.raises(DiskTrouble):
            subscriber.update()
        assert subscriber.version == -1
        assert sha256_of(live) == sha256_of(zeros()), "weights were touched"
        disk.free()
        subscriber.update()
        assert sha256_of(live) == sha256_of(run.state)
    run.publisher.close()


def test_a_cache_without_room_for_patches_does_not_stop_a_subscriber(disk: SmallDisk) -> None:
    store = MemoryStore()
    run, live = Run(store), zeros()
    run.publish()
    with ww.Subscriber(store, live, cache=disk.path / "cache") as subscriber:
        subscriber.update()
        disk.fill()
        for _ in range(3):
            run.publish()
            subscriber.update()
            assert sha256_of(live) == sha256_of(run.state)
    disk.free()
    with ww.Subscriber(store, again := zeros(), cache=disk.path / "cache") as subscriber:
        subscriber.update()
        assert sha256_of(again) == sha256_of(run.state)
    run.publisher.close()


@pytest.mark.parametrize("n_before", [0, 1], ids=["first version", "later version"])
def test_a_full_folder_target_keeps_its_version_and_gets_the_next_when_there_is_room(
    disk: SmallDisk, tmp_path: Path, n_before: int
) -> None:
    store, target = MemoryStore(), disk.path / "target"
    run = Run(store)
    run.publish()
    with ww.Subscriber(store, target, cache=tmp_path / "cache") as subscriber:
        if n_before:
            subscriber.update()
        old = sha256_of(run.state)
        run.publish()
        disk.fill()
        with pytest.raises(DiskTrouble, match="target"):
            subscriber.update()
        assert subscriber.is_dirty or not n_before
        if n_before:
            assert sha256_of_folder(target) == old
        disk.free()
        subscriber.update()
        assert sha256_of_folder(target) == sha256_of(run.state)
        assert subscriber.version == run.publisher.version
    run.publisher.close()


def test_following_survives_a_full_folder_target(disk: SmallDisk, tmp_path: Path) -> None:
    """The loop that must go on goes on: it is a matter of waiting for room."""
    store, target = MemoryStore(), disk.path / "target"
    run = Run(store)
    run.publish()
    freed: list[str] = []

    def free(error: str) -> None:
        freed.append(error)
        disk.free()

    with ww.Subscriber(store, target, cache=tmp_path / "cache", clock=_Hurried(free)) as subscriber:
        disk.fill()
        updated = next(iter(subscriber.follow()))
        assert updated.version == run.publisher.version
    assert freed, "the disk was never full"
    assert sha256_of_folder(target) == sha256_of(run.state)
    run.publisher.close()


class _Hurried(SystemClock):
    """Does not sleep; makes room instead."""

    def __init__(self, make_room: Any) -> None:
        self._make_room = make_room

    def sleep(self, seconds: float, wake: Any = None) -> None:
        del seconds, wake
        self._make_room("slept")


class _FailingFolderDisk(LocalFolderDisk):
    def fsync(self, file_descriptor: int) -> None:
        del file_descriptor
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_store_whose_fsync_fails_commits_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    run = Run(store)
    run.publish()
    before = log_of(store)
    store._disk = _FailingFolderDisk()
    with pytest.raises(StoreUnavailable):
        run.publish()
    assert log_of(store) == before
    store._disk = LocalFolderDisk()
    run.publish()
    check_followed(store, run)
    run.publisher.close()


class _FailingDisk(LocalDisk):
    def fsync(self, file_descriptor: int) -> None:
        del file_descriptor
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_folder_target_whose_fsync_fails_is_dirty_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, target = MemoryStore(), tmp_path / "target"
    run = Run(store)
    run.publish()
    with ww.Subscriber(store, target) as subscriber:
        subscriber.update()
        run.publish()
        subscriber.stage()
        with monkeypatch.context() as patch:
            patch.setattr(journal, "LocalDisk", _FailingDisk)
            with pytest.raises(DiskTrouble):
                subscriber.activate()
        assert subscriber.is_dirty
        subscriber.update()
        assert sha256_of_folder(target) == sha256_of(run.state)
    run.publisher.close()
