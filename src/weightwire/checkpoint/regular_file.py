"""Opening files that must be plain files inside the folder they are listed in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import NotACheckpoint


@contextmanager
def open_regular(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a regular file, closed at the end.

    Raises:
        NotACheckpoint: a folder, a pipe or a device: reading it could block or never end.
    """
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotACheckpoint(f"{path}: not a regular file; give a *.safetensors file")
        yield descriptor
    finally:
        os.close(descriptor)


def real_path(path: Path) -> Path:
    """``path`` with all links followed; unlike ``Path.resolve``, it survives links in a circle."""
    return Path(os.path.realpath(path))


def stays_inside(folder: Path, path: Path) -> bool:
    """Whether ``path``, with links followed, is still the folder's own.

    The Hugging Face cache keeps a snapshot's files as links to ``../../blobs``; those are its own.
    """
    target, home = real_path(path), real_path(folder)
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
