"""Where ``publish`` keeps the last committed state between two calls."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import OutputExists

_LOCK = "weightwire-baseline.lock"
"""Marks a folder as ours, and is held while a publish works in it."""


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/weightwire``, or ``~/.cache/weightwire``."""
    found = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(found) if os.path.isabs(found) else Path.home() / ".cache"  # noqa: PTH117
    return root / "weightwire"


def default_folder(store: str) -> Path:
    """One folder per store, whatever the working folder is."""
    is_path = not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", store)
    name = str(Path(store).expanduser().resolve()) if is_path else store.rstrip("/")
    return cache_root() / f"baseline-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


@contextmanager
def open_baseline(
    folder: Path, checkpoint: Path, note: Callable[[str], None] = lambda _: None
) -> Iterator[Path]:
    """The folder, for one publish at a time.

    Raises:
        OutputExists: it holds something that is no baseline, such as the checkpoint itself.
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / _LOCK
    if not lock.exists() and any(folder.iterdir()):
        raise OutputExists(
            f"{folder}: holds something that is no baseline of ours, and a baseline is overwritten"
            f" with every version (this one with {checkpoint.name}); name an empty folder"
        )
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _hold(descriptor, folder, note)
        yield folder
    finally:
        os.close(descriptor)


def _hold(descriptor: int, folder: Path, note: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"waiting for another publish that uses {folder}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
