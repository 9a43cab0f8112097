"""What the operating system's errors mean to someone who uses a folder as a store."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable, WeightwireError
from weightwire.store.source import Source

_ADVICE = {
    errno.ENOSPC: "free some space, or collect old versions",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "the file system takes no files of this size",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "check the folder's owner and mode",
    errno.EPERM: "check the folder's mode, and that its file system has hard links",
    errno.ENOTSUP: "use a file system with hard links",
    errno.EXDEV: "keep the whole store on one file system",
    errno.EISDIR: "a folder has this name",
    errno.ENOTDIR: "a file stands where a folder must be",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "a link stands where a file must be",
}
"""Errors that stay until a person does something, and what that is; all others may pass."""


@contextmanager
def mapped_errors(verb: str, path: Path, source: Source | None = None) -> Iterator[None]:
    """Turn the operating system's errors into the store's; those of ``source`` stay as they are.

    Raises:
        ObjectMissing: a read of a file that is not there.
        StoreRefused: what a person must change.
        StoreUnavailable: everything else, a failing disk among it; the write may have happened.
    """
    try:
        yield
    except OSError as error:
        if source is not None and error is source.failure:
            raise
        raise _mapped(verb, path, error) from error


def _mapped(verb: str, path: Path, error: OSError) -> WeightwireError:
    """The store's error for one of the operating system's."""
    reason = error.strerror or str(error)
    if verb == "read" and error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return ObjectMissing(f"{path}: no such object; it was collected, or never written")
    advice = _ADVICE.get(error.errno or 0)
    if advice is not None:
        return StoreRefused(f"cannot {verb} {path}: {reason}; {advice}")
    return StoreUnavailable(f"cannot {verb} {path}: {reason}; try again, and check the disk")
