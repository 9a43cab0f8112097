"""Making names survive a power cut: what every folder that is written to needs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import DiskTrouble

_N_FOLDER_RACES = 64
"""How often a folder may vanish while it is made; others remove theirs once in a while."""


def make_folder(folder: Path, *, parents: bool = False) -> None:
    """Make a folder unless there is one, whoever removes it meanwhile.

    ``Path.mkdir(exist_ok=True)`` looks twice, and takes a folder that was removed between the two
    looks for a file.

    Raises:
        NotADirectoryError: something else has this name.
        OSError: the file system's own errors; EBUSY if the folder vanishes again and again.
    """
    for _ in range(_N_FOLDER_RACES):
        try:
            folder.mkdir(parents=parents)
            return
        except FileExistsError:
            if _is_folder(folder):
                return
    raise OSError(errno.EBUSY, "removed again and again while it is made", str(folder))


def _is_folder(path: Path) -> bool:
    """Whether a folder has this name; False if nothing has.

    Raises:
        NotADirectoryError: something else has.
    """
    try:
        mode = path.stat().st_mode  # one look: a second one may see something else
    except FileNotFoundError:
        if not path.is_symlink():
            return False
        mode = 0  # a link to nowhere
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return True


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
