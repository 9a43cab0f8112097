"""Removing what writers that were killed have left beside a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weightwire.checkpoint.file_names import temporary_owner
from weightwire.checkpoint.rename import remove

_LOG = logging.getLogger(__name__)

LEFTOVER_AGE_S = 3600
"""How long nothing must have been written to a leftover. On a shared file system its writer may live
on another host, where its process number cannot be asked after; but a live writer writes."""


def remove_leftovers(out: Path, clock: Callable[[], float]) -> None:
    """Remove half-written checkpoints meant for ``out`` whose writers are dead.

    A killed writer cannot clean up, and what it leaves is as large as a checkpoint: without this, a
    job that is killed and restarted fills its disk. Old checkpoints that were moved aside are not
    touched, they may be the only ones. Nothing here may fail a write: another process may be
    removing the same leftover, or it may belong to someone else.
    """
    with suppress(OSError):
        for path in list(out.parent.iterdir()):
            owner = temporary_owner(path.name, out)
            if owner is not None and not _is_alive(owner):
                _remove_old(path, clock)


def _remove_old(path: Path, clock: Callable[[], float]) -> None:
    with suppress(OSError):
        if clock() - _last_written(path) > LEFTOVER_AGE_S:
            remove(path)
            _LOG.info("removed %s, left by a process that was killed", path)


def _last_written(path: Path) -> float:
    """A folder's own time stands still while a shard in it grows."""
    return max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
