"""From changes of checkpoint tensors to writes into an engine's memory, before the engine pauses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightwire.apply.device_stream import SideStreams
from weightwire.apply.layouts.device_elements import part_writes
from weightwire.apply.layouts.engine_memory import DeviceMemory, Writes
from weightwire.apply.layouts.held_elements import bounded
from weightwire.apply.layouts.layout import Layout, Part
from weightwire.apply.layouts.regions import Positions
from weightwire.apply.layouts.state import read_box
from weightwire.apply.staging import Staging
from weightwire.diff.spill import Spill
from weightwire.diff.state import StateReader
from weightwire.model import Bits, Changes

if TYPE_CHECKING:
    from weightwire.apply.device_writes import NamedWrite

_GROUP = 1 << 21
"""Elements written by one call: experts are thousands of small tensors in few parameters."""


@dataclass(frozen=True)
class MemoryWrites:
    """Single elements of one memory, with their bits as the engine holds them."""

    memory: int
    parameter: str
    """One that is in this memory, for messages."""
    writes: Writes


class _Group:
    """Writes to one memory that are gathered until they are worth a call."""

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter
        self.places: list[Positions] = []
        self.bits: list[Bits] = []
        self.n = 0

    def add(self, places: Positions, bits: Bits) -> None:
        self.places.append(places)
        self.bits.append(bits)
        self.n += len(places)


def device_writes(layout: Layout, staging: Staging) -> list[NamedWrite]:
    """Where those changes go that are on the device that holds their tensor.

    Changes of runs in the run's own type are written as they are. Others get places, and bits of
    the engine's type, of their own, which take as much memory again.
    """
    found: list[NamedWrite] = []
    streams = SideStreams()
    for each in staging.device_writes():
        with streams.on(each.changes.bits.device):
            found += part_writes(layout, each)
    return found


def memory_writes(
    layout: Layout, staging: Staging, names: Collection[str]
) -> Iterator[MemoryWrites]:
    """Where the staged changes of these tensors go; to every part that holds them.

    Raises:
        DiskTrouble: there is no room for them in the temporary folder.
    """
    spill, groups = Spill(), dict[int, _Group]()
    for part, places, bits in _part_writes(layout, staging, names):
        group = groups.setdefault(part.memory, _Group(part.parameter))
        group.add(places, bits)
        if group.n >= _GROUP:
            yield _ready(layout, part.memory, groups.pop(part.memory), spill)
    for number, group in groups.items():
        yield _ready(layout, number, group, spill)


def split_by_reach(
    layout: Layout, found: Iterable[MemoryWrites]
) -> tuple[list[MemoryWrites], list[NamedWrite]]:
    """Writes that the host or torch does, and those that kernels do in one launch with all others."""
    here: list[MemoryWrites] = []
    sent: list[NamedWrite] = []
    for each in found:
        memory = layout.memories[each.memory]
        if isinstance(memory, DeviceMemory) and memory.is_reached:
            sent.append((each.parameter, (memory.flat, each.writes.places, each.writes.bits)))
        else:
            here.append(each)
    return here, sent


def _part_writes(
    layout: Layout, staging: Staging, names: Collection[str]
) -> Iterator[tuple[Part, Positions, Bits]]:
    for name, start, changes in staging.writes(names):
        positions = changes.positions.astype(np.int64) + start
        for part in layout.parts_of(name):
            places, bits = _placed(part, positions, changes.bits)
            if len(places):
                yield part, places, part.cast.widen(bits)


def _ready(layout: Layout, number: int, group: _Group, spill: Spill) -> MemoryWrites:
    memory = layout.memories[number]
    writes = memory.ready(np.concatenate(group.places), np.concatenate(group.bits))
    if memory.is_host:
        kept = spill.keep(Changes(writes.places, writes.bits))
        writes = Writes(kept.positions, kept.bits)
    return MemoryWrites(number, group.parameter, writes)


def _placed(part: Part, positions: Positions, bits: Bits) -> tuple[Positions, Bits]:
    found, inside, places = part.box.find(positions)
    return places, bits[found] if inside is None else bits[found][inside]


def load_parts(layout: Layout, state: StateReader, name: str) -> None:
    """Write every part of a tensor, in bounded memory; safe to repeat."""
    for part in layout.parts_of(name):
        memory = layout.memories[part.memory]
        for box in bounded(part.box):
            memory.overwrite(box, part.cast.widen(read_box(state, name, box)))


def fill_paddings(layout: Layout) -> None:
    """Write the constants; before the parts, which may overwrite some."""
    import torch

    # Engines make tensors that may only be written to in this mode.
    with torch.inference_mode():
        for padding in layout.paddings:
            padding.view.copy_(padding.value)
