"""Patches decoded beside the weights, on the device that holds them; what changes stays there.

Records are gathered into batches and decoded, proven and kept without leaving the device. Of a
chain, a later patch is decoded against a copy with the earlier changes laid over. Then the earlier
ones are told the bits that their places have now: a place may be listed by several patches, always
with the same bits, so that all of them can be written at once, in any order, any number of times.

Beside the model this takes 4 bytes and an element for each change: 3 % of a 2-byte model at 1 %
changed. While a batch is decoded it takes that batch's coded bytes and lists, and in a chain, or
where an engine's layout is not the checkpoint's, up to two copies of the batch's elements.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from weightwire.apply.device_proof import on_host, parts_on_device, proven_on_device
from weightwire.apply.device_stream import SideStreams
from weightwire.apply.needs import Span
from weightwire.apply.partial import Chunks
from weightwire.codec.record import Kind, Record
from weightwire.diff.state import StateReader, device_bits, makes_device_bits
from weightwire.digest import TensorDigest
from weightwire.kernels.devices import is_out_of_memory
from weightwire.model import Changes, DType

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges
    from weightwire.kernels.triton.scatter import Scatter, Write

log = logging.getLogger("weightwire.apply")

BATCH_BYTES = 8 << 30
"""Bytes of the model that are decoded at once: a batch takes as long as its longest chunk at least."""

COPIED_SHARE = 1 / 40
"""Of the model's bytes, how much of a batch may be bits that are copied first, not read where they lie."""

COPIED_BYTES = 512 << 20
"""The most that it may be."""

MIN_COPIED_BYTES = 64 << 20
"""And what it may always be: every batch takes as long as its longest chunk."""

HELD_SHARE = 1 / 8
"""Of the model's bytes, how much changes may take on the device: beyond that the host keeps them."""

HELD_BYTES = 64 << 20
"""What they may always take."""

_NO_SHARE = "changes would take more than their share of the device's memory"
NO_MEMORY = "the device has no memory left"

_Kind: TypeAlias = "tuple[DType, Kind, torch.device, bool, bool]"


@dataclass(frozen=True)
class DeviceWrite:
    """What is written to elements ``start`` to ``stop`` of a tensor; each place once."""

    name: str
    dtype: DType
    start: int
    stop: int
    changes: DeviceChanges

    @property
    def n_bytes(self) -> int:
        """What keeping it costs."""
        return len(self.changes.positions) * (4 + self.dtype.n_bytes)

    def to_host(self) -> Changes:
        """A copy for stages that work there."""
        positions = self.changes.positions.to("cpu", copy=True).numpy().view("<u4")
        return Changes(positions, on_host(self.changes.bits, self.dtype))


@dataclass(frozen=True)
class Waiting:
    """A record, or some chunks of it, and the live bits that they are for."""

    record: Record
    chunks: Chunks | None
    """None for all of it."""
    live: torch.Tensor

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.record.head.spec.name

    @property
    def span(self) -> Span:
        """The elements that are decoded."""
        head = self.record.head
        return self.chunks.span if self.chunks else Span(head.start, head.stop)

    @property
    def n_expected_bytes(self) -> int:
        """What its changes will take; of some chunks, about their share."""
        head = self.record.head
        share = len(self.live) / max(head.n_elements, 1)
        return int(head.n_changed * share) * (4 + head.spec.dtype.n_bytes)


@dataclass(frozen=True)
class _Earlier:
    """What an earlier patch changed in a piece that a later one changes again."""

    write: Write
    bits: torch.Tensor
    """All that the earlier patch lists; ``chosen`` of it lie in the piece."""
    chosen: torch.Tensor | None

    def tell(self, found: torch.Tensor) -> None:
        """Take over the bits that its places have now; needs no memory."""
        if self.chosen is None:
            self.bits.copy_(found)
        else:
            self.bits.index_copy_(0, self.chosen, found)


