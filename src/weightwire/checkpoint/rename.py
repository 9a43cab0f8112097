"""Putting a finished file or folder under its final name in one atomic step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from weightwire.checkpoint.file_names import WEIGHTS_SUFFIX, temporary_sibling
from weightwire.checkpoint.reader import check_not_interrupted
from weightwire.durable import sync_folder
from weightwire.errors import NotACheckpoint, OutputExists

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NOT_OFFERED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def check_output(out: Path, *, as_folder: bool, overwrite: bool) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        OutputExists: it exists and may not be replaced, or is nothing we would have written.
        NotACheckpoint: a single file that no reader would recognise by its name.
        InterruptedApply: a journal beside the file would later be replayed onto the new one.
    """
    if not as_folder and out.suffix != WEIGHTS_SUFFIX:
        raise NotACheckpoint(f"{out}: the base is one file, so this must end in {WEIGHTS_SUFFIX}")
    if not as_folder:
        check_not_interrupted(None, [out])
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise OutputExists(f"{out}: exists; choose another path, or ask to overwrite it")
    if out.is_dir() != as_folder or (as_folder and not _is_ours(out)):
        kind = "a checkpoint folder" if as_folder else "a single file"
        raise OutputExists(f"{out}: only {kind} may be overwritten here; remove it yourself")


def put_in_place(temporary: Path, out: Path, *, overwrite: bool) -> None:
    """Give ``temporary`` the name ``out``; an old folder may be left under the temporary's name.

    Raises:
        OutputExists: something appeared at ``out`` in the meantime.
    """
    if not (overwrite and os.path.lexists(out)):
        _rename_new(temporary, out)
    elif temporary.is_dir():
        _replace_folder(temporary, out)
    else:
        temporary.replace(out)
    sync_folder(out.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, or nothing; a link goes, its target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """A mistyped path must not cost anyone a folder of something else."""
    names = [entry.name for entry in folder.iterdir()]
    return not names or any(name.endswith(WEIGHTS_SUFFIX) for name in names)


def _rename_new(temporary: Path, out: Path) -> None:
    try:
        if _renameat2(temporary, out, _RENAME_NOREPLACE):
            return
        if os.path.lexists(out):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
        temporary.rename(out)
    except FileExistsError as error:
        raise OutputExists(f"{out}: appeared while it was being written; remove it") from error


def _replace_folder(temporary: Path, out: Path) -> None:
    """Swap the two; where the file system cannot, move the old one aside for a moment."""
    if _renameat2(temporary, out, _RENAME_EXCHANGE):
        return
    aside = temporary_sibling(out, ".old")
    out.rename(aside)
    try:
        temporary.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    aside.rename(temporary)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call Linux's renameat2; False where the C library, kernel or file system has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
