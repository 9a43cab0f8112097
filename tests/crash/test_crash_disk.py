"""Dying at any effect on a disk: of a folder target, of a folder store, of a baseline's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from crash_worlds import (
    Tensors,
    World,
    check_late_joiner,
    commits,
    fresh_folders,
    inline,
    report,
    run_of,
)

import weightwire as ww
from weightwire.checkpoint import Checkpoint, journal
from weightwire.checkpoint.disk import LocalDisk
from weightwire.diff.baseline import Baseline
from weightwire.digest import digest_state
from weightwire.model import Changes
from weightwire.store.folder import FolderStore
from weightwire.store.folder_disk import LocalFolderDisk
from weightwire.testing.crash_points import CrashPoint, Fuse, enumerate_crashes


class FusedDisk(LocalFolderDisk):
    """Every effect on the file system is one of a fuse; a write dies half way."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def create(self, path: Path) -> int:
        return self.fuse.effect("create", lambda: LocalDisk.create(self, path))

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        half = data.nbytes // 2
        for at, part in ((offset, data[:half]), (offset + half, data[half:])):
            self.fuse.effect("pwrite", lambda a=at, p=part: os.pwrite(file_descriptor, p, a))

    def fsync(self, file_descriptor: int) -> None:
        del file_descriptor
        self.fuse.effect("fsync", lambda: None)

    def rename(self, source: Path, target: Path) -> None:
        self.fuse.effect("rename", lambda: LocalDisk.rename(self, source, target))

    def unlink(self, path: Path) -> None:
        self.fuse.effect("unlink", lambda: LocalDisk.unlink(self, path))

    def mkdir(self, path: Path) -> None:
        self.fuse.effect("mkdir", lambda: LocalFolderDisk.mkdir(self, path))

    def link(self, source: Path, target: Path) -> None:
        self.fuse.effect("link", lambda: LocalFolderDisk.link(self, source, target))

    def rmdir(self, path: Path) -> None:
        self.fuse.effect("rmdir", lambda: LocalFolderDisk.rmdir(self, path))


def test_a_folder_target_survives_a_crash_at_every_disk_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        world = run_of(fresh(), 2)
        subscriber = world.open_subscriber(world.folder / "target")
        subscriber.update()
        world.publish()
        subscriber.stage()
        return world

    def activate(world: World, fuse: Fuse) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(journal, "LocalDisk", lambda: FusedDisk(fuse))
            world.subscriber.activate()  # type: ignore[union-attr]

    for crash in enumerate_crashes(begin, activate):
        n_points += 1
        _check_folder(crash)
    report("disk effects of a folder target", n_points)


def _check_folder(crash: CrashPoint[World]) -> None:
    world = crash.world
    world.restart()
    subscriber = world.open_subscriber(world.folder / "target")
    updated = subscriber.update()
    assert subscriber.version == max(commits(world)), str(crash)
    assert updated is None or not updated.was_whole, f"{crash}: the folder was thrown away"
    with Checkpoint.open(world.folder / "target") as checkpoint:
        assert digest_state(checkpoint)[0] == ww.digest(world.state)
    subscriber.close()


def test_a_publish_into_a_folder_survives_a_crash_at_every_disk_effect(tmp_path: Path) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        world = World(fresh())
        world.store = FolderStore(world.folder / "store", clock=world.clock)  # type: ignore[assignment]
        world.restart()
        world.open_publisher()
        for number in range(2):
            world.publish(changed=number > 0)
        world.train()
        return world

    def publish(world: World, fuse: Fuse) -> None:
        world.store._disk = FusedDisk(fuse)  # type: ignore[attr-defined]
        world.again.publish().result()

    before = commits(begin()).keys()
    for crash in enumerate_crashes(begin, publish):
        n_points += 1
        world = crash.world
        world.store._disk = LocalFolderDisk()  # type: ignore[attr-defined]
        world.restart()
        assert before <= commits(world).keys(), str(crash)
        check_late_joiner(world)
        world.open_publisher()
        world.publish()
        check_late_joiner(world)
    report("disk effects of a publish into a folder", n_points)


def test_a_baseline_file_survives_a_crash_at_every_entry_of_its_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0
    advance_piece = Baseline._overwrite

    def begin() -> World:
        folder = fresh()
        world = run_of(folder, 2, baseline=folder / "baseline")
        world.train()
        return world

    def publish(world: World, fuse: Fuse) -> None:
        def piece(baseline: Baseline, head: Any, changes: Changes) -> None:
            half = len(changes) // 2
            for part in (slice(0, half), slice(half, None)):
                some = Changes(changes.positions[part], changes.bits[part])
                fuse.effect(head.spec.name, lambda s=some: advance_piece(baseline, head, s))

        with monkeypatch.context() as patch:
            patch.setattr(Baseline, "_overwrite", piece)
            world.again.publish().result()

    for crash in enumerate_crashes(begin, publish):
        n_points += 1
        _check_baseline(crash)
    report("entries of a baseline file's advance", n_points)


def _check_baseline(crash: CrashPoint[World]) -> None:
    """Whatever the file holds, the next publisher diffs against what was committed."""
    world = crash.world
    world.restart()
    publisher = world.open_publisher(baseline=world.folder / "baseline")
    assert digest_state(publisher._baseline)[0] == ww.digest(world.state), str(crash)
    published = world.publish()
    assert published.n_bytes < published.n_state_bytes, f"{crash}: a whole state was sent"
    check_late_joiner(world)
    kept: Tensors = dict(world.state)
    again = ww.Publisher(
        world.store, kept, clock=world.clock, background=inline, baseline=world.folder / "baseline"
    )
    assert again.version == published.version + 1


def test_what_killed_publishers_left_beside_a_baseline_goes_when_it_is_old(tmp_path: Path) -> None:
    """Each kill in the middle of a whole copy leaves one: without this a disk fills up by and by."""
    folder = tmp_path / "baseline"
    folder.mkdir()
    left = folder / ".model.safetensors.weightwire-999999-0123abcd.tmp"
    left.write_bytes(b"half a state")
    os.utime(left, (1, 1))
    world = World(tmp_path)
    world.open_publisher(baseline=folder)
    world.publish()
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
