"""What a folder store reads: a range of one file, and all files in key order."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weightwire.errors import StoreRefused
from weightwire.store.contract import ObjectInfo


def read_file(path: Path, start: int, stop: int | None) -> bytes:
    """The bytes of a regular file from ``start`` to ``stop``, short if it ends before.

    Raises:
        StoreRefused: a link, a pipe or a device: reading it could block or never end.
        OSError: from the operating system, for the caller to map.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever. O_NOFOLLOW: a link
    # could lead anywhere on this machine.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not stat.S_ISREG(status.st_mode):
            raise StoreRefused(f"{path}: not a regular file; remove it from the store's folder")
        end = status.st_size if stop is None else min(stop, status.st_size)
        return _read_range(descriptor, start, end)
    finally:
        os.close(descriptor)


def _read_range(descriptor: int, start: int, stop: int) -> bytes:
    """All bytes of a range, however many calls it takes."""
    pieces = []
    while start < stop:
        piece = os.pread(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


def list_folder(root: Path, prefix: str, after: str, hidden: str) -> Iterator[ObjectInfo]:
    """Regular files under ``root`` in key order, but those in the ``hidden`` folder.

    Raises:
        OSError: from the operating system, for the caller to map.
    """
    return _walk(root, "", prefix, after, hidden)


def _walk(folder: Path, at: str, prefix: str, after: str, hidden: str) -> Iterator[ObjectInfo]:
    """Files below ``folder``, whose own key is ``at``; folders that cannot matter are not opened."""
    for key in _keys_in(folder, at):
        path = folder / key[len(at) :]
        if not key.endswith("/"):
            if key.startswith(prefix) and key > after:
                yield from _info(path, key)
        elif key != f"{hidden}/" and _may_hold(key, prefix, after):
            yield from _walk(path, key, prefix, after, hidden)


def _keys_in(folder: Path, at: str) -> list[str]:
    """Keys of a folder's entries; a folder's ends with a slash, so that they sort as keys do."""
    keys = []
    # A folder that is not there holds nothing: not made yet, or pruned since it was seen.
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name.isprintable() and (is_folder or entry.is_file(follow_symlinks=False)):
                keys.append(f"{at}{entry.name}{'/' if is_folder else ''}")
    return sorted(keys)


def _may_hold(folder_key: str, prefix: str, after: str) -> bool:
    """Whether a folder can hold keys with this prefix that sort after ``after``."""
    meets_prefix = folder_key.startswith(prefix) or prefix.startswith(folder_key)
    return meets_prefix and (folder_key > after or after.startswith(folder_key))


def _info(path: Path, key: str) -> Iterator[ObjectInfo]:
    """What a listing says of a file; nothing, if it was deleted since it was seen."""
    with suppress(FileNotFoundError):
        status = path.stat()
        yield ObjectInfo(key, status.st_size, status.st_mtime)
