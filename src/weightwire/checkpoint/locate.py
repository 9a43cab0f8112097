"""What a path means as a checkpoint: one file, a folder with one file, or an indexed folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightwire.checkpoint.file_names import INDEX_NAME, SINGLE_NAME, WEIGHTS_SUFFIX
from weightwire.checkpoint.regular_file import real_path, stays_inside
from weightwire.checkpoint.shard_index import ShardIndex, read_index
from weightwire.errors import MalformedHeader, NotACheckpoint


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's bytes are."""

    path: Path
    """As the user gave it: the file, or the folder."""
    shards: tuple[Path, ...]
    index: ShardIndex | None = None

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder; None for a file that was named itself."""
        return None if self.shards == (self.path,) else self.path


def locate(path: Path) -> Place:
    """Find the shards of the checkpoint at ``path``.

    Raises:
        NotACheckpoint: nothing there that can be one.
        MalformedHeader: an index that does not parse, or names missing or foreign files.
    """
    if not path.is_dir():
        return _locate_file(path)
    place = _locate_in_folder(path)
    for shard in place.shards:
        _check_shard(path, shard)
    return place


def _locate_file(path: Path) -> Place:
    if not path.exists():
        raise NotACheckpoint(f"{path}: no such file or folder; check the path")
    if path.suffix != WEIGHTS_SUFFIX:
        raise NotACheckpoint(f"{path}: expected a *{WEIGHTS_SUFFIX} file, or a folder with one")
    return Place(path, (path,))


def _locate_in_folder(folder: Path) -> Place:
    if (folder / SINGLE_NAME).exists():
        return Place(folder, (folder / SINGLE_NAME,))
    if (folder / INDEX_NAME).exists():
        index = read_index(folder / INDEX_NAME)
        return Place(folder, tuple(folder / name for name in index.shard_names), index)
    return Place(folder, (_only_weights_file(folder),))


def _only_weights_file(folder: Path) -> Path:
    found = sorted(
        file for file in folder.glob(f"*{WEIGHTS_SUFFIX}") if not file.name.startswith(".")
    )
    if len(found) != 1:
        raise NotACheckpoint(
            f"{folder}: looked for {SINGLE_NAME}, for {INDEX_NAME}, and for exactly one "
            f"*{WEIGHTS_SUFFIX} file, but found {len(found)} of those; name the file you mean"
        )
    return found[0]


def _check_shard(folder: Path, shard: Path) -> None:
    if not stays_inside(folder, shard):
        raise MalformedHeader(
            f"{shard}: is a link to {real_path(shard)}, outside its folder; put a file there"
        )
    if not shard.exists():
        raise MalformedHeader(f"{shard}: named in the index but missing; fetch it again")
