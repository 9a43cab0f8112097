"""An engine that holds weights in its own layout: fused, sharded, stacked, padded, wider.

The layout comes from the engine's own loader, run dry when the first anchor is prepared. From then
on the engine's memory is the state that patches are decoded against, in checkpoint coordinates,
and what changed is scattered to where the engine keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightwire.apply.device_writes import DeviceWrites, prepare_writes
from weightwire.apply.layouts.engine_memory import settle, write_all
from weightwire.apply.layouts.engine_parameters import signature
from weightwire.apply.layouts.layout import Layout
from weightwire.apply.layouts.shares import Share, shares_of
from weightwire.apply.layouts.state import Held, LayoutState, staged_sums
from weightwire.apply.layouts.trace import ListParameters, Load, trace
from weightwire.apply.layouts.writes import (
    MemoryWrites,
    device_writes,
    fill_paddings,
    load_parts,
    memory_writes,
    split_by_reach,
)
from weightwire.apply.needs import Needs
from weightwire.apply.staging import Staging
from weightwire.apply.targets import Ready
from weightwire.codec.piece import thread_count
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest
from weightwire.errors import StopError, TargetMismatch
from weightwire.model import TensorSpec

log = logging.getLogger("weightwire.apply")


@dataclass(frozen=True)
class LayoutReady(Ready):
    """Everything that activation will write to an engine."""

    held: Held = field(kw_only=True)
    """The layout to write by; another one than before where the run's tensors changed."""
    is_whole: bool = field(kw_only=True)
    """Every part is written, not only what changed."""
    writes: tuple[MemoryWrites, ...] = field(default=(), kw_only=True)
    launches: DeviceWrites = field(default_factory=DeviceWrites, kw_only=True)
    """Further writes: those to memory that kernels reach."""
    sums: Mapping[str, TensorDigest] = field(default_factory=dict, kw_only=True)
    """Digests of what is kept afterwards of tensors that are not kept whole."""


