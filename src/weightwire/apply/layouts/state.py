"""An engine's live memory as the run's checkpoint: the state that patches are decoded against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from weightwire.apply.device_stream import SideStreams
from weightwire.apply.layouts import device_elements
from weightwire.apply.layouts.held_elements import (
    bounded,
    copy_live,
    hull,
    longest_run,
    read_live,
)
from weightwire.apply.layouts.kept_digests import digest_span, kept_digests
from weightwire.apply.layouts.layout import Layout, Part
from weightwire.apply.layouts.mirror import Mirror
from weightwire.apply.layouts.regions import Box, strided
from weightwire.apply.needs import Span, rounded_out, whole
from weightwire.diff.device_views import empty_integers
from weightwire.diff.held import as_tensor
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest
from weightwire.errors import BaseMismatch, MissingTensor
from weightwire.kernels.devices import unless_out_of_memory
from weightwire.model import Bits, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass
class Held:
    """An engine's layout, and what is known of the bits in it."""

    layout: Layout
    ties: Mapping[str, str]
    mirror: Mirror = field(default_factory=Mirror)
    sums: dict[str, TensorDigest] = field(default_factory=dict)
    """Digests of what is kept of tensors that are not kept whole: the others have the version's."""
    keeps_whole: bool = False
    """Whether spans are whole tensors: patches are cut where chunks straddle."""
    on_cut: Callable[[], None] = lambda: None
    """Told when such a patch was seen."""
    _spans: dict[str, Span] = field(default_factory=dict)
    _runs: dict[str, Span] = field(default_factory=dict)
    _devices: dict[str, torch.device | None] = field(default_factory=dict)

    def span(self, spec: TensorSpec) -> Span:
        """The elements that are kept current."""
        if self.layout.specs.get(spec.name) != spec:
            # A tensor that this layout does not know yet, or not like this.
            return whole(spec)
        if spec.name not in self._spans:
            held = hull(self.layout, spec.name)
            is_whole = held and self.keeps_whole
            self._spans[spec.name] = whole(spec) if is_whole else rounded_out(held, spec)
        return self._spans[spec.name]

    def run(self, name: str) -> Span:
        """The elements that are read from the engine's memory, not from the mirror."""
        if name not in self._runs:
            parts, is_beside = self.layout.parts_of(name), self.device_of(name) is not None
            memories = self.layout.memories
            self._runs[name] = longest_run(
                [part for part in parts if is_beside or memories[part.memory].is_host]
            )
        return self._runs[name]

    def device_of(self, name: str) -> torch.device | None:
        """The device that holds all there is of a tensor here, where kernels reach it."""
        if name not in self._devices:
            self._devices[name] = device_elements.device_of(self.layout, name)
        return self._devices[name]

    def mirrored(self, spec: TensorSpec) -> tuple[Span, ...]:
        """The spans that the engine's memory cannot give."""
        return self.span(spec).without(self.run(spec.name))

    def parts_apart(self, name: str) -> list[Part]:
        """Parts that are not what is read: copies, and what is read from the mirror instead."""
        run = self.run(name)
        return [
            part
            for part in self.layout.parts_of(name)
            if part.is_copy or not run.covers(Span(part.box.source, part.box.stop))
        ]


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
        for span, kept in self._held.mirror.within(name, wanted):
            bits[span.start - start : span.stop - start] = kept
        inside = self._held.run(name) & wanted
        if inside:
            room = bits[inside.start - start : inside.stop - start]
            copy_live(self._held.layout, name, inside.start, room)
        return bits

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The same on the device: live memory itself, or what is put together there.

        None where what is held of a tensor is not on one device, and where that has bits that
        nobody published: ``read`` says which.
        """
        device = self._held.device_of(name)
        if device is None:
            return None
        wanted = Span(start, stop)
        run = self._live_run(name, wanted)
        return self._gathered(name, wanted, device) if run is None else run

    def _live_run(self, name: str, wanted: Span) -> torch.Tensor | None:
        """Live memory itself, where that is the one place that these elements are read from."""
        if not self._held.run(name).covers(wanted):
            return None
        return device_elements.live_run(self._held.layout, name, wanted.start, wanted.stop)

    def _gathered(self, name: str, wanted: Span, device: torch.device) -> torch.Tensor | None:
        """Elements on the device, from the engine's memory and from the mirror."""
        start, dtype = wanted.start, self.specs[name].dtype
        found = empty_integers(wanted.stop - start, dtype, device)
        for span, kept in self._held.mirror.within(name, wanted):
            room = found[span.start - start : span.stop - start]
            room.copy_(as_tensor(kept), non_blocking=True)
        inside = self._held.run(name) & wanted
        room = found[inside.start - start : inside.stop - start] if inside else found[:0]
        is_sound = device_elements.gather(self._held.layout, name, inside.start, room)
        return found if is_sound else None

    def makes_device_bits(self, name: str) -> bool:
        """Whether they have to be put together."""
        return self._live_run(name, self._held.span(self.specs[name])) is None

    def span(self, spec: TensorSpec) -> Span:
        """The elements that are kept current."""
        return self._held.span(spec)

    def keep_whole(self) -> None:
        """From the next anchor on, keep whole tensors."""
        self._held.on_cut()

    def prove_all(self, names: Collection[str]) -> None:
        """See that what is kept of tensors is what was proven when it came; of many at once.

        Raises:
            BaseMismatch: it is not.
        """
        sums = self._held.sums
        found = self._kept_digests({*names} & sums.keys() - self._proven)
        for name, digest in found.items():
            if digest != sums[name]:
                raise BaseMismatch(
                    f"tensor {name!r:.200}: what is kept of it has digest {digest}, it had"
                    f" {sums[name]}; nothing was written; start from an anchor"
                )
        self._proven |= found.keys()

    def is_sound(self, name: str, digest: TensorDigest) -> bool:
        """Whether live memory and mirror have what they should of a tensor."""
        if not self._held.layout.parts_of(name):
            return True
        try:
            kept = self._kept_digests([name])[name]
            is_right = kept == self._held.sums.get(name, digest)
            return is_right and all(map(self._is_as_kept, self._held.parts_apart(name)))
        except BaseMismatch:
            return False

    def _kept_digests(self, names: Collection[str]) -> dict[str, TensorDigest]:
        spans = {name: self._held.span(self.specs[name]) for name in names}
        return kept_digests(self, spans, self._streams)

    def _is_as_kept(self, part: Part) -> bool:
        """Whether a part holds the elements that are read for it from elsewhere."""
        layout, device = self._held.layout, self._held.device_of(part.name)
        if device is not None:
            differs = unless_out_of_memory(lambda: self._differs_on(device, part))
            if differs is not None:
                return not differs
        return all(
            np.array_equal(read_live(layout, part, box), read_box(self, part.name, box))
            for box in bounded(part.box)
        )

    def _differs_on(self, device: torch.device, part: Part) -> bool:
        with self._streams.on(device):
            return device_elements.differs(self._held.layout, part, self.read_device)

    def _direct(self, name: str, start: int, stop: int) -> Bits | None:
        """Live memory itself, if it is a run of published bits.

        Only from where all reads take these elements: what else holds them is compared with those.
        """
        if not self._held.run(name).covers(Span(start, stop)):
            return None
        for part in self._held.layout.parts_of(name):
            box, memory = part.box, self._held.layout.memories[part.memory]
            is_plain = part.cast.is_identity and box.is_run and not part.is_copy
            if not (memory.is_host and is_plain):
                continue
            if box.source <= start and stop <= box.stop:
                return memory.read(next(box.within(start, stop), box)).reshape(-1)
        return None


def staged_sums(held: Held, state: StateReader) -> dict[str, TensorDigest]:
    """Digests of what will be kept of tensors that are not kept whole; ``state`` is proven."""
    spans = {name: held.span(spec) for name, spec in state.specs.items()}
    return {
        name: digest_span(state, name, span)
        for name, span in spans.items()
        if span and span != whole(state.specs[name])
    }


def read_box(state: StateReader, name: str, box: Box) -> Bits:
    """A box of a tensor, from any state."""
    bits = state.read(name, box.source, box.stop)
    return strided(bits, 0, box.shape, [axis.source for axis in box.axes])
