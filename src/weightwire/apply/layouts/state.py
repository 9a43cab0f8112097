"""An engine's live memory as the run's checkpoint: the state that patches are decoded against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from weightwire.apply.device_stream import SideStreams
from weightwire.apply.layouts import device_elements
from weightwire.apply.layouts.held_elements import (
    copy_live,
    digest_part,
    hull,
    live_run,
)
from weightwire.apply.layouts.layout import Layout
from weightwire.apply.layouts.mirror import Mirror
from weightwire.apply.layouts.regions import AT_ONCE, Box, strided
from weightwire.apply.needs import Span, rounded_out, whole
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_bits, digest_tensor
from weightwire.errors import BaseMismatch, MissingTensor
from weightwire.model import Bits, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sums:
    """What is held of a tensor must add up to this; moved with every change."""

    live: TensorDigest
    """Over every part, copies too."""
    kept: TensorDigest
    """Over the span that is kept."""


@dataclass
class Held:
    """An engine's layout, and what is known of the bits in it."""

    layout: Layout
    ties: Mapping[str, str]
    mirror: Mirror = field(default_factory=Mirror)
    sums: dict[str, Sums] = field(default_factory=dict)
    """Of tensors that are not held whole and once: the others have the version's digest."""
    keeps_whole: bool = False
    """Whether spans are whole tensors: patches are cut where chunks straddle."""
    on_cut: Callable[[], None] = lambda: None
    """Told when such a patch was seen."""
    _runs: dict[str, Span] = field(default_factory=dict)
    _devices: dict[str, torch.device | None] = field(default_factory=dict)

    def span(self, spec: TensorSpec) -> Span:
        """The elements that are kept current."""
        if self.layout.specs.get(spec.name) != spec:
            # A tensor that this layout does not know yet, or not like this.
            return whole(spec)
        held = hull(self.layout, spec.name)
        if held and self.keeps_whole:
            return whole(spec)
        return rounded_out(held, spec)

    def run(self, name: str) -> Span:
        """The elements that are read from the engine's memory, not from the mirror."""
        if name not in self._runs:
            is_beside = self.device_of(name) is not None
            spec = self.layout.specs[name]
            self._runs[name] = whole(spec) if is_beside else live_run(self.layout, name)
        return self._runs[name]

    def device_of(self, name: str) -> torch.device | None:
        """The device that holds all of a tensor, where kernels reach it."""
        if name not in self._devices:
            self._devices[name] = device_elements.device_of(self.layout, name)
        return self._devices[name]

    def mirrored(self, spec: TensorSpec) -> tuple[Span, ...]:
        """The spans that the engine's memory cannot give."""
        return self.span(spec).without(self.run(spec.name))

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is held whole and once, so that its digest is the version's."""
        has_copies = any(part.is_copy for part in self.layout.parts_of(name))
        return self.layout.is_whole(name) and not has_copies and not self._is_mirrored(name)

    def _is_mirrored(self, name: str) -> bool:
        return bool(self.mirrored(self.layout.specs[name]))


