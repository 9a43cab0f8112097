"""The baseline as it was: an anchor or a skip patch is made from it while the baseline moves on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightwire.codec.record import RecordHead
from weightwire.diff.held import Held
from weightwire.diff.overlay import first_of, overlay
from weightwire.diff.spill import Spill
from weightwire.errors import DiskTrouble, StateMoved
from weightwire.model import Bits, Changes, TensorSpec

if TYPE_CHECKING:
    from weightwire.diff.baseline import Baseline

_MAX_UNDOS = 8
"""Entries per piece before they are made one."""

_UNDO_BYTES = 64 << 20
"""What a frozen view keeps in memory; the rest is in a temporary file."""

_MAX_UNDO_SHARE = 4
"""The file's cap, in sizes of the state: where so much changes, patches are as large as anchors."""


class Frozen:
    """Implements ``StateReader``: the baseline as it was, for other threads; a context manager."""

    def __init__(
        self,
        baseline: Baseline,
        specs: Mapping[str, TensorSpec],
        ties: Mapping[str, str],
        held: Mapping[str, Held],
    ) -> None:
        self._baseline = baseline
        self._specs, self._ties, self._held = specs, ties, held
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
            bits = self._held[name].copy(start, stop)
            undos = [
                (at, list(entries))
                for (each, at), (end, entries) in self._undo.items()
                if each == name and at < stop and start < end
            ]
        for at, entries in undos:
            for entry in reversed(entries):
                overlay(bits, start, at, entry)
        return bits

    def remember(self, held: Held, head: RecordHead, undo: Changes) -> None:
        """Keep the bits that were just overwritten, if they are this view's."""
        if self._held.get(head.spec.name) is not held:
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