class DeviceStaging:
    """Gathers records whose old bits are on a device, and keeps what they change there."""

    def __init__(self, live: StateReader) -> None:
        self._live = live
        self._streams = SideStreams()
        self._waiting: list[Waiting] = []
        self._waiting_names: set[str] = set()
        self._n_waiting_bytes = self._n_copied_bytes = 0
        self._held: dict[str, list[DeviceWrite]] = {}
        self.n_bytes = 0
        """What is kept on the device."""
        self.moved: dict[str, TensorDigest] = {}
        """By how much the digests of tensors moved of which some chunks were decoded here."""
        self.n_changed_in_parts = self.n_decoded_in_parts = 0
        """Changes in such chunks, and elements."""
        self._is_closed = False
        n_model = sum(spec.n_bytes for spec in live.specs.values())
        self._max_bytes = max(HELD_BYTES, int(n_model * HELD_SHARE))
        self._max_copied = min(max(int(n_model * COPIED_SHARE), MIN_COPIED_BYTES), COPIED_BYTES)

    @property
    def is_full(self) -> bool:
        """Whether what waits is a whole batch."""
        return self._n_waiting_bytes >= BATCH_BYTES or self._n_copied_bytes >= self._max_copied

    @property
    def names(self) -> Collection[str]:
        """The tensors of which something is kept here."""
        return self._held.keys()

    def __iter__(self) -> Iterator[DeviceWrite]:
        """Everything that is kept; where several list one place, they agree on its bits."""
        for writes in self._held.values():
            yield from writes

    def has(self, name: str) -> bool:
        """Whether something of a tensor is kept here, or waits to be decoded."""
        return name in self._held or name in self._waiting_names

    @property
    def waiting_parts(self) -> Collection[str]:
        """Tensors of which only some chunks wait: their records do not prove what is live."""
        return {each.name for each in self._waiting if each.chunks is not None}

    def takes(self, record: Record, chunks: Chunks | None = None) -> bool:
        """Keep a record, or some of it, for the next batch; False where the host must decode it."""
        head, name = record.head, record.head.spec.name
        if self._is_closed or not head.n_elements:
            return False
        span = chunks.span if chunks else Span(head.start, head.stop)
        live = self._live_bits(name, span)
        if live is not None:
            self._waiting.append(Waiting(record, chunks, live))
            self._waiting_names.add(name)
            self._n_waiting_bytes += live.nbytes
            if name in self._held or makes_device_bits(self._live, name):
                self._n_copied_bytes += live.nbytes
        return live is not None

    def decode(self) -> list[Waiting]:
        """Decode and prove what waits; gives what the device has no room for.

        Where there are such, nothing more is taken here: the caller goes on with the host.

        Raises:
            BaseMismatch: live bits are not what the patch was made for.
            TargetMismatch, CorruptStream, MalformedRecord: the patch is not what it says.
        """
        batches: dict[_Kind, list[Waiting]] = {}
        for each in self._waiting:
            batches.setdefault(self._kind(each), []).append(each)
        self._waiting, self._waiting_names = [], set()
        self._n_waiting_bytes = self._n_copied_bytes = 0
        return [each for batch in batches.values() for each in self._left_of(batch)]

    def wait(self) -> None:
        """Wait until all that is kept is there, for whatever stream writes it."""
        self._streams.wait()

    def on_host(self, name: str) -> Iterator[tuple[int, Changes]]:
        """First elements and changes within, in the order of patches."""
        for write in self._held.get(name, ()):
            with self._streams.on(write.changes.bits.device):
                changes = write.to_host()
            yield write.start, changes

    def drop(self, names: Iterable[str]) -> None:
        """Forget what is kept of some tensors."""
        for name in names:
            self.n_bytes -= sum(write.n_bytes for write in self._held.pop(name, ()))

    def _live_bits(self, name: str, span: Span) -> torch.Tensor | None:
        """What a record is for, as it is on its device; put together there where it must be."""
        first = device_bits(self._live, name, span.start, span.start)
        if first is None:
            return None
        try:
            if not makes_device_bits(self._live, name):  # it is there: nothing is submitted
                return device_bits(self._live, name, span.start, span.stop)
            with self._streams.on(first.device):
                return device_bits(self._live, name, span.start, span.stop)
        except RuntimeError as error:
            self._close_if_full(error)
            return None

    def _kind(self, waiting: Waiting) -> _Kind:
        head, is_part = waiting.record.head, waiting.chunks is not None
        is_changed = any(True for _ in self._overlapping(waiting))
        return head.spec.dtype, head.kind, waiting.live.device, is_changed, is_part

    def _overlapping(self, waiting: Waiting) -> Iterator[DeviceWrite]:
        for write in self._held.get(waiting.name, ()):
            if write.start < waiting.span.stop and waiting.span.start < write.stop:
                yield write

    def _left_of(self, batch: list[Waiting]) -> Sequence[Waiting]:
        n_expected = sum(each.n_expected_bytes for each in batch)
        if self._is_closed or self.n_bytes + n_expected > self._max_bytes:
            self.close(_NO_SHARE)
            return batch
        try:
            with self._streams.on(batch[0].live.device):
                self._decode_batch(batch)
        except RuntimeError as error:
            self._close_if_full(error)
            return batch
        return ()

    def close(self, why: str) -> None:
        """Take nothing more."""
        if not self._is_closed:
            log.warning("%s: this update is staged on the host", why)
        self._is_closed = True

    def _close_if_full(self, error: RuntimeError) -> None:
        """Go on elsewhere where memory ran out; raise what is anything else."""
        if not is_out_of_memory(error):
            raise error
        self.close(NO_MEMORY)

    def _decode_batch(self, batch: list[Waiting]) -> None:
        """Everything that may fail comes before the first change of what is kept."""
        from weightwire.kernels.triton.scatter import prepare_scatter, read, write

        if not any(True for _ in self._overlapping(batch[0])):
            self._keep(batch, _proven(batch, [each.live for each in batch]))
            return
        olds = [each.live.clone() for each in batch]
        earlier = [
            _within(held, each.span.start, old)
            for each, old in zip(batch, olds, strict=True)
            for held in self._overlapping(each)
        ]
        before = prepare_scatter([each.write for each in earlier])
        write(before)
        proven = _proven(batch, olds)
        write(proven.writes)
        for each, found in zip(earlier, read(before), strict=True):
            each.tell(found)
        self._keep(batch, proven)

    def _keep(self, batch: list[Waiting], proven: _Proven) -> None:
        for each, found in zip(batch, proven.changes, strict=True):
            dtype, span = each.record.head.spec.dtype, each.span
            kept = DeviceWrite(each.name, dtype, span.start, span.stop, found)
            self._held.setdefault(each.name, []).append(kept)
            self.n_bytes += kept.n_bytes
        # Records that were decoded whole tell it themselves.
        for each, found, by in zip(batch, proven.changes, proven.moved, strict=False):
            self.moved[each.name] = self.moved.get(each.name, TensorDigest()) + by
            self.n_changed_in_parts += found.n_changed
            self.n_decoded_in_parts += len(each.live)


