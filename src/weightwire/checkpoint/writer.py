"""Writing a new checkpoint in the form of an old one: built aside, made durable, renamed once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from weightwire.checkpoint.companions import copy_companions
from weightwire.checkpoint.file_names import INDEX_NAME, temporary_sibling
from weightwire.checkpoint.leftovers import remove_leftovers
from weightwire.checkpoint.reader import Checkpoint
from weightwire.checkpoint.rename import check_output, put_in_place, remove
from weightwire.checkpoint.shard_index import build_index
from weightwire.container import build_header
from weightwire.digest import piece_ranges
from weightwire.durable import sync_folder
from weightwire.errors import MalformedRecord
from weightwire.model import Bits, TensorSpec

Resolve: TypeAlias = Callable[[str, int, int], Bits]
"""Gives the bits of elements ``start`` to ``stop`` of the named tensor."""
Progress: TypeAlias = Callable[[int], None]
"""Told the number of data bytes written since its last call."""

_FIRST_SHARD = "model-00001-of-00001.safetensors"
_NEW_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class _Shard:
    """A file to be written."""

    name: str
    specs: Sequence[TensorSpec]
    metadata: Mapping[str, str]


def write_checkpoint(
    out: Path,
    base: Checkpoint,
    specs: Mapping[str, TensorSpec],
    resolve: Resolve,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Write the tensors ``specs`` as a checkpoint of the same form as ``base``.

    Tensors keep their shard and order, new ones join the last shard, and the files beside the
    weights are copied. ``resolve`` is called in file order with rising ranges of at most
    a piece. ``out`` is complete or absent at every moment, power cuts included. What writers of
    ``out`` that were killed left an hour ago or earlier, by ``clock``, is removed first.

    Raises:
        OutputExists: ``out`` exists and may not be replaced.
        NotACheckpoint: the base is one file and ``out`` has no ``.safetensors`` name.
        InterruptedApply: the file at ``out`` has a pending journal.
        MalformedRecord: ``resolve`` gave bits of the wrong number or width.
        WeightwireError: whatever ``resolve`` raises; nothing is left behind.
    """
    out = out.absolute()
    check_output(out, as_folder=base.place.folder is not None, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out, clock)
    shards = _assign(base, specs)
    temporary = temporary_sibling(out)
    try:
        if base.place.folder is None:
            _write_shard(temporary, shards[0], resolve, progress)
        else:
            _write_folder(temporary, base, shards, resolve, progress)
        put_in_place(temporary, out, overwrite=overwrite)
    finally:
        remove(temporary)


def write_state(
    out: Path,
    specs: Mapping[str, TensorSpec],
    resolve: Resolve,
    clock: Callable[[], float] = time.time,
) -> None:
    """Write tensors as one new safetensors file, replacing what is there in one rename.

    What writers of ``out`` that were killed left an hour ago or earlier is removed first.

    Raises:
        MalformedRecord: ``resolve`` gave bits of the wrong number or width.
        WeightwireError: whatever ``resolve`` raises; nothing is left behind.
    """
    remove_leftovers(out.absolute(), clock)
    temporary = temporary_sibling(out.absolute())
    try:
        shard = _Shard(out.name, _aligned(list(specs.values())), _NEW_METADATA)
        _write_shard(temporary, shard, resolve, None)
        temporary.replace(out)
    finally:
        remove(temporary)


def _assign(base: Checkpoint, specs: Mapping[str, TensorSpec]) -> list[_Shard]:
    """Decide which file each tensor goes to."""
    groups = {
        file.path.name: [specs[name] for name in file.header.entries if name in specs]
        for file in base.files
    } or {_FIRST_SHARD: []}
    groups[next(reversed(groups))] += [
        spec for name, spec in specs.items() if name not in base.specs
    ]
    metadata = {file.path.name: file.header.metadata for file in base.files}
    # An index cannot name a shard without tensors, so such a file would be an orphan.
    return [
        _Shard(name, _aligned(group), metadata.get(name, _NEW_METADATA))
        for name, group in groups.items()
        if group or base.place.index is None
    ]


def _aligned(specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """Keep the order unless it puts an element astride: torch cannot view such a tensor."""
    offset = 0
    for spec in specs:
        if offset % spec.dtype.n_bytes:
            return sorted(specs, key=lambda spec: -spec.dtype.n_bytes)
        offset += spec.n_bytes
    return specs


def _write_folder(
    folder: Path,
    base: Checkpoint,
    shards: Sequence[_Shard],
    resolve: Resolve,
    progress: Progress | None,
) -> None:
    folder.mkdir()
    copy_companions(base.place.path, folder)
    for shard in shards:
        _write_shard(folder / shard.name, shard, resolve, progress)
    if base.place.index is not None:
        groups = {shard.name: shard.specs for shard in shards}
        index = build_index(groups, base.place.index.metadata)
        with _durable_file(folder / INDEX_NAME) as descriptor:
            _write_all(descriptor, memoryview(index))
    sync_folder(folder)


def _write_shard(path: Path, shard: _Shard, resolve: Resolve, progress: Progress | None) -> None:
    with _durable_file(path) as descriptor:
        _write_all(descriptor, memoryview(build_header(shard.specs, shard.metadata)))
        for spec in shard.specs:
            _write_tensor(descriptor, spec, resolve, progress)


def _write_tensor(
    file_descriptor: int, spec: TensorSpec, resolve: Resolve, progress: Progress | None
) -> None:
    for start, stop in piece_ranges(spec) if spec.n_elements else ():
        bits = resolve(spec.name, start, stop)
        _check_bits(spec, stop - start, bits)
        data = np.ascontiguousarray(bits, spec.dtype.bits_dtype).view(np.uint8).data
        _write_all(file_descriptor, data)
        if progress is not None:
            progress(data.nbytes)


def _check_bits(spec: TensorSpec, n_elements: int, bits: Bits) -> None:
    """A short or wide piece would shift every tensor behind it."""
    unsigned = bits.dtype.kind == "u" and bits.dtype.itemsize == spec.dtype.n_bytes
    if bits.shape != (n_elements,) or not unsigned:
        raise MalformedRecord(
            f"tensor {spec.name!r:.200}: got {bits.shape} elements of {bits.dtype}, expected "
            f"({n_elements},) of {spec.dtype.bits_dtype}"
        )


@contextmanager
def _durable_file(path: Path) -> Iterator[int]:
    """A new file, on stable storage by the time the block ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file_descriptor: int, data: memoryview) -> None:
    n_done = 0
    while n_done < data.nbytes:
        n_done += os.write(file_descriptor, data[n_done:])
