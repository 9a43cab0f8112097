"""The device's way through a diff: many pieces at a time, coded where they are.

A *window* is a run of pieces in state order. Of those, all that both states have on one device, in
one element type, are coded with one call; a model of hundreds of tensors is a few windows. While
one is coded, the next one's pieces are made ready on a stream beside it: copied from page-locked
memory, or rounded.

Memory at its peak, beside the two states: on the device ``MADE_BYTES`` twice, for what must be
copied or rounded first, and one part in ``BUDGET_PARTS`` of a window for the coder; on the host the
coded bytes of one window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightwire.codec.batch_bytes import model_bytes_of
from weightwire.diff.device_digest import digests_of
from weightwire.diff.device_streams import Filling, Moment
from weightwire.diff.state import (
    StateReader,
    device_bits,
    makes_device_bits,
    require_device_bits,
)
from weightwire.digest import TensorDigest
from weightwire.model import DType, TensorSpec

if TYPE_CHECKING:
    import torch

    from weightwire.codec.device_pieces import DevicePiece

WINDOW_BYTES = 8 << 30
"""Most bytes of a state in a window."""

MADE_BYTES = 1 << 30
"""Most bytes in a window that are made for it: some 20 ms on a bus, enough to hide a call's cost."""

BUDGET_PARTS = 25
"""The coder is given 4 % of a window's bytes; a window with more changes is coded in more passes."""


@dataclass(frozen=True)
class Span:
    """Elements of one target tensor that make one piece, before they are read."""

    spec: TensorSpec
    start: int
    stop: int
    first_index: int
    """Where the piece begins in the whole tensor, of which this may be a part."""
    has_base: bool

    @property
    def n_bytes(self) -> int:
        """Of its elements."""
        return (self.stop - self.start) * self.spec.dtype.n_bytes


@dataclass(frozen=True)
class DeviceCoded:
    """A piece that was coded on a device, with its digests before and after."""

    piece: DevicePiece
    model: bytes
    """Of the piece, as it stands in a record."""
    base: TensorDigest
    target: TensorDigest


@dataclass
class _Group:
    """Spans of a window that are coded together."""

    device: torch.device
    dtype: DType
    spans: list[Span] = field(default_factory=list)
    olds: list[torch.Tensor] = field(default_factory=list)
    news: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Window:
    """A run of spans, and the device of those that have one."""

    spans: list[Span]
    devices: Mapping[str, torch.device]

    def groups(self) -> list[_Group]:
        found: dict[tuple[torch.device, str], _Group] = {}
        for span in self.spans:
            device, dtype = self.devices.get(span.spec.name), span.spec.dtype
            if device is not None:
                group = found.setdefault((device, dtype.name), _Group(device, dtype))
                group.spans.append(span)
        return list(found.values())


class DeviceDiff:
    """Finds the pieces that two states have on the same device, and codes them there."""

    def __init__(
        self, base: StateReader, target: StateReader, codec: str, *, n_threads: int
    ) -> None:
        self._base, self._target = base, target
        self._codec, self._n_threads = codec, n_threads
        self.devices: dict[str, torch.device] = {}
        """Of the tensors that go this way."""

    def look_for(self, names: Iterable[str]) -> None:
        """Find out which of these tensors go this way, and wait until their bits are there."""
        for name in names:
            old, new = (device_bits(side, name, 0, 0) for side in (self._base, self._target))
            if old is not None and new is not None and old.device == new.device:
                self.devices[name] = old.device
        # Other threads, on other streams, may read as well from here on.
        Moment(self.devices.values()).wait()

    def windows(
        self, spans: Iterable[Span]
    ) -> Iterator[tuple[list[Span], dict[tuple[str, int], DeviceCoded]]]:
        """All spans, a window at a time, with what was coded, by name and start."""
        ready: tuple[_Window, list[tuple[_Group, Filling]]] | None = None
        for window in self._cut(spans):
            following = window, [(group, self._fill(group)) for group in window.groups()]
            if ready is not None:
                yield self._coded(*ready)
            ready = following
        if ready is not None:
            yield self._coded(*ready)

    def _cut(self, spans: Iterable[Span]) -> Iterator[_Window]:
        held: list[Span] = []
        n_bytes = n_made = 0
        for span in spans:
            made = self._made_bytes(span)
            if held and (n_bytes + span.n_bytes > WINDOW_BYTES or n_made + made > MADE_BYTES):
                yield _Window(held, self.devices)
                held, n_bytes, n_made = [], 0, 0
            held.append(span)
            n_bytes, n_made = n_bytes + span.n_bytes, n_made + made
        if held:
            yield _Window(held, self.devices)

    def _made_bytes(self, span: Span) -> int:
        name = span.spec.name
        if name not in self.devices:
            return 0
        sides = (self._base, self._target)
        return span.n_bytes * sum(makes_device_bits(side, name) for side in sides)

    def _fill(self, group: _Group) -> Filling:
        filling = Filling(group.device)
        with filling.on_its_stream():
            for span in group.spans:
                name, start, stop = span.spec.name, span.start, span.stop
                group.olds.append(require_device_bits(self._base, name, start, stop))
                group.news.append(require_device_bits(self._target, name, start, stop))
        return filling

    def _coded(
        self, window: _Window, groups: list[tuple[_Group, Filling]]
    ) -> tuple[list[Span], dict[tuple[str, int], DeviceCoded]]:
        found: dict[tuple[str, int], DeviceCoded] = {}
        for group, filling in groups:
            filling.await_here()
            keys = [(span.spec.name, span.start) for span in group.spans]
            found.update(zip(keys, self._code(group), strict=True))
        return window.spans, found

    def _code(self, group: _Group) -> list[DeviceCoded]:
        from weightwire.codec.device_pieces import encode_pieces
        from weightwire.kernels.triton.digest import digest_all
        from weightwire.kernels.triton.downloads import mark

        given = mark(group.device)
        firsts = [span.first_index for span in group.spans]
        digests = digest_all([*group.olds, *group.news], [*firsts, *firsts])
        pieces = encode_pieces(
            group.olds,
            group.news,
            group.dtype,
            self._codec,
            budget_bytes=sum(span.n_bytes for span in group.spans) // BUDGET_PARTS,
            n_threads=self._n_threads,
            given=given,
        )
        # Both passes are through: from here on nothing on the device needs the group's memory.
        found = digests_of(digests)
        bases, targets = found[: len(pieces)], found[len(pieces) :]
        models = model_bytes_of(pieces)
        return [DeviceCoded(*each) for each in zip(pieces, models, bases, targets, strict=True)]
