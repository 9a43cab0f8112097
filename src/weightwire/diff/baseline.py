"""The trainer's copy of the last committed state: the diff is always taken against it.

It moves only when a version was committed, so a failed publish costs nothing but time. Views of
it can be frozen: an anchor or a skip patch is made from one while the baseline moves on.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from weightwire.checkpoint import Checkpoint
from weightwire.checkpoint.file_names import SINGLE_NAME
from weightwire.checkpoint.writer import write_state
from weightwire.codec.piece import thread_count
from weightwire.codec.record import Kind, RecordHead
from weightwire.diff.overlay import first_of, overlay, room_for
from weightwire.diff.spill import Spill
from weightwire.diff.state import StateReader
from weightwire.digest import piece_ranges
from weightwire.durable import typed_disk_errors
from weightwire.errors import DiskTrouble, NotACheckpoint, RetryError, StateMoved, StopError
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes, TensorSpec

_MAX_UNDOS = 8
"""Entries per piece before they are made one."""

_UNDO_BYTES = 64 << 20
"""What a frozen view keeps in memory; the rest is in a temporary file."""

_MAX_UNDO_SHARE = 4
"""The file's cap, in sizes of the state: where so much changes, patches are as large as anchors."""


class Baseline:
    """Implements ``StateReader`` over arrays of its own: in memory, or mapped from a file.

    The file is a plain safetensors checkpoint. A crash can leave it between two versions; whoever
    opens it again finds out by its digest.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin empty, or with what an earlier process left in ``folder``."""
        self._folder = folder
        self._specs: dict[str, TensorSpec] = {}
        self._ties: dict[str, str] = {}
        self._arrays: dict[str, Bits] = {}
        self._frozen: list[Frozen] = []
        self._lock = threading.RLock()
        if folder is not None:
            self._reopen(folder)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """Names that share another tensor's storage."""
        return self._ties

    @property
    def n_bytes(self) -> int:
        """Size of the state."""
        return sum(spec.n_bytes for spec in self._specs.values())

    @property
    def n_undo_bytes(self) -> int:
        """What frozen views keep beside the state, in memory."""
        return sum(frozen.n_bytes for frozen in self._frozen)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A view of the baseline's own memory, valid until it moves; a copy where it is a file."""
        return _read(self._arrays[name], start, stop)

    def fill(self, state: StateReader) -> None:
        """Copy a whole state into new memory; frozen views keep the old.

        Raises:
            DiskTrouble: there is no room for the file; the baseline is as it was.
        """
        specs = dict(state.specs)
        if self._folder is not None:
            with typed_disk_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_state(self._folder / SINGLE_NAME, specs, state.read)
                self._specs, self._arrays = specs, _mapped(self._folder)
        else:
            arrays = {name: _copy(state, spec) for name, spec in specs.items()}
            self._specs, self._arrays = specs, arrays
        self._ties = dict(state.ties)
        with self._lock:
            self._frozen.clear()

    def advance(
        self,
        redo: Iterable[tuple[RecordHead, Changes]],
        specs: Mapping[str, TensorSpec],
        ties: Mapping[str, str],
    ) -> None:
        """Become the state that a committed diff led to; safe to repeat."""
        made: dict[str, Bits] = {}
        for head, changes in redo:
            if head.kind is Kind.FULL:
                room_for(made, head)[changes.positions] = changes.bits
            else:
                self._overwrite(head, changes)
                _let_go(self._arrays[head.spec.name])
        arrays = {name: made[name] if name in made else self._arrays[name] for name in specs}
        self._arrays, self._specs, self._ties = arrays, dict(specs), dict(ties)
        if self._folder is not None and made:
            self.fill(self)

    def freeze(self) -> Frozen:
        """The state as it is now, readable until the view is closed."""
        frozen = Frozen(self, self._specs, self._ties, self._arrays)
        with self._lock:
            self._frozen.append(frozen)
        return frozen

    def thaw(self, frozen: Frozen) -> None:
        """Keep nothing more for a view."""
        with self._lock:
            self._frozen = [each for each in self._frozen if each is not frozen]

    def _overwrite(self, head: RecordHead, changes: Changes) -> None:
        array = self._arrays[head.spec.name]
        piece = array[head.start : head.stop]
        with self._lock:
            if not self._frozen:
                kernels().scatter(piece, changes.positions, changes.bits, thread_count())
                return
            before = kernels().exchange(piece, changes.positions, changes.bits, thread_count())
            for frozen in self._frozen:
                frozen.remember(array, head, Changes(changes.positions, before))

    def _reopen(self, folder: Path) -> None:
        try:
            with Checkpoint.open(folder) as checkpoint:
                self._specs = dict(checkpoint.specs)
            self._arrays = _mapped(folder)
        except (NotACheckpoint, RetryError, StopError):
            # Nothing there, or not whole: the state comes from the store instead.
            self._specs, self._arrays = {}, {}


