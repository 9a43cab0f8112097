"""What a subscriber writes to: live tensors of an engine, or a checkpoint folder on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from weightwire.apply.device_stream import settle
from weightwire.apply.files import from_tensor_start
from weightwire.apply.memory import Staged, activate, check_written, devices_of, ready, view_live
from weightwire.apply.staging import Staging
from weightwire.checkpoint import Checkpoint, overwrite_in_place, recover, write_checkpoint
from weightwire.diff.memory import MemoryState, State
from weightwire.diff.state import StateReader, StateView
from weightwire.diff.views import new_like
from weightwire.digest import digest_state, digest_tensor, piece_ranges
from weightwire.durable import typed_disk_errors
from weightwire.errors import (
    RetryError,
    StopError,
    TargetMismatch,
    UnsupportedLayout,
)
from weightwire.kernels.devices import typed_memory_errors, unless_out_of_memory
from weightwire.model import Changes, TensorSpec


@dataclass(frozen=True)
class Ready:
    """Everything that activation will write; made while the engine still serves."""

    staging: Staging
    digest: str
    folder: Path | None
    """The anchor's files, where it started from one: everything is written then."""
    staged: Staged | None = None
    """For tensors in memory."""


class Target(Protocol):
    """Where versions go. ``open`` and ``prepare`` only read; ``activate`` may be repeated."""

    def open(
        self, names: Iterable[str] | None, ties: Mapping[str, str]
    ) -> AbstractContextManager[StateReader | None]:
        """The state as it is now, of these tensors or all; None where there is nothing yet."""

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Check that what was staged can be written here; ``folder`` if it started from an anchor."""

    def activate(self, ready: Ready) -> None:
        """Write; safe to repeat."""

    def check(self, ready: Ready) -> None:
        """Read back what was written, or raise TargetMismatch."""


def prepare(target: Target, staging: Staging, digest: str, folder: Path | None) -> Ready:
    """Prepare a version; what is staged on a device moves to the host if there is no room beside it.

    Raises:
        DeviceFull: there is none even then.
        UnsupportedLayout: the target cannot take the run's tensors.
    """
    ready = unless_out_of_memory(lambda: target.prepare(staging, digest, folder=folder))
    if ready is not None:
        return ready
    staging.leave_devices()
    with typed_memory_errors():
        return target.prepare(staging, digest, folder=folder)


class MemoryTarget:
    """Live tensors: a torch module, or a mapping of names to tensors.

    Names the run does not have are left alone.
    """

    def __init__(self, state: State, n_threads: int | None = None) -> None:
        self._state, self._n_threads = state, n_threads
        self._written: set[str] = set()
        """Names that came from the run: those it drops later go, all others are left alone."""

    def open(
        self, names: Iterable[str] | None, ties: Mapping[str, str]
    ) -> AbstractContextManager[StateReader | None]:
        """Views of live memory."""
        memory = view_live(self._state, ties, names)
        return nullcontext(memory if memory.specs else None)

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Find every tensor that will be written.

        Raises:
            UnsupportedLayout: one cannot be written in place.
        """
        if folder is not None:
            self._check_fits(staging)
            return Ready(staging, digest, folder)
        live = {*staging.live_names}
        # What is new in the run may share storage here with what is not: the latter was staged.
        last = {*staging.ties, *(name for name in staging.specs if name not in live)}
        memory = view_live(self._state, last, live)
        staged = ready(self._state, memory, staging)
        return Ready(staging, digest, None, staged)

    def activate(self, ready: Ready) -> None:
        """Overwrite live memory."""
        if ready.staged is not None:
            activate(self._state, ready.staged, n_threads=self._n_threads)
        else:
            self._load(ready.staging)
        self._written = {*ready.staging.specs, *ready.staging.ties}

    def check(self, ready: Ready) -> None:
        """Read back: what was written, or after an anchor, everything.

        Raises:
            TargetMismatch: live memory is not what was written to it.
        """
        if ready.staged is not None:
            check_written(self._state, ready.staged)
            return
        ties = ready.staging.ties
        memory = view_live(self._state, ties, ready.staging.specs)
        require_digest(_without_copies(memory, ties), ready.digest)
        _check_copies(memory, ties)

    def _check_fits(self, staging: Staging) -> None:
        if isinstance(self._state, MutableMapping):
            return
        memory = view_live(self._state, staging.ties)
        for name, spec in staging.specs.items():
            if name in memory.ties:
                raise UnsupportedLayout(
                    f"this model ties {name!r} to {memory.ties[name]!r}, the run keeps them apart"
                )
            _check_fit(memory.specs.get(name), spec)
            memory.views[name].require_writable()
        for alias, name in staging.ties.items():
            if alias not in memory.ties:
                _check_fit(memory.specs.get(alias), replace(staging.specs[name], name=alias))

    def _load(self, staging: Staging) -> None:
        """Every tensor, from disk; names tied in the run but not here get the same bits."""
        memory = view_live(self._state, staging.ties, [*staging.specs])
        settle(devices_of(memory.views.values()))
        for name, spec in staging.specs.items():
            aliases = [a for a, n in staging.ties.items() if n == name and a in memory.views]
            for each in (name, *aliases):
                self._load_tensor(staging, memory, each, name, spec)
        written = view_live(self._state, staging.ties, [*staging.specs])
        settle(devices_of(written.views.values()))
        if isinstance(self._state, MutableMapping):
            self._restructure(self._state, staging, memory)

    def _restructure(
        self, state: MutableMapping[str, Any], staging: Staging, memory: MemoryState
    ) -> None:
        for name in self._written - staging.specs.keys() - staging.ties.keys():
            state.pop(name, None)
        for alias, name in staging.ties.items():
            # Not there, or sharing what another name has, or what this name had until now.
            if alias not in memory.views:
                state[alias] = state[name]

    def _load_tensor(
        self, staging: Staging, memory: MemoryState, name: str, source: str, spec: TensorSpec
    ) -> None:
        view = memory.views.get(name)
        if view is not None and (view.spec.dtype, view.spec.shape) == (spec.dtype, spec.shape):
            for start, stop in piece_ranges(spec):
                view.overwrite(start, staging.read(source, start, stop))
            return
        mapping: MutableMapping[str, Any] = self._state
        neighbour = next(iter(mapping.values()), None)
        mapping[name] = new_like(spec, staging.read(source, 0, spec.n_elements), neighbour)


