"""A local folder as an object store, with plain system calls.

obstore's local store never calls ``fsync``: a power cut could take back a version that was
reported as committed, or leave its name with no bytes behind it. So bytes are written to a file in
a hidden folder and made durable *before* they get their name, and the name is made durable before
a call returns. Hard links give create-if-absent, also over NFS.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightwire.clock import Clock, SystemClock
from weightwire.durable import sync_folder
from weightwire.errors import StoreRefused
from weightwire.store.contract import ObjectInfo
from weightwire.store.folder_disk import FolderDisk, LocalFolderDisk
from weightwire.store.folder_errors import mapped_errors
from weightwire.store.folder_reading import list_folder, read_file
from weightwire.store.keys import check_key
from weightwire.store.source import Source

UNFINISHED = ".weightwire-unfinished"
"""Folder, beside the objects, of files that have no name yet; never listed."""

STALE_AFTER_S = 24 * 3600.0
"""An unfinished file nobody wrote to for a day belongs to a process that died."""

_N_FOLDER_RACES = 100
"""How often a collector may remove an empty folder under a writer's hands before it gives up."""


class FolderStore:
    """Objects are files under ``root``; a key is a path relative to it.

    Deletes are not made durable: a power cut may bring a deleted object back, whole, and the
    collector finds it again.
    """

    def __init__(
        self, root: Path, *, clock: Clock | None = None, disk: FolderDisk | None = None
    ) -> None:
        # Absolute: a process that changes its working folder keeps its store.
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
        self._clock = clock or SystemClock()
        self._disk = disk or LocalFolderDisk()
        self._is_prepared = False

    def __repr__(self) -> str:
        return f"FolderStore({str(self._root)!r})"

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write a file under a hidden name, make it durable, then rename it into place.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        target, source = self._path(key), Source(data)
        with mapped_errors("write", target, source), self._unfinished(source) as temporary:
            self._give_name(target, lambda: self._disk.rename(temporary, target))

    def create(self, key: str, data: bytes) -> bool:
        """Write a file under a hidden name, make it durable, then link it if the name is free.

        The name is durable before either answer: who is told "no" may rely on the other's record.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        target = self._path(key)
        with mapped_errors("create", target), self._unfinished(Source(data)) as temporary:
            try:
                self._give_name(target, lambda: self._disk.link(temporary, target))
            except FileExistsError:
                self._sync_folders(target)
                return False
        return True

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The file's bytes, or a range of them.

        Raises:
            ObjectMissing, StoreUnavailable, StoreRefused: as the contract says.
        """
        path = self._path(key)
        with mapped_errors("read", path):
            return read_file(path, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Files whose keys start with ``prefix``, in order, entering only folders that can matter.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        with mapped_errors("list", self._root):
            yield from list_folder(self._root, prefix, after, hidden=UNFINISHED)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the folders that are empty then.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        for key in keys:
            path = self._path(key)
            with mapped_errors("delete", path):
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    self._disk.unlink(path)
                self._prune(path.parent)

    def _path(self, key: str) -> Path:
        """Where an object lies; never outside the root, never among the unfinished."""
        if check_key(key).partition("/")[0] == UNFINISHED:
            raise StoreRefused(f"{key!r:.120}: {UNFINISHED} is where unfinished files lie")
        return self._root / key

    @contextmanager
    def _unfinished(self, source: Source) -> Iterator[Path]:
        """A durable file without a final name; whatever happens, its hidden name goes."""
        path = self._root / UNFINISHED / self._clock.token()
        descriptor = self._create(path)
        try:
            try:
                self._write(descriptor, source)
            finally:
                os.close(descriptor)
            yield path
        finally:
            # After a rename there is nothing left; and what cannot be removed is swept later.
            with suppress(OSError):
                self._disk.unlink(path)

    def _create(self, path: Path) -> int:
        """A new, empty file among the unfinished."""
        self._prepare()
        try:
            return self._disk.create(path)
        except FileNotFoundError:
            self._is_prepared = False  # someone removed the whole folder: the next try makes it
            raise

    def _write(self, descriptor: int, source: Source) -> None:
        """All bytes, a piece at a time, then onto the disk."""
        offset = 0
        for piece in source:
            self._disk.pwrite(descriptor, memoryview(piece), offset)
            offset += len(piece)
        self._disk.fsync(descriptor)

    def _give_name(self, target: Path, name_it: Callable[[], None]) -> None:
        """Name a durable file and make the name durable, whoever prunes folders meanwhile."""
        for _ in range(_N_FOLDER_RACES):
            self._make_folders(target)
            try:
                name_it()
            except FileNotFoundError:
                continue
            self._sync_folders(target)
            return
        raise OSError(errno.EBUSY, "its folder is removed again and again")

    def _make_folders(self, target: Path) -> None:
        """The folders from the root down to ``target``; one may vanish again while we make it."""
        with suppress(FileNotFoundError):
            for folder in reversed(self._folders_above(target)):
                self._disk.mkdir(folder)

    def _sync_folders(self, target: Path) -> None:
        """Make names durable from ``target`` up to the root.

        All of them, each time: another process may have made one of these folders a moment ago
        and died before it was durable. Where nothing changed, this costs a system call.
        """
        for folder in self._folders_above(target):
            with suppress(FileNotFoundError):  # deleted and pruned already: nothing to keep
                sync_folder(folder, self._disk.fsync)

    def _folders_above(self, target: Path) -> tuple[Path, ...]:
        """From the folder ``target`` lies in up to the root."""
        return tuple(each for each in target.parents if each.is_relative_to(self._root))

    def _prepare(self) -> None:
        """Once, before the first write: make the root, and clear what dead processes left."""
        if self._is_prepared:
            return
        with mapped_errors("make", self._root):
            missing = [each for each in (self._root, *self._root.parents) if not each.exists()]
            for folder in reversed(missing):
                self._disk.mkdir(folder)
                sync_folder(folder.parent, self._disk.fsync)
            with suppress(PermissionError):  # a parent we may not open is not ours to keep
                sync_folder(self._root.parent, self._disk.fsync)
            self._disk.mkdir(self._root / UNFINISHED)
            self._sweep()
        self._is_prepared = True

    def _sweep(self) -> None:
        """Remove unfinished files that nobody has written to for a day."""
        for path in (self._root / UNFINISHED).iterdir():
            with suppress(OSError):  # finished or swept by another process
                if self._clock.now() - path.stat().st_mtime > STALE_AFTER_S:
                    self._disk.unlink(path)

    def _prune(self, folder: Path) -> None:
        """Remove folders that hold nothing, upwards; a long run would leave one per version."""
        with suppress(OSError):  # not empty, or gone
            while folder != self._root:
                self._disk.rmdir(folder)
                folder = folder.parent
