"""Folders of a cache that are being used: receivers that share it leave each other's alone.

Each user holds a shared lock on the folder itself, so the lock follows the folder to its final name,
and ends with the process. Where a file system has no such locks, a folder may be removed while it
is used; then it is fetched again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial"
"""How the names of folders end that are not whole: not yet, or no longer."""


class InUse:
    """The folders one receiver uses."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        # Also when nobody calls close: what is locked for ever is never removed.
        weakref.finalize(self, _close_all, self._descriptors)

    def claim(self, name: str, folder: Path) -> bool:
        """Use a folder from now on; False if it was removed meanwhile.

        Raises:
            OSError: it cannot be opened.
        """
        held = self._descriptors.get(name)
        if held is not None and _is_at(folder, held):
            return True
        self.release(name)
        try:
            descriptor = _open(folder)
        except FileNotFoundError:
            return False
        self._descriptors[name] = descriptor
        with suppress(OSError):  # no such locks here
            # Waits for someone who is removing it, and gives it another name first.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        return _is_at(folder, descriptor)

    def release(self, name: str) -> None:
        """Let go of a folder."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def release_all_but(self, names: set[str]) -> None:
        """Let go of every folder but these."""
        for name in self._descriptors.keys() - names:
            self.release(name)


def remove_unused(folder: Path) -> None:
    """Remove a folder unless somebody uses it; what cannot be removed stays."""
    try:
        descriptor = _open(folder)
    except OSError:
        return  # gone, or no folder
    try:
        # Someone may have removed it and made another before we had the lock.
        is_ours = _is_free(descriptor) and _is_at(folder, descriptor)
        going = _take_name(folder) if is_ours else None
    finally:
        os.close(descriptor)
    if going is not None:
        shutil.rmtree(going, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder, whoever uses it; what cannot be removed stays."""
    going = _take_name(folder)
    if going is not None:
        shutil.rmtree(going, ignore_errors=True)


def _take_name(folder: Path) -> Path | None:
    """Another name for a folder that goes: nobody may find half of it under its own."""
    try:
        return folder.rename(folder.with_name(f"{uuid4().hex}{PARTIAL}"))
    except FileNotFoundError:
        return None  # what has its name from now on is another folder
    except OSError:
        return folder  # it has to go as it is


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no such locks here
    return True


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether an open folder still has its name."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