class LayoutTarget:
    """Implements ``Target``: live parameters of an engine that has a loader of its own.

    ``load`` is the engine's loader for (name, tensor) pairs of a checkpoint; it is only run dry.
    ``parameters`` lists what it fills, by name, as it is now: parameters, and buffers if it fills
    those too. A mapping does where no tensor is ever replaced.
    """

    def __init__(
        self,
        load: Load,
        parameters: ListParameters | Mapping[str, Any],
        *,
        n_threads: int | None = None,
    ) -> None:
        self._load = load
        self._parameters: ListParameters = (
            parameters.items if isinstance(parameters, Mapping) else parameters
        )
        self._n_threads = thread_count(n_threads)
        self._held: Held | None = None
        self._signature: object = None
        self._traced: tuple[Layout, Mapping[str, str]] | None = None
        self._keeps_whole = False
        self._digests: Mapping[str, TensorDigest] = {}
        self.n_decoded = 0
        """Elements in the chunks that were decoded for what was prepared so far."""

    @property
    def layout(self) -> Layout:
        """Where the engine holds what.

        Raises:
            StopError: nothing was loaded yet.
        """
        return self._require_held().layout

    @property
    def digests(self) -> Mapping[str, TensorDigest]:
        """Of every tensor of the version held, whole: what the shares of all ranks must add up to."""
        return self._digests

    @property
    def n_mirror_bytes(self) -> int:
        """Host memory for elements that the engine's own memory cannot give back."""
        return self._held.mirror.n_bytes if self._held else 0

    def needs(self, specs: Mapping[str, TensorSpec], ties: Mapping[str, str]) -> Needs:
        """What this engine keeps of a run with these tensors.

        Raises:
            UnsupportedLayout: the engine cannot take them; names the parameter.
        """
        return LayoutState(self._anew(specs, ties))

    def open(
        self, names: Iterable[str] | None, ties: Mapping[str, str]
    ) -> AbstractContextManager[StateReader | None]:
        """Live memory as the run's checkpoint; None before the first load, or if memory moved."""
        del names, ties
        if self._held is not None and signature(self._parameters()) != self._signature:
            log.warning("the engine's parameters moved to other memory; loading them anew")
            self._held = self._traced = None
        return nullcontext(LayoutState(self._held) if self._held else None)

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Find every element that will be written, while the engine still serves.

        Raises:
            UnsupportedLayout: the engine cannot take the run's tensors; names the parameter.
        """
        ready = self._prepared(staging, digest, folder)
        self.n_decoded += staging.n_decoded
        return ready

    def _prepared(self, staging: Staging, digest: str, folder: Path | None) -> LayoutReady:
        is_anchor = folder is not None
        held = (self._anew if is_anchor else self._fit)(staging.specs, staging.ties)
        if held is not self._held or staging.fresh:
            sums = staged_sums(held, staging)
            return LayoutReady(staging, digest, folder, held=held, is_whole=True, sums=sums)
        writes, launches = _find_writes(held, staging)
        moved = staging.moved
        sums = {name: sum_ + moved.get(name, TensorDigest()) for name, sum_ in held.sums.items()}
        return LayoutReady(
            staging,
            digest,
            folder,
            held=held,
            is_whole=False,
            writes=writes,
            launches=launches,
            sums=sums,
        )

    def activate(self, ready: Ready) -> None:
        """Overwrite the engine's memory; safe to repeat.

        Raises:
            TargetMismatch: the engine's parameters moved to other memory since.
        """
        mine = _mine(ready)
        self._require_in_place()
        layout = mine.held.layout
        settle(layout.memories)
        if mine.is_whole:
            fill_paddings(layout)
            for name in layout.parts:
                load_parts(layout, mine.staging, name)
        pairs = [(layout.memories[each.memory], each.writes) for each in mine.writes]
        write_all(pairs, self._n_threads)
        mine.launches.write()
        settle(layout.memories)
        self._held = mine.held

    def check(self, ready: Ready) -> None:
        """Read back what was written, and bring the mirror along: the engine serves already.

        Raises:
            TargetMismatch: live memory is not what was written to it; names the parameter.
        """
        mine = _mine(ready)
        self._require_in_place()
        self._update_mirror(mine)
        mine.held.sums = dict(mine.sums)
        self._digests = dict(mine.staging.digests)
        if mine.is_whole:
            _check_whole(mine)
        wrong = mine.launches.first_wrong() or self._first_wrong(mine)
        if wrong is not None:
            raise TargetMismatch(
                f"parameter {wrong!r:.200}: live memory is not what was just written to it"
            )

    def _first_wrong(self, ready: LayoutReady) -> str | None:
        for each in ready.writes:
            memory = ready.held.layout.memories[each.memory]
            if not memory.holds(each.writes, self._n_threads):
                return each.parameter
        return None

    def shares(self) -> tuple[Share, ...]:
        """What this engine holds of every tensor, read from live memory: this rank's share of a proof.

        Raises:
            StopError: nothing was loaded yet.
        """
        return shares_of(self._require_held().layout)

    def _fit(self, specs: Mapping[str, TensorSpec], ties: Mapping[str, str]) -> Held:
        """What is held, if it is of these tensors; else what will be."""
        held = self._held
        is_same = held is not None and _is_of(held.layout, held.ties, specs, ties)
        return held if held is not None and is_same else self._anew(specs, ties)

    def _anew(self, specs: Mapping[str, TensorSpec], ties: Mapping[str, str]) -> Held:
        """What will be held after everything was written; the loader runs dry if it must."""
        traced, is_moved = self._traced, signature(self._parameters()) != self._signature
        if traced is None or is_moved or not _is_of(traced[0], traced[1], specs, ties):
            traced = (trace(self._load, dict(specs), self._parameters, ties), dict(ties))
            self._traced, self._signature = traced, signature(self._parameters())
            _tell(traced[0])
        return Held(*traced, keeps_whole=self._keeps_whole, on_cut=self._keep_whole)

    def _keep_whole(self) -> None:
        self._keeps_whole = True

    def _update_mirror(self, ready: LayoutReady) -> None:
        held, staging = ready.held, ready.staging
        if not ready.is_whole:
            for name, start, changes in staging.writes(held.mirror.names):
                held.mirror.write(name, start, changes, self._n_threads)
            return
        for spec in staging.specs.values():
            device = held.device_of(spec.name)
            held.mirror.load(spec, held.mirrored(spec), staging.read, device)
        held.mirror.keep_only(staging.specs.keys())

    def _require_in_place(self) -> None:
        if signature(self._parameters()) != self._signature:
            raise TargetMismatch(
                "the engine's parameters moved to other memory since this version was prepared;"
                " it must be loaded anew"
            )

    def _require_held(self) -> Held:
        if self._held is None:
            raise StopError("nothing was loaded yet; call update() first")
        return self._held


def _find_writes(held: Held, staging: Staging) -> tuple[tuple[MemoryWrites, ...], DeviceWrites]:
    """Everything that changes: what the host or torch writes, and what kernels do."""
    beside = device_writes(held.layout, staging)
    # What was staged on a device was read there: all that is held of it is there.
    others = {*staging.changed_names} - {write.name for write in staging.device_writes()}
    here, sent = split_by_reach(held.layout, memory_writes(held.layout, staging, others))
    return tuple(here), prepare_writes([*beside, *sent])


def _is_of(
    layout: Layout,
    layout_ties: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    ties: Mapping[str, str],
) -> bool:
    """Whether a layout was made for these tensors and aliases."""
    return layout.specs == specs and layout_ties == ties


def _tell(layout: Layout) -> None:
    n_parts = sum(len(parts) for parts in layout.parts.values())
    log.info("%d tensors of the run are held in %d parts", len(layout.parts), n_parts)
    if layout.untouched:
        names = ", ".join(layout.untouched[:5])
        log.info("left alone: %d parameters (%s)", len(layout.untouched), names[:300])


def _mine(ready: Ready) -> LayoutReady:
    if not isinstance(ready, LayoutReady):
        raise StopError(f"a {type(ready).__name__} of another target; prepare it with this one")
    return ready


def _check_whole(ready: LayoutReady) -> None:
    """Read everything back but paddings, which nobody publishes."""
    state = LayoutState(ready.held)
    for name, digest in ready.staging.digests.items():
        if name in ready.held.layout.specs and not state.is_sound(name, digest):
            parameters = sorted({p.parameter for p in ready.held.layout.parts_of(name)})
            raise TargetMismatch(
                f"tensor {name!r:.200} (in {', '.join(parameters)[:300]}): live memory is not what"
                " was just written to it"
            )