class Frozen:
    """Implements ``StateReader``: the baseline as it was, for other threads; a context manager."""

    def __init__(
        self,
        baseline: Baseline,
        specs: Mapping[str, TensorSpec],
        ties: Mapping[str, str],
        arrays: Mapping[str, Bits],
    ) -> None:
        self._baseline = baseline
        self._specs, self._ties, self._arrays = specs, ties, arrays
        self._undo: dict[tuple[str, int], tuple[int, list[Changes]]] = {}
        self._spill = Spill(_UNDO_BYTES)
        self._in_memory: set[int] = set()
        self._max_file_bytes = _MAX_UNDO_SHARE * baseline.n_bytes
        self._is_given_up = False
        self._lock = baseline._lock

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """Names that share another tensor's storage."""
        return self._ties

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A copy of the bits as they were.

        Raises:
            StateMoved: too much changed since for this view to be kept.
        """
        if self._is_given_up:
            raise StateMoved("too much has changed since this version: its bits were not kept")
        with self._lock:
            bits: Bits = self._arrays[name][start:stop].copy()
            _let_go(self._arrays[name])
            undos = [
                (at, list(entries))
                for (each, at), (end, entries) in self._undo.items()
                if each == name and at < stop and start < end
            ]
        for at, entries in undos:
            for entry in reversed(entries):
                overlay(bits, start, at, entry)
        return bits

    def remember(self, array: Bits, head: RecordHead, undo: Changes) -> None:
        """Keep the bits that were just overwritten, if they are this view's."""
        if self._arrays.get(head.spec.name) is not array:
            return
        try:
            self._add(head, undo)
        except DiskTrouble:
            self._give_up()
        if self._spill.n_file_bytes > self._max_file_bytes:
            self._give_up()

    def _add(self, head: RecordHead, undo: Changes) -> None:
        _, entries = self._undo.setdefault((head.spec.name, head.start), (head.stop, []))
        entries.append(self._keep(undo))
        if len(entries) > _MAX_UNDOS:
            merged = first_of(entries)
            for entry in entries:
                self._release(entry)
            entries[:] = [self._keep(merged)]

    def _give_up(self) -> None:
        self._is_given_up = True
        self.close()

    def _keep(self, undo: Changes) -> Changes:
        kept = self._spill.keep(undo)
        if kept is undo:
            self._in_memory.add(id(kept))
        return kept

    def _release(self, entry: Changes) -> None:
        if id(entry) in self._in_memory:
            self._in_memory.remove(id(entry))
            self._spill.release(entry)

    @property
    def n_bytes(self) -> int:
        """What is kept in memory to undo later changes."""
        return self._spill.n_bytes

    def close(self) -> None:
        """Let the baseline forget this view."""
        self._baseline.thaw(self)
        self._undo.clear()
        self._in_memory.clear()
        self._spill = Spill(_UNDO_BYTES)

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(state: StateReader, spec: TensorSpec) -> Bits:
    bits: Bits = np.empty(spec.n_elements, spec.dtype.bits_dtype)
    for start, stop in piece_ranges(spec):
        bits[start:stop] = state.read(spec.name, start, stop)
    return bits


def _mapped(folder: Path) -> dict[str, Bits]:
    """Arrays that are the file's own bytes."""
    with Checkpoint.open(folder) as checkpoint:
        return {
            name: _map_tensor(*checkpoint.location(name), spec)
            for name, spec in checkpoint.specs.items()
        }


def _map_tensor(path: Path, offset: int, spec: TensorSpec) -> Bits:
    if spec.n_elements == 0:
        return np.empty(0, spec.dtype.bits_dtype)
    mapped: Bits = np.memmap(path, spec.dtype.bits_dtype, "r+", offset, (spec.n_elements,))
    return mapped


def _read(array: Bits, start: int, stop: int) -> Bits:
    if not isinstance(array, np.memmap):
        return array[start:stop]
    bits: Bits = np.array(array[start:stop])
    _let_go(array)
    return bits


def _let_go(array: Bits) -> None:
    """Pages of a mapped file that were touched count as ours until they are given back.

    What was written stays in the system's cache of the file.
    """
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
