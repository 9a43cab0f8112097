"""Every effect an in-place apply has on the file system, behind one small contract."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from weightwire.durable import write_at


class Disk(Protocol):
    """The five effects, in the order an in-place apply uses them.

    A journal is created, filled with ``pwrite``, made durable with ``fsync``, and committed with
    ``rename``. The shards are then overwritten with ``pwrite`` and made durable, and the journal
    is removed with ``unlink``. Folders are made durable with ``fsync`` too. Nothing else is
    written, so a test that dies at each call in turn has died everywhere.
    """

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file."""

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        """Write all bytes of ``data`` at ``offset``."""

    def fsync(self, file_descriptor: int) -> None:
        """Return once a file's bytes, or a folder's names, survive a power cut."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name, atomically."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""


class LocalDisk:
    """The real file system."""

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file; an existing one is an error."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        """Write all bytes of ``data`` at ``offset``, however many calls it takes."""
        write_at(file_descriptor, data, offset)

    def fsync(self, file_descriptor: int) -> None:
        """Flush a file or folder to stable storage."""
        os.fsync(file_descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one folder."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()