@dataclass(frozen=True)
class _Proven:
    """What a batch decodes to."""

    changes: list[DeviceChanges]
    writes: Scatter
    """Of the changes, to the bits they were decoded against."""
    moved: list[TensorDigest]
    """By how much those bits' digests move; none where records tell it themselves."""


def _proven(batch: list[Waiting], olds: list[torch.Tensor]) -> _Proven:
    records = [each.record for each in batch]
    parts = [each.chunks for each in batch if each.chunks is not None]
    if parts:
        return _Proven(*parts_on_device(records, parts, olds))
    return _Proven(*proven_on_device(records, olds), [])


def _within(held: DeviceWrite, start: int, piece: torch.Tensor) -> _Earlier:
    """An earlier write, as far as it lies in a piece that begins at ``start``."""
    positions, bits = held.changes.positions, held.changes.bits
    first, last = held.start - start, held.stop - start
    if first >= 0 and last <= len(piece):
        return _Earlier((piece[first:last], positions, bits), bits, None)
    # Pieces are far shorter than 2^31 elements: no position is negative as a signed number.
    places = positions.long() + first
    chosen = ((places >= 0) & (places < len(piece))).nonzero().squeeze(1)
    return _Earlier((piece, places[chosen], bits[chosen]), bits, chosen)
