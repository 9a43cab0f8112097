"""Making names survive a power cut: what every folder that is written to needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import DiskTrouble


def sync_folder(folder: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Make the names in a folder durable; without it a power cut can undo a rename.

    ``fsync`` is passed in by those whose every effect must be seen by a test.

    Raises:
        OSError: there is no such folder, or its file system failed to keep it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(file_descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes of ``data`` at ``offset``, however many calls it takes."""
    n_done = 0
    while n_done < data.nbytes:
        n_done += os.pwrite(file_descriptor, data[n_done:], offset + n_done)


@contextmanager
def typed_disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours: a full disk is a matter of waiting for room.

    Raises:
        DiskTrouble: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise DiskTrouble(
            f"{path} cannot be written: {error}; free some space or mend the disk, then try again"
        ) from error
