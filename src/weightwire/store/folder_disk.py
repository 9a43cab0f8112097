"""Every effect a folder store has on the file system, behind one small contract."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from weightwire.checkpoint.disk import Disk, LocalDisk
from weightwire.durable import make_folder


class FolderDisk(Disk, Protocol):
    """The effects of an in-place apply, and three more.

    Folders are made with ``mkdir``. Bytes go into a new file with ``create``, ``pwrite`` and
    ``fsync``; ``link`` gives it a name nobody has yet, ``rename`` one that may be taken. What is
    no longer needed goes with ``unlink`` and ``rmdir``. Nothing else changes the disk, so a test
    that dies at each call in turn has died everywhere.
    """

    def mkdir(self, path: Path) -> None:
        """Make a folder, unless there is one."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; ``FileExistsError`` if the name is taken."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""


class LocalFolderDisk(LocalDisk):
    """The real file system."""

    def mkdir(self, path: Path) -> None:
        """Make one folder; its parent is there already."""
        make_folder(path)

    def link(self, source: Path, target: Path) -> None:
        """Hard link: the one way to name a finished file only if the name is free."""
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        os.link(source, target)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()
