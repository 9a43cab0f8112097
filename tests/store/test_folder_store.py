"""A folder as a store: nothing that was reported is lost, whatever dies, and whenever."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from mortal_folder_disk import LOSSES, Crash, Loss, MortalFolderDisk

from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable
from weightwire.store.folder import STALE_AFTER_S, UNFINISHED, FolderStore
from weightwire.store.folder_disk import LocalFolderDisk

OLD = {"log/0": b"first record", "kept": b"old bytes", "patches/1/a": b"bucket"}
NEW = bytes(range(256)) * 20
Operation = Callable[[FolderStore], object]

OPERATIONS: dict[str, tuple[str, Operation]] = {
    "create": ("log/1", lambda store: store.create("log/1", NEW)),
    "create in a new folder": ("new/deep/x", lambda store: store.create("new/deep/x", NEW)),
    "create what is there": ("log/0", lambda store: store.create("log/0", NEW)),
    "put": ("log/1", lambda store: store.put("log/1", NEW)),
    "put over an old one": ("kept", lambda store: store.put("kept", NEW)),
    "put in pieces": (
        "a/b",
        lambda store: store.put("a/b", [NEW[:999], NEW[999:2000], NEW[2000:]]),
    ),
    "delete": ("patches/1/a", lambda store: store.delete(["patches/1/a"])),
}


def filled(root: Path) -> FolderStore:
    store = FolderStore(root)
    for key, data in OLD.items():
        store.put(key, data)
    return store


def contents(root: Path) -> dict[str, bytes]:
    store = FolderStore(root)
    return {info.key: store.read(info.key) for info in store.list("")}


def die(root: Path, operation: Operation, n_effects: float, loss: Loss) -> tuple[int, bool]:
    """Run on a disk that dies; how many effects happened, and whether the caller got an answer."""
    filled(root)
    disk = MortalFolderDisk(root.parent / f"{root.name}-attic", n_effects)
    is_answered = False
    with contextlib.suppress(Crash):
        operation(FolderStore(root, disk=disk))
        is_answered = True
    disk.cut_power(loss, seed=int(min(n_effects, 1 << 20)))
    return disk.n_done, is_answered


def possible(name: str, key: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What may be there if nothing happened, and what must be there if all did."""
    if name == "create what is there":
        return OLD, OLD
    if name == "delete":
        return OLD, {each: data for each, data in OLD.items() if each != key}
    return OLD, {**OLD, key: NEW}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_at_any_effect_leaves_the_old_or_the_new_objects(
    tmp_path: Path, name: str, loss: Loss
) -> None:
    key, operation = OPERATIONS[name]
    before, after = possible(name, key)
    n_effects, _ = die(tmp_path / "whole", operation, float("inf"), "nothing")
    for n_good in range(n_effects + 1):
        root = tmp_path / str(n_good)
        _, is_answered = die(root, operation, n_good, loss)
        found = contents(root)
        assert found in (before, after)
        if is_answered and name != "delete":
            assert found == after
        operation(FolderStore(root))
        assert contents(root) == after


def test_an_answered_delete_may_come_back_whole(tmp_path: Path) -> None:
    _, operation = OPERATIONS["delete"]
    _, is_answered = die(tmp_path / "store", operation, float("inf"), "everything")
    assert is_answered
    assert contents(tmp_path / "store") == OLD


@pytest.mark.parametrize("loss", LOSSES)
def test_a_new_root_survives_a_power_cut(tmp_path: Path, loss: Loss) -> None:
    disk = MortalFolderDisk(tmp_path / "attic")
    FolderStore(tmp_path / "a" / "b" / "store", disk=disk).create("log/1", NEW)
    disk.cut_power(loss, seed=0)
    assert contents(tmp_path / "a" / "b" / "store") == {"log/1": NEW}


def test_who_is_told_no_may_rely_on_the_record_that_won(tmp_path: Path) -> None:
    n_lost_races = 0
    for n_effects in range(12):
        root = tmp_path / str(n_effects)
        filled(root)
        disk = MortalFolderDisk(tmp_path / f"{n_effects}-attic", n_effects)
        with contextlib.suppress(Crash):
            FolderStore(root, disk=disk).create("log/1", NEW)
        disk.n_left = float("inf")
        if FolderStore(root, disk=disk).create("log/1", b"too late") is False:
            disk.cut_power("everything", seed=0)
            assert contents(root) == {**OLD, "log/1": NEW}
            n_lost_races += 1
    assert n_lost_races > 0


class PruningDisk(LocalFolderDisk):
    """A collector removes the empty folder just before a writer names its file, a few times."""

    def __init__(self, n_prunes: int) -> None:
        self.n_prunes = n_prunes

    def _prune(self, target: Path) -> None:
        if self.n_prunes > 0:
            self.n_prunes -= 1
            target.parent.rmdir()

    def link(self, source: Path, target: Path) -> None:
        self._prune(target)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._prune(target)
        super().rename(source, target)


def test_a_folder_pruned_under_a_writer_is_made_again(tmp_path: Path) -> None:
    FolderStore(tmp_path, disk=PruningDisk(3)).put("a/b/c", NEW)
    assert FolderStore(tmp_path, disk=PruningDisk(3)).create("d/e/f", NEW) is True
    assert contents(tmp_path) == {"a/b/c": NEW, "d/e/f": NEW}
    with pytest.raises(StoreUnavailable, match="again and again"):
        FolderStore(tmp_path, disk=PruningDisk(10_000)).put("g/h", NEW)


