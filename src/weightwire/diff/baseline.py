"""The trainer's copy of the last committed state: the diff is always taken against it.

It moves only when a version was committed, so a failed publish costs nothing but time. Views of
it can be frozen: an anchor or a skip patch is made from one while the baseline moves on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightwire.checkpoint import Checkpoint
from weightwire.checkpoint.file_names import SINGLE_NAME
from weightwire.checkpoint.writer import write_state
from weightwire.codec.record import Kind, RecordHead
from weightwire.diff.device_advance import stage_next
from weightwire.diff.device_room import DeviceBaseline, DeviceRoom
from weightwire.diff.device_streams import devices_of, own_streams
from weightwire.diff.frozen import Frozen
from weightwire.diff.held import Held, HeldOnHost
from weightwire.diff.overlay import room_for
from weightwire.diff.redo import RedoLog
from weightwire.diff.state import StateReader, device_bits
from weightwire.durable import typed_disk_errors
from weightwire.errors import NotACheckpoint, RetryError, StopError
from weightwire.model import Bits, Changes, TensorSpec

if TYPE_CHECKING:
    import torch


class Baseline:
    """A state of its own: in memory, on the devices of the state it follows, or mapped from a file.

    Implements ``StateReader``, ``DeviceReader`` and ``DeviceMaker``. The file is a plain safetensors
    checkpoint. A crash can leave it between two versions; whoever opens it again finds out by its
    digest.

    What a state has on a device is kept there while there is room, and otherwise in page-locked
    memory, from where each piece is copied to the device whenever it is read there. Work on devices
    is done on streams of its own, and is over when a method returns.
    """

    def __init__(self, folder: Path | None = None, *, on_device: DeviceBaseline = None) -> None:
        """Begin empty, or with what an earlier process left in ``folder``."""
        self._folder, self._on_device = folder, on_device
        self._specs: dict[str, TensorSpec] = {}
        self._ties: dict[str, str] = {}
        self._held: dict[str, Held] = {}
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
        """A view of the baseline's memory, valid until it moves; a copy of a file's or device's."""
        return self._held[name].read(start, stop)

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The baseline's own memory on a device, or a copy there that the current stream makes."""
        return self._held[name].read_device(start, stop)

    def makes_device_bits(self, name: str) -> bool:
        """Whether it is kept on the host."""
        return isinstance(self._held[name], HeldOnHost)

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
                self._specs, self._held = specs, _mapped(self._folder)
        else:
            self._specs, self._held = specs, self._copies(state, specs)
        self._ties = dict(state.ties)
        with self._lock:
            self._frozen.clear()

    def join(self, state: StateReader) -> None:
        """Go to the devices that a state is on: what was restored, or is new, begins on the host."""
        if self._folder is not None:
            return
        moved = {name: spec for name, spec in self._specs.items() if self._is_away(name, state)}
        if moved:
            self._held = {**self._held, **self._copies(self, moved, beside=state)}

    def advance(
        self, redo: RedoLog, specs: Mapping[str, TensorSpec], ties: Mapping[str, str]
    ) -> None:
        """Become the state that a committed diff led to; safe to repeat."""
        made: dict[str, Bits] = {}
        for head, changes in redo:
            if head.kind is Kind.FULL:
                room_for(made, head)[changes.positions] = changes.bits
            else:
                self._overwrite(head, changes)
        self._write_coded(redo)
        held = {n: HeldOnHost(made[n]) if n in made else self._held[n] for n in specs}
        self._held, self._specs, self._ties = held, dict(specs), dict(ties)
        if self._folder is not None and made:
            self.fill(self)

    def freeze(self) -> Frozen:
        """The state as it is now, readable until the view is closed."""
        frozen = Frozen(self, self._specs, self._ties, self._held)
        with self._lock:
            self._frozen.append(frozen)
        return frozen

    def thaw(self, frozen: Frozen) -> None:
        """Keep nothing more for a view."""
        with self._lock:
            self._frozen = [each for each in self._frozen if each is not frozen]

    def _copies(
        self,
        source: StateReader,
        specs: Mapping[str, TensorSpec],
        beside: StateReader | None = None,
    ) -> dict[str, Held]:
        where = source if beside is None else beside
        room = DeviceRoom(self._on_device, () if beside is None else self._held.values())
        with own_streams(devices_of(where)):
            probes = {name: device_bits(where, name, 0, 0) for name in specs}
            return {
                name: room.hold(source, spec, None if probe is None else probe.device)
                for (name, spec), probe in zip(specs.items(), probes.values(), strict=True)
            }

    def _is_away(self, name: str, state: StateReader) -> bool:
        probe = device_bits(state, name, 0, 0) if name in state.specs else None
        return probe is not None and probe.device != self._held[name].device

    def _overwrite(self, head: RecordHead, changes: Changes) -> None:
        held = self._held[head.spec.name]
        with self._lock:
            if self._frozen:
                self._remember(held, head, held.exchange(head.start, head.stop, changes))
            else:
                held.overwrite(head.start, head.stop, changes)

    def _write_coded(self, redo: RedoLog) -> None:
        with own_streams(devices_of(self) if redo.coded else ()):
            while redo.coded:
                redo.staged = redo.staged or stage_next(redo, self._held)
                with self._lock:
                    if redo.staged is not None:
                        redo.staged.write(self._remember if self._frozen else None)
                redo.written()

    def _remember(self, held: Held, head: RecordHead, undo: Changes) -> None:
        for frozen in self._frozen:
            frozen.remember(held, head, undo)

    def _reopen(self, folder: Path) -> None:
        try:
            with Checkpoint.open(folder) as checkpoint:
                self._specs = dict(checkpoint.specs)
            self._held = _mapped(folder)
        except (NotACheckpoint, RetryError, StopError):
            # Nothing there, or not whole: the state comes from the store instead.
            self._specs, self._held = {}, {}


def _mapped(folder: Path) -> dict[str, Held]:
    """Arrays that are the file's own bytes."""
    with Checkpoint.open(folder) as checkpoint:
        return {
            name: HeldOnHost(_map_tensor(*checkpoint.location(name), spec))
            for name, spec in checkpoint.specs.items()
        }


def _map_tensor(path: Path, offset: int, spec: TensorSpec) -> Bits:
    if spec.n_elements == 0:
        return np.empty(0, spec.dtype.bits_dtype)
    mapped: Bits = np.memmap(path, spec.dtype.bits_dtype, "r+", offset, (spec.n_elements,))
    return mapped