class FolderTarget:
    """A checkpoint folder that is kept current, in place under a journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(
        self, names: Iterable[str] | None, ties: Mapping[str, str]
    ) -> AbstractContextManager[StateReader | None]:
        """The files; an overwrite that died half way is finished first."""
        del names, ties
        try:
            if self._folder.exists():
                recover(self._folder)
            return Checkpoint.open(self._folder)
        except (RetryError, StopError):
            # Nothing there, or too damaged to be opened: it is written anew.
            return nullcontext(None)

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Nothing can be in the way of new files."""
        return Ready(staging, digest, folder)

    def activate(self, ready: Ready) -> None:
        """Overwrite single elements, or write a new checkpoint and swap it in.

        Raises:
            DiskTrouble: the disk is full or failing.
        """
        with typed_disk_errors(self._folder):
            self._write(ready)

    def check(self, ready: Ready) -> None:
        """Read the whole checkpoint again.

        Raises:
            TargetMismatch: the files are not what was written to them.
            DiskTrouble: they cannot be read.
        """
        with typed_disk_errors(self._folder), Checkpoint.open(self._folder) as checkpoint:
            require_digest(checkpoint, ready.digest)

    def _write(self, ready: Ready) -> None:
        staging = ready.staging
        if ready.folder is not None:
            self._write_anew(Checkpoint.open(ready.folder), staging)
        elif staging.fresh or staging.removes:
            self._write_anew(Checkpoint.open(self._folder), staging)
        else:
            overwrite_in_place(self._folder, _changes(staging), proof=ready.digest)

    def _write_anew(self, form: Checkpoint, staging: Staging) -> None:
        with form:
            write_checkpoint(self._folder, form, staging.specs, staging.read, overwrite=True)


def as_target(
    target: object, n_threads: int | None = None, *, double_buffer: bool = False
) -> Target:
    """A target as it is, a path as a folder, everything else as live tensors."""
    if hasattr(target, "prepare") and hasattr(target, "activate"):
        return target  # type: ignore[return-value]
    if isinstance(target, str | Path):
        return FolderTarget(Path(target))
    if double_buffer:
        from weightwire.apply.swap import SwapTarget

        return SwapTarget(target, n_threads)
    return MemoryTarget(target, n_threads)


def _changes(staging: Staging) -> Iterator[tuple[str, Changes]]:
    for name, start, changes in staging.writes():
        yield name, from_tensor_start(changes, start, staging.specs[name].n_elements)


def _check_fit(found: TensorSpec | None, wanted: TensorSpec) -> None:
    """Refuse a model whose tensor is missing or of another kind.

    Raises:
        UnsupportedLayout: names it.
    """
    if found is None or (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        there = f"{found.dtype.name}{list(found.shape)}" if found else "no such tensor"
        raise UnsupportedLayout(
            f"the run has {wanted.name!r} as {wanted.dtype.name}{list(wanted.shape)},"
            f" this model has {there}"
        )


def _without_copies(memory: MemoryState, ties: Mapping[str, str]) -> StateReader:
    """The state as the sender counts it: tied names once."""
    return StateView(memory, {n: s for n, s in memory.specs.items() if n not in ties}, {})


def _check_copies(memory: MemoryState, ties: Mapping[str, str]) -> None:
    """The digest counts tied names once; where they are copies here, each was written.

    Raises:
        TargetMismatch: one has other bits; names it.
    """
    for alias, name in ties.items():
        if alias in memory.views and digest_tensor(memory, alias) != digest_tensor(memory, name):
            raise TargetMismatch(
                f"tensor {alias!r:.200}: written as a copy of {name!r:.200}, and holds other bits"
            )


def require_digest(state: StateReader, wanted: str) -> None:
    """Read a whole state and refuse it if it is another.

    Raises:
        TargetMismatch: its digest differs.
    """
    found, _ = digest_state(state)
    if found != wanted:
        raise TargetMismatch(f"what was written has digest {found}, it should have {wanted}")