def test_leftovers_of_dead_writers_are_never_listed_and_go_when_old(tmp_path: Path) -> None:
    root = tmp_path / "store"
    die(root, OPERATIONS["put in pieces"][1], 6, "nothing")
    (left,) = (root / UNFINISHED).iterdir()
    assert set(contents(root)) == set(OLD)
    FolderStore(root).put("x", b"")
    assert left.exists()
    later = FakeClock(start=time.time() + STALE_AFTER_S + 60.0)
    FolderStore(root, clock=later).put("y", b"")
    assert list((root / UNFINISHED).iterdir()) == []


def test_unfinished_files_cannot_be_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for call in (store.read, lambda key: store.put(key, b""), lambda key: store.delete([key])):
        with pytest.raises(StoreRefused, match="unfinished"):
            call(f"{UNFINISHED}/x")


class FailingDisk(LocalFolderDisk):
    """One effect fails with an error of the operating system, once."""

    def __init__(self, effect: str, code: int, n_good: int = 0) -> None:
        self.effect, self.code, self.n_good = effect, code, n_good

    def _maybe_fail(self, effect: str) -> None:
        if effect == self.effect:
            self.n_good -= 1
            if self.n_good < 0:
                self.effect = ""
                raise OSError(self.code, os.strerror(self.code))

    def create(self, path: Path) -> int:
        self._maybe_fail("create")
        return super().create(path)

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        self._maybe_fail("pwrite")
        super().pwrite(file_descriptor, data, offset)

    def fsync(self, file_descriptor: int) -> None:
        self._maybe_fail("fsync")
        super().fsync(file_descriptor)

    def link(self, source: Path, target: Path) -> None:
        self._maybe_fail("link")
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail("rename")
        super().rename(source, target)


@pytest.mark.parametrize(
    ("effect", "code", "error"),
    [
        ("create", errno.ENOSPC, StoreRefused),
        ("pwrite", errno.ENOSPC, StoreRefused),
        ("pwrite", errno.EDQUOT, StoreRefused),
        ("pwrite", errno.EIO, StoreUnavailable),
        ("fsync", errno.EIO, StoreUnavailable),
        ("fsync", errno.ENOSPC, StoreRefused),
        ("rename", errno.EIO, StoreUnavailable),
        ("rename", errno.EROFS, StoreRefused),
        ("link", errno.EPERM, StoreRefused),
    ],
)
def test_a_failing_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path, effect: str, code: int, error: type[Exception]
) -> None:
    filled(tmp_path)
    disk = FailingDisk(
        effect, code, n_good=1 if effect == "fsync" else 0
    )  # the first is the root's
    store = FolderStore(tmp_path, disk=disk)
    with pytest.raises(error, match=os.strerror(code)):
        store.create("new", NEW) if effect == "link" else store.put("new", NEW)
    assert contents(tmp_path) == OLD
    assert list((tmp_path / UNFINISHED).iterdir()) == []
    assert store.create("new", NEW)


def test_a_name_that_may_not_be_durable_is_not_reported_as_written(tmp_path: Path) -> None:
    filled(tmp_path)
    store = FolderStore(tmp_path, disk=FailingDisk("fsync", errno.EIO, n_good=2))
    with pytest.raises(StoreUnavailable):
        store.create("log/1", NEW)
    assert store.create("log/1", NEW) is False


def test_a_file_in_the_place_of_a_folder_is_refused_and_not_taken_for_a_record(
    tmp_path: Path,
) -> None:
    store = filled(tmp_path)
    for call in (store.put, store.create):
        with pytest.raises(StoreRefused, match="folder"):
            call("kept/below", b"x")
        with pytest.raises(StoreRefused, match="folder"):
            call("log", b"x")
    assert contents(tmp_path) == OLD


def test_links_and_pipes_are_neither_read_nor_listed(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    (tmp_path / "secret").write_bytes(b"not for the store")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "store" / "up").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "store" / "pipe")
    assert contents(tmp_path / "store") == OLD
    for key in ("link", "pipe"):
        with pytest.raises(StoreRefused):
            store.read(key)


def test_a_store_that_is_not_there_is_empty_and_is_not_made_by_reading(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "nothing")
    assert list(store.list("")) == []
    with pytest.raises(ObjectMissing):
        store.read("a")
    store.delete(["a"])
    assert not (tmp_path / "nothing").exists()


def test_a_store_removed_under_a_writer_comes_back_with_the_next_write(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable):
        store.put("a", b"x")
    store.put("a", b"x")
    assert contents(tmp_path / "store") == {"a": b"x"}


def test_deleting_leaves_no_empty_folders(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.delete(["patches/1/a", "log/0"])
    assert sorted(each.name for each in tmp_path.iterdir()) == [UNFINISHED, "kept"]


def test_a_missing_right_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="owner and mode"):
        FolderStore(tmp_path, disk=FailingDisk("create", errno.EACCES)).put("a", b"x")


def test_folder_that_vanishes_while_it_is_made_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, honest = [tmp_path / "gone"], Path.mkdir

    def made_and_gone(self: Path, *arguments: Any, **options: Any) -> None:
        if self in left:
            left.remove(self)
            raise FileExistsError(17, "File exists", str(self))
        honest(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", made_and_gone)
    LocalFolderDisk().mkdir(tmp_path / "gone")
    assert (tmp_path / "gone").is_dir()
    assert left == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        LocalFolderDisk().mkdir(tmp_path / "file")
