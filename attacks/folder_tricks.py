"""Tricks with files and links in a patch folder."""

from __future__ import annotations

import os
from pathlib import Path

from registry import trick
from weightwire.codec.index import seal

_BUCKET = "bucket-00000.safetensors"


@trick
def a_bucket_that_is_missing(folder: Path) -> None:
    """The index names a file that is not there."""
    (folder / _BUCKET).unlink()


@trick
def a_bucket_that_is_a_link(folder: Path) -> None:
    """A bucket is a symbolic link to sound bytes outside the folder."""
    outside = folder.parent / "outside.safetensors"
    (folder / _BUCKET).rename(outside)
    (folder / _BUCKET).symlink_to(outside)


@trick
def a_bucket_that_links_to_itself(folder: Path) -> None:
    """A bucket is a symbolic link in a circle."""
    (folder / _BUCKET).unlink()
    (folder / _BUCKET).symlink_to(_BUCKET)


@trick
def a_bucket_that_is_a_pipe(folder: Path) -> None:
    """A bucket is a pipe that nobody writes to: opening it could wait for ever."""
    (folder / _BUCKET).unlink()
    os.mkfifo(folder / _BUCKET)


@trick
def a_bucket_that_is_a_folder(folder: Path) -> None:
    """A bucket is a folder, and the index names exactly its size."""
    n_bytes = (folder / _BUCKET).stat().st_size
    (folder / _BUCKET).unlink()
    (folder / _BUCKET).mkdir()
    index = (folder / "patch.json").read_bytes()
    size = (folder / _BUCKET).stat().st_size
    old, new = f'"n_bytes":{n_bytes}'.encode(), f'"n_bytes":{size}'.encode()
    unsealed = index[: index.rindex(b',"sha256":')] + b"}"
    (folder / "patch.json").write_bytes(seal(unsealed.replace(old, new, 1)))


@trick
def a_bucket_that_is_empty(folder: Path) -> None:
    """A bucket has no bytes."""
    (folder / _BUCKET).write_bytes(b"")


@trick
def a_bucket_with_a_hole(folder: Path) -> None:
    """A bucket is cut and then stretched with zeros to its old length."""
    n_bytes = (folder / _BUCKET).stat().st_size
    os.truncate(folder / _BUCKET, n_bytes // 2)
    os.truncate(folder / _BUCKET, n_bytes)


@trick
def an_index_that_is_missing(folder: Path) -> None:
    """There is no patch.json."""
    (folder / "patch.json").unlink()


@trick
def an_index_that_is_a_folder(folder: Path) -> None:
    """patch.json is a folder."""
    (folder / "patch.json").unlink()
    (folder / "patch.json").mkdir()


@trick
def an_index_that_is_a_pipe(folder: Path) -> None:
    """patch.json is a pipe that nobody writes to."""
    (folder / "patch.json").unlink()
    os.mkfifo(folder / "patch.json")


@trick
def an_index_that_links_to_endless_zeros(folder: Path) -> None:
    """patch.json is a link to a device that never ends."""
    (folder / "patch.json").unlink()
    (folder / "patch.json").symlink_to("/dev/zero")


@trick
def an_index_larger_than_any(folder: Path) -> None:
    """patch.json has 65 MiB, all of them a hole."""
    os.truncate(folder / "patch.json", 65 << 20)


@trick
def a_path_that_is_a_file(folder: Path) -> None:
    """The patch folder is a file."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_bytes(b"{}")
