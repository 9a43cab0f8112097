"""A checkpoint on disk as a state: specs from its headers, bits read a piece at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightwire.checkpoint.file_names import possible_journals
from weightwire.checkpoint.locate import Place, locate
from weightwire.checkpoint.regular_file import open_regular
from weightwire.checkpoint.shard_index import ShardIndex
from weightwire.container import Entry, Header, read_header, read_into
from weightwire.errors import (
    DuplicateTensor,
    InterruptedApply,
    MalformedHeader,
    MalformedRecord,
    MissingTensor,
)
from weightwire.model import Bits, TensorSpec


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file of a checkpoint, with its checked header."""

    path: Path
    header: Header


@dataclass(frozen=True)
class _Home:
    """Where one tensor lives."""

    file: ShardFile
    entry: Entry
    descriptor: int

    @property
    def offset(self) -> int:
        return self.file.header.data_start + self.entry.start


class Checkpoint:
    """A checkpoint opened for reading; a ``StateReader`` that several threads may share.

    The files stay open until ``close``, so that a reader keeps seeing the checkpoint it opened
    even when another process renames a new one into its place.
    """

    def __init__(self, place: Place, opened: Mapping[int, ShardFile], stack: ExitStack) -> None:
        self.place = place
        self.files = list(opened.values())
        self._stack = stack
        self._is_open = True
        self._homes = {
            name: _Home(file, entry, descriptor)
            for descriptor, file in opened.items()
            for name, entry in file.header.entries.items()
        }
        self._specs = {name: home.entry.spec for name, home in self._homes.items()}

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open the ``.safetensors`` file, or the folder of one or more, at ``path``.

        Raises:
            NotACheckpoint: the path holds no checkpoint.
            InterruptedApply: an in-place apply died half way; the bits may be a mixture.
            MalformedHeader: a header or index that lies, or shards that contradict the index.
            DuplicateTensor: two shards hold the same tensor.
            TruncatedFile: a shard shorter than its header says.
            UnsupportedDType: a tensor whose elements are unknown or not whole bytes.
            LimitExceeded: a count or size beyond the published caps.
        """
        place = locate(Path(path))
        check_not_interrupted(place.folder, place.shards)
        return cls.open_unchecked(place)

    @classmethod
    def open_unchecked(cls, place: Place) -> Checkpoint:
        """Open what may be a mixture of two states: for the journal's own use.

        Raises:
            WeightwireError: as ``open`` does, but never InterruptedApply.
        """
        stack = ExitStack()
        try:
            opened = dict(_open_shard(path, stack) for path in place.shards)
            _check_unique(list(opened.values()))
            _check_index(list(opened.values()), place.index)
            return cls(place, opened, stack.pop_all())
        finally:
            stack.close()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name, by shard and then by offset."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """Always empty: a safetensors file cannot share storage."""
        return {}

    def read(self, name: str, start: int, stop: int) -> Bits:
        """The bits of elements ``start`` to ``stop`` of one tensor, in a buffer of their own.

        Raises:
            MissingTensor: no tensor of this name.
            MalformedRecord: a range outside the tensor.
            TruncatedFile: the file has shrunk since it was opened.
            ValueError: the checkpoint is closed.
        """
        home = self._home(name)
        spec = home.entry.spec
        if not 0 <= start <= stop <= spec.n_elements:
            raise MalformedRecord(
                f"{home.file.path}: elements {start} to {stop} of {name!r} were asked for, "
                f"which has {spec.n_elements}"
            )
        bits = np.empty(stop - start, spec.dtype.bits_dtype)
        offset = home.offset + start * spec.dtype.n_bytes
        read_into(home.descriptor, bits.view(np.uint8), offset, str(home.file.path))
        return bits

    def location(self, name: str) -> tuple[Path, int]:
        """The file that holds a tensor, and the byte in it at which the tensor starts.

        Raises:
            MissingTensor: no tensor of this name.
            ValueError: the checkpoint is closed.
        """
        home = self._home(name)
        return home.file.path, home.offset

    def close(self) -> None:
        """Close the files; reading afterwards is refused, not redirected to a reused number."""
        self._is_open = False
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _home(self, name: str) -> _Home:
        if not self._is_open:
            raise ValueError(f"{self.place.path}: read of a closed checkpoint")
        if name not in self._homes:
            raise MissingTensor(f"{self.place.path}: has no tensor {name!r:.200}")
        return self._homes[name]


def check_not_interrupted(folder: Path | None, files: Iterable[Path]) -> None:
    """Refuse files that an in-place apply left half written.

    Raises:
        InterruptedApply: a committed journal concerns one of them.
    """
    for journal in possible_journals(folder, files):
        if journal.exists():
            raise InterruptedApply(
                f"{journal} is the journal of an in-place apply that was interrupted; run "
                "`weightwire apply --in-place` again, or call `recover`, to finish it"
            )


def _open_shard(path: Path, stack: ExitStack) -> tuple[int, ShardFile]:
    descriptor = stack.enter_context(open_regular(path, os.O_RDONLY))
    header = read_header(descriptor, os.fstat(descriptor).st_size, str(path))
    return descriptor, ShardFile(path, header)


def _check_unique(files: Sequence[ShardFile]) -> None:
    first: dict[str, Path] = {}
    for file in files:
        for name in file.header.entries:
            if name in first:
                raise DuplicateTensor(
                    f"tensor {name!r:.200} is in {first[name]} and in {file.path}; "
                    "a checkpoint holds each tensor once: remove one"
                )
            first[name] = file.path


def _check_index(files: Sequence[ShardFile], index: ShardIndex | None) -> None:
    """The index and the shards must agree both ways, or a loader would see another state."""
    if index is None:
        return
    found = {name: file.path.name for file in files for name in file.header.entries}
    for name, shard in index.weight_map.items():
        if found.get(name) != shard:
            raise MalformedHeader(
                f"the index says that tensor {name!r:.200} is in {shard}, but it is in "
                f"{found.get(name, 'no shard')}; fetch the checkpoint again"
            )
    for name, shard in found.items():
        if name not in index.weight_map:
            raise MalformedHeader(
                f"tensor {name!r:.200} is in {shard}, but the index does not list it; "
                "fetch the checkpoint again"
            )
