"""A patch folder as a command's output: new, or in place of an older patch, in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.checkpoint.file_names import temporary_sibling
from weightwire.checkpoint.rename import put_in_place, remove
from weightwire.codec.index import INDEX_FILE
from weightwire.codec.patch import PatchFolder
from weightwire.errors import OutputExists


@contextmanager
def open_patch_output(path: Path, *, overwrite: bool) -> Iterator[PatchFolder]:
    """A folder to fill and commit; an old patch stays until the new one is whole.

    Raises:
        OutputExists: there is something, and it is no patch or may not be replaced.
    """
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    if not overwrite or not os.path.lexists(path):
        with PatchFolder(path) as folder:
            yield folder
        return
    if path.is_symlink() or not (path / INDEX_FILE).is_file():
        raise OutputExists(f"{path}: only a patch folder may be overwritten here; remove it")
    fresh = temporary_sibling(path.absolute())
    try:
        with PatchFolder(fresh) as folder:
            yield folder
        put_in_place(fresh, path.absolute(), overwrite=True)
    finally:
        remove(fresh)
