"""Overwriting single elements of a file: read a window, scatter the new bits, write it back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weightwire.checkpoint.disk import Disk
from weightwire.checkpoint.journal_file import JournalReader, Record, check_changes
from weightwire.checkpoint.reader import Checkpoint
from weightwire.container import read_into
from weightwire.errors import MalformedRecord
from weightwire.model import Changes

WINDOW_BYTES = 1 << 20
"""Changes are far denser than one per page, so whole windows cost no more disk than elements."""


def replay(
    journal: JournalReader, checkpoint: Checkpoint, targets: Mapping[Path, int], disk: Disk
) -> None:
    """Write every record of a journal to its shard, and make the shards durable.

    Raises:
        MalformedRecord: a record that does not fit the checkpoint's tensors.
        MissingTensor: a record of a tensor the checkpoint does not have.
    """
    for record in journal.records():
        path, offset = checkpoint.location(record.name)
        _check_record(record, checkpoint)
        overwrite_elements(disk, targets[path], offset, record.changes, str(path))
    for descriptor in targets.values():
        disk.fsync(descriptor)


def overwrite_elements(
    disk: Disk, file_descriptor: int, offset: int, changes: Changes, where: str
) -> None:
    """Overwrite the changed elements of the tensor that starts at byte ``offset``.

    Raises:
        TruncatedFile: the file ends inside the tensor.
    """
    if not len(changes):
        return
    n_window = WINDOW_BYTES // changes.bits.dtype.itemsize
    windows = changes.positions // n_window
    edges = np.flatnonzero(windows[1:] != windows[:-1]) + 1
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(changes)], strict=True):
        part = Changes(changes.positions[start:stop], changes.bits[start:stop])
        _overwrite_window(disk, file_descriptor, offset, part, where)


def _overwrite_window(
    disk: Disk, file_descriptor: int, offset: int, changes: Changes, where: str
) -> None:
    first = int(changes.positions[0])
    block = np.empty(int(changes.positions[-1]) - first + 1, changes.bits.dtype)
    start = offset + first * block.itemsize
    if block.size > len(changes):
        read_into(file_descriptor, block.view(np.uint8), start, where)
    block[changes.positions - first] = changes.bits
    disk.pwrite(file_descriptor, block.view(np.uint8).data, start)


def _check_record(record: Record, checkpoint: Checkpoint) -> None:
    spec = checkpoint.specs[record.name]
    if record.dtype != spec.dtype:
        raise MalformedRecord(
            f"tensor {record.name!r:.200} is {spec.dtype.name} in {checkpoint.place.path}, but "
            f"{record.dtype.name} in the journal: the journal belongs to another checkpoint"
        )
    check_changes(spec, record.changes)
