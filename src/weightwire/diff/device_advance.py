"""Bringing the baseline forward on a device: decode against it, then write, a batch at a time.

Decoding is pure and leaves the new bits in clear; writing them may be repeated. What of a batch is
in clear is at most about four times the changes in it: positions, bits, and what is expected to
change and does not.

A device may have no memory left for that: this runs beside the trainer's next step. The version
exists already, so there is no way back: such a batch is decoded on the host, in the host's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from weightwire.codec.piece import decode_piece
from weightwire.codec.record import RecordHead
from weightwire.diff.device_streams import own_streams
from weightwire.diff.held import Held, HeldOnDevice, as_bits
from weightwire.diff.redo import CodedStep, RedoLog
from weightwire.errors import StopError
from weightwire.kernels.devices import unless_out_of_memory
from weightwire.model import Bits, Changes

if TYPE_CHECKING:
    import torch

    from weightwire.codec.device_pieces import DevicePiece
    from weightwire.kernels.triton.scatter import Scatter, Write

log = logging.getLogger("weightwire.publisher")

ADVANCE_BYTES = 512 << 20
"""Changes of a batch in clear, and pieces of a baseline on the host that are copied for it."""

_LISTED_PER_CHANGE = 4
"""Elements a decoder may list for each change: see ``DeviceChanges``; two is already unusual."""

Remember: TypeAlias = Callable[[Held, RecordHead, Changes], None]
"""Told what is about to be overwritten."""


@dataclass(frozen=True)
class StagedOnDevice:
    """A batch that is ready to be written where the baseline is on the device."""

    numbers: tuple[int, ...]
    targets: tuple[tuple[RecordHead, Held], ...]
    writes: tuple[Write, ...]
    scatter: Scatter

    def write(self, remember: Remember | None) -> None:
        """Safe to repeat: of what is remembered twice, the first counts."""
        from weightwire.kernels.triton.scatter import write

        with own_streams([self.scatter.device]):
            if remember is not None:
                for (head, held), found in zip(self.targets, self._found(), strict=True):
                    remember(held, head, Changes(found.positions, found.old))
            write(self.scatter)

    def _found(self) -> list[_Found]:
        found = unless_out_of_memory(lambda: _differing(self.scatter, self.writes))
        return list(map(_differing_on_host, self.writes)) if found is None else found


@dataclass(frozen=True)
class StagedOnHost:
    """A batch of which the host has the changes: the baseline is there, or it was decoded there."""

    numbers: tuple[int, ...]
    targets: tuple[tuple[RecordHead, Held], ...]
    changes: tuple[Changes, ...]

    def write(self, remember: Remember | None) -> None:
        """The same."""
        for (head, held), changes in zip(self.targets, self.changes, strict=True):
            if remember is None:
                held.overwrite(head.start, head.stop, changes)
            else:
                remember(held, head, held.exchange(head.start, head.stop, changes))


Staged: TypeAlias = StagedOnDevice | StagedOnHost


@dataclass(frozen=True)
class _Found:
    """On the host: where a write changes something, what is there, and what will be."""

    positions: Bits
    old: Bits
    new: Bits


def stage_next(redo: RedoLog, held: Mapping[str, Held]) -> Staged | None:
    """Decode the next batch of what is left; None when nothing is."""
    batch = next(_batches(redo.coded, held), None)
    if batch is None:
        return None
    targets = tuple((step.head, held[step.head.spec.name]) for _, step in batch)
    numbers = tuple(number for number, _ in batch)
    pieces = [step.piece for _, step in batch]
    staged = unless_out_of_memory(lambda: _staged(numbers, targets, pieces))
    if staged is not None:
        return staged
    if not redo.is_short_of_memory:
        log.warning("a GPU has no memory left to bring the baseline forward: the host does it")
        redo.is_short_of_memory = True
    return _staged_by_host(numbers, targets, pieces)


def _staged(
    numbers: tuple[int, ...],
    targets: tuple[tuple[RecordHead, Held], ...],
    pieces: Sequence[DevicePiece],
) -> Staged:
    writes = _decoded(targets, pieces)
    if isinstance(targets[0][1], HeldOnDevice):
        from weightwire.kernels.triton.scatter import prepare_scatter

        return StagedOnDevice(numbers, targets, writes, prepare_scatter(writes))
    from weightwire.kernels.triton.scatter import tabulate_writes

    found = _differing(tabulate_writes(writes), writes)
    changes = tuple(Changes(each.positions, each.new) for each in found)
    return StagedOnHost(numbers, targets, changes)


def _staged_by_host(
    numbers: tuple[int, ...],
    targets: tuple[tuple[RecordHead, Held], ...],
    pieces: Sequence[DevicePiece],
) -> StagedOnHost:
    """The same without memory on a device, a piece at a time."""
    changes = tuple(
        decode_piece(held.read(head.start, head.stop), piece.on_host(), head.spec.dtype)
        for (head, held), piece in zip(targets, pieces, strict=True)
    )
    return StagedOnHost(numbers, targets, changes)


def _batches(
    coded: Mapping[int, CodedStep], held: Mapping[str, Held]
) -> Iterator[list[tuple[int, CodedStep]]]:
    """Pieces that were coded together and lie in the same kind of memory, within the bound."""
    groups: dict[tuple[object, ...], list[tuple[int, CodedStep]]] = {}
    for number, step in coded.items():
        memory = held[step.head.spec.name]
        kind = step.head.spec.dtype.name, memory.device, type(memory), id(step.piece.models)
        groups.setdefault(kind, []).append((number, step))
    for group in groups.values():
        batch: list[tuple[int, CodedStep]] = []
        n_bytes = 0
        for number, step in group:
            needed = _room_for(step, held[step.head.spec.name])
            if batch and n_bytes + needed > ADVANCE_BYTES:
                yield batch
                batch, n_bytes = [], 0
            batch.append((number, step))
            n_bytes += needed
        yield batch


def _room_for(step: CodedStep, held: Held) -> int:
    """Bytes on the device while a piece is brought forward."""
    width = step.head.spec.dtype.n_bytes
    listed = min(_LISTED_PER_CHANGE * step.head.n_changed, 2 * step.head.n_elements)
    copied = 0 if isinstance(held, HeldOnDevice) else step.head.n_elements * width
    return listed * (4 + width) + copied


def _decoded(
    targets: Sequence[tuple[RecordHead, Held]], pieces: Sequence[DevicePiece]
) -> tuple[Write, ...]:
    from weightwire.codec.device_pieces import decode_pieces

    olds = [_old_bits(head, held) for head, held in targets]
    dtype = targets[0][0].spec.dtype
    found = decode_pieces(olds, pieces, dtype)
    return tuple(
        (old, changes.positions, changes.bits) for old, changes in zip(olds, found, strict=True)
    )


def _old_bits(head: RecordHead, held: Held) -> torch.Tensor:
    old = held.read_device(head.start, head.stop)
    if old is None:
        raise StopError(
            f"tensor {head.spec.name!r} was coded on a device, and is not there any more"
        )
    return old


def _differing(scatter: Scatter, writes: Sequence[Write]) -> list[_Found]:
    """What writes change, without what they only repeat; waits for the device a few times in all."""
    import torch

    from weightwire.kernels.triton.scatter import read

    positions, new = (torch.cat([write[part] for write in writes]) for part in (1, 2))
    old = torch.cat(read(scatter))
    places = (old != new).nonzero().view(-1)
    ends = np.cumsum([len(write[1]) for write in writes])
    borders = torch.searchsorted(places, torch.from_numpy(ends).to(places.device)).tolist()
    on_host = [as_bits(each[places]) for each in (positions, old, new)]
    return [_Found(*(each[a:b] for each in on_host)) for a, b in pairwise([0, *borders])]


def _differing_on_host(write: Write) -> _Found:
    """The same of one write, in the host's memory."""
    memory, positions, new = map(as_bits, write)
    old = memory[positions]
    places = np.flatnonzero(old != new)
    return _Found(positions[places], old[places], new[places])
