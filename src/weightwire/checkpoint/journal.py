"""Overwriting a checkpoint in place so that a crash at any moment can be finished or forgotten.

First a redo journal is written beside the checkpoint and renamed to its final name: that rename is
the commit. Before it, the checkpoint is untouched; after it, the journal holds all that is needed
to finish, as often as it takes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weightwire.checkpoint.disk import Disk, LocalDisk
from weightwire.checkpoint.file_names import (
    checkpoint_of_journal,
    journal_of_file,
    journal_of_folder,
    partial_of_journal,
    possible_journals,
)
from weightwire.checkpoint.journal_file import JournalReader, JournalWriter, verify_journal
from weightwire.checkpoint.locate import locate
from weightwire.checkpoint.reader import Checkpoint, check_not_interrupted
from weightwire.checkpoint.regular_file import open_regular
from weightwire.checkpoint.replay import replay
from weightwire.durable import sync_folder
from weightwire.errors import MissingTensor, UnsupportedLayout
from weightwire.model import Changes, TensorSpec

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class Recovered:
    """An interrupted apply that has now been finished."""

    journal: Path
    proof: str
    """What ``overwrite_in_place`` was given: the caller's way to know which state this is."""


def overwrite_in_place(
    checkpoint_path: Path,
    changes: Iterable[tuple[str, Changes]],
    *,
    proof: str,
    disk: Disk | None = None,
) -> None:
    """Overwrite single elements of a checkpoint, all or none of them.

    ``changes`` is consumed to its end before the first weight is touched, so it may decode lazily
    against the same checkpoint; what it raises leaves the checkpoint as it was. Other writers of
    the same files wait.

    Raises:
        InterruptedApply: an earlier apply must be finished with ``recover`` first.
        UnsupportedLayout: a shard is a symbolic link, whose target others may share.
        MissingTensor: a change of a tensor the checkpoint does not have.
        MalformedRecord: changes that do not fit their tensor.
        WeightwireError: whatever ``Checkpoint.open`` or ``changes`` raises.
    """
    disk = disk or LocalDisk()
    place = locate(Path(checkpoint_path))
    journal = journal_of_folder(place.folder) if place.folder else journal_of_file(place.path)
    with _locked(place.shards) as targets:
        check_not_interrupted(place.folder, place.shards)
        with Checkpoint.open_unchecked(place) as checkpoint:
            _commit(journal, checkpoint.specs, changes, proof, disk)
            _finish(journal, checkpoint, targets, disk)


def recover(checkpoint_path: Path, *, disk: Disk | None = None) -> tuple[Recovered, ...]:
    """Finish every committed in-place apply to this checkpoint; forget those never committed.

    Harmless to call at any time, and to interrupt: it can be repeated.

    Returns:
        What was finished; empty if nothing was pending.

    Raises:
        HashMismatch: the journal is damaged; the checkpoint must be rebuilt.
        WeightwireError: whatever ``Checkpoint.open`` raises, and the journal contradicting it.
    """
    disk = disk or LocalDisk()
    place = locate(Path(checkpoint_path))
    done = []
    for journal in possible_journals(place.folder, place.shards):
        if journal.exists() or partial_of_journal(journal).exists():
            done += _recover_one(journal, disk)
    return tuple(done)


def _recover_one(journal: Path, disk: Disk) -> list[Recovered]:
    place = locate(checkpoint_of_journal(journal))
    with _locked(place.shards) as targets:
        _forget_partial(journal, disk)
        if not journal.exists():
            return []
        with open_regular(journal, os.O_RDONLY) as descriptor:
            verify_journal(descriptor, str(journal))
            proof = JournalReader(descriptor, str(journal)).proof
        with Checkpoint.open_unchecked(place) as checkpoint:
            _finish(journal, checkpoint, targets, disk)
    return [Recovered(journal, proof)]


def _commit(
    journal: Path,
    specs: Mapping[str, TensorSpec],
    changes: Iterable[tuple[str, Changes]],
    proof: str,
    disk: Disk,
) -> None:
    """Write the journal; its rename is the moment from which the new state is certain."""
    _forget_partial(journal, disk)
    partial = partial_of_journal(journal)
    descriptor = disk.create(partial)
    try:
        _write_journal(JournalWriter(disk, descriptor, proof), specs, changes)
        disk.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            disk.unlink(partial)
        raise
    finally:
        os.close(descriptor)
    disk.rename(partial, journal)
    sync_folder(journal.parent, disk.fsync)


def _write_journal(
    writer: JournalWriter,
    specs: Mapping[str, TensorSpec],
    changes: Iterable[tuple[str, Changes]],
) -> None:
    for name, part in changes:
        if name not in specs:
            raise MissingTensor(f"no tensor {name!r:.200} to change in this checkpoint")
        writer.add(specs[name], part)
    writer.finish()


def _finish(journal: Path, checkpoint: Checkpoint, targets: Mapping[Path, int], disk: Disk) -> None:
    """Replay the journal, then remove it; in this order, or a crash between would lose it."""
    with open_regular(journal, os.O_RDONLY) as descriptor:
        replay(JournalReader(descriptor, str(journal)), checkpoint, targets, disk)
    disk.unlink(journal)
    sync_folder(journal.parent, disk.fsync)


def _forget_partial(journal: Path, disk: Disk) -> None:
    """A journal that was never renamed was never committed: nothing depends on it."""
    partial = partial_of_journal(journal)
    if partial.exists():
        disk.unlink(partial)


@contextmanager
def _locked(shards: Iterable[Path]) -> Iterator[Mapping[Path, int]]:
    """Descriptors to write the shards, locked in one order so that two callers cannot deadlock.

    Without the lock, a recovery could remove the journal under a live apply.
    """
    with ExitStack() as stack:
        targets = {}
        for shard in sorted(shards):
            _refuse_link(shard)
            targets[shard] = stack.enter_context(open_regular(shard, os.O_RDWR | os.O_NOFOLLOW))
            _lock(targets[shard])
        yield targets


def _refuse_link(shard: Path) -> None:
    if shard.is_symlink():
        raise UnsupportedLayout(
            f"{shard}: is a symbolic link; overwriting in place would change {shard.resolve()} for "
            "everyone who uses it; write to a new checkpoint instead"
        )


def _lock(file_descriptor: int) -> None:
    """Wait for other writers; a file system without locks is used without them."""
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