class LayoutState:
    """An engine's live memory in checkpoint coordinates.

    Implements ``StateReader``, ``DeviceReader``, ``DeviceMaker``, ``Needs`` and ``SelfProving``.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._streams = SideStreams()
        self._proven: set[str] = set()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The run's tensors, also those this engine has little or nothing of."""
        return self._held.layout.specs

    @property
    def ties(self) -> Mapping[str, str]:
        """The run's aliases."""
        return self._held.ties

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Published bits: a view of live memory where it holds them as they are, else a copy.

        Raises:
            MissingTensor: elements that are not kept here.
            BaseMismatch: live memory holds bits that nobody published.
        """
        spec, wanted = self.specs[name], Span(start, stop)
        if not self._held.span(spec).covers(wanted):
            raise MissingTensor(
                f"tensor {name!r:.200}: elements {start} to {stop} are not all kept here"
            )
        direct = self._direct(name, start, stop) if wanted else None
        if direct is not None:
            return direct
        bits: Bits = np.empty(stop - start, spec.dtype.bits_dtype)
        self._held.mirror.fill(name, start, bits)
        inside = self._held.run(name) & wanted
        if inside:
            copy_live(
                self._held.layout,
                name,
                inside.start,
                bits[inside.start - start : inside.stop - start],
            )
        return bits

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The same on the device: live memory itself, or what is put together from it there.

        None where a tensor is not held whole by one device, and where that has bits that nobody
        published: ``read`` says which.
        """
        if self._held.device_of(name) is None:
            return None
        run = device_elements.live_run(self._held.layout, name, start, stop)
        return device_elements.gather(self._held.layout, name, start, stop) if run is None else run

    def makes_device_bits(self, name: str) -> bool:
        """Whether they have to be put together."""
        n_elements = self.specs[name].n_elements
        return device_elements.live_run(self._held.layout, name, 0, n_elements) is None

    def span(self, spec: TensorSpec) -> Span:
        """The elements that are kept current."""
        return self._held.span(spec)

    def keep_whole(self) -> None:
        """From the next anchor on, keep whole tensors."""
        self._held.on_cut()

    def prove(self, name: str) -> None:
        """See that what is kept of a tensor is what was proven when it came.

        Raises:
            BaseMismatch: it is not.
        """
        sums = self._held.sums.get(name)
        if sums is None or name in self._proven:
            return
        found = self.digest_kept(name)
        if found != sums.kept:
            raise BaseMismatch(
                f"tensor {name!r:.200}: what is kept of it has digest {found}, it had {sums.kept};"
                " nothing was written; start from an anchor"
            )
        self._proven.add(name)

    def is_sound(self, name: str, digest: TensorDigest) -> bool:
        """Whether live memory and mirror have what they should of a tensor."""
        try:
            live, sums = self.digest_live(name), self._held.sums.get(name)
            if sums is None:
                return not self._held.layout.parts_of(name) or live == digest
            return live == sums.live and self.digest_kept(name) == sums.kept
        except BaseMismatch:
            return False

    def digest_live(self, name: str) -> TensorDigest:
        """Digest of every part of a tensor, from live memory."""
        total = TensorDigest()
        for part in self._held.layout.parts_of(name):
            total += device_elements.digest_live(self._held.layout, part, self._streams)
        return total

    def digest_kept(self, name: str) -> TensorDigest:
        """Digest of the kept span of a tensor."""
        device = self._held.device_of(name)
        if device is not None:
            with self._streams.on(device):
                return digest_tensor(self, name)
        return digest_span(self, name, self._held.span(self.specs[name]))

    def _direct(self, name: str, start: int, stop: int) -> Bits | None:
        """Live memory itself, if it is a run of published bits."""
        for part in self._held.layout.parts_of(name):
            box, memory = part.box, self._held.layout.memories[part.memory]
            if not (memory.is_host and part.cast.is_identity and box.is_run):
                continue
            if box.source <= start and stop <= box.stop:
                return memory.read(next(box.within(start, stop), box)).reshape(-1)
        return None


def digest_span(state: StateReader, name: str, span: Span) -> TensorDigest:
    """Digest of a run of elements, read in pieces."""
    total = TensorDigest()
    for start in range(span.start, span.stop, AT_ONCE):
        stop = min(start + AT_ONCE, span.stop)
        total += digest_bits(state.read(name, start, stop), start)
    return total


def staged_sums(held: Held, state: StateReader, spec: TensorSpec) -> Sums:
    """The sums of a tensor whose proven bits ``state`` gives."""
    live = TensorDigest()
    for part in held.layout.parts_of(spec.name):
        live += digest_part(part, lambda p, box: read_box(state, p.name, box))
    return Sums(live, digest_span(state, spec.name, held.span(spec)))


def read_box(state: StateReader, name: str, box: Box) -> Bits:
    """A box of a tensor, from any state."""
    bits = state.read(name, box.source, box.stop)
    return strided(bits, 0, box.shape, [axis.source for axis in box.axes])
