"""The elements an engine holds on a device, in checkpoint coordinates, without leaving it.

The twin of ``held_elements`` for memory that kernels reach: bits, digests, and where changes go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weightwire.apply.device_staging import DeviceWrite
from weightwire.apply.device_stream import SideStreams
from weightwire.apply.layouts.device_casts import is_on_device, narrow, widen
from weightwire.apply.layouts.engine_memory import DeviceMemory
from weightwire.apply.layouts.held_elements import bounded, digest_part, read_live
from weightwire.apply.layouts.layout import Layout, Part
from weightwire.apply.layouts.regions import Box
from weightwire.diff.device_digest import digests_of
from weightwire.digest import TensorDigest

if TYPE_CHECKING:
    import torch

    from weightwire.apply.device_writes import NamedWrite
    from weightwire.kernels.triton.scatter import Write

_MAX_NARROW = 1 << 31
"""Places in memory of up to so many elements are kept as 32-bit numbers."""


def device_of(layout: Layout, name: str) -> torch.device | None:
    """The device that holds all that there is of a tensor here, where kernels reach it."""
    reached = [reached_memory(layout, part) for part in layout.parts_of(name)]
    devices = {memory.device if memory else None for memory in reached}
    return devices.pop() if len(devices) == 1 else None


def reached_memory(layout: Layout, part: Part) -> DeviceMemory | None:
    """A part's memory, if kernels reach it and its cast."""
    memory = layout.memories[part.memory]
    if isinstance(memory, DeviceMemory) and memory.is_reached and is_on_device(part.cast):
        return memory
    return None


def live_run(layout: Layout, name: str, start: int, stop: int) -> torch.Tensor | None:
    """Elements of a tensor as they lie in an engine's memory, if that is how they were published."""
    for part in layout.parts_of(name):
        memory, box = reached_memory(layout, part), part.box
        is_inside = box.source <= start and stop <= box.stop and not part.is_copy
        if memory is not None and part.cast.is_identity and box.is_run and is_inside:
            first = box.place + start - box.source
            return memory.flat[first : first + stop - start]
    return None


def gather(layout: Layout, name: str, start: int, into: torch.Tensor) -> bool:
    """Copy all elements the engine holds to ``into``, which begins at ``start`` of the tensor.

    False if some bits were never published.
    """
    for part in layout.parts_of(name):
        for box in () if part.is_copy else part.box.within(start, start + len(into)):
            bits = read_box(layout, part, box)
            if bits is None:
                return False
            _strided(into, box, box.source - start).copy_(bits)
    return True


def differs(
    layout: Layout, part: Part, read: Callable[[str, int, int], torch.Tensor | None]
) -> bool:
    """Whether a part holds other bits than ``read`` gives for its elements; waits once."""
    import torch

    memory = reached_memory(layout, part)
    if memory is None:
        return True
    is_other = torch.zeros((), dtype=torch.bool, device=memory.device)
    for box in bounded(part.box):
        held, kept = read_box(layout, part, box), read(part.name, box.source, box.stop)
        if held is None or kept is None:
            return True
        is_other |= (held != _strided(kept, box, 0)).any()
    return bool(is_other)


def _strided(flat: torch.Tensor, box: Box, first: int) -> torch.Tensor:
    """A box's elements in a stretch of the tensor that has it from ``first`` on."""
    return flat.as_strided(
        box.shape, [axis.source for axis in box.axes], flat.storage_offset() + first
    )


def read_box(layout: Layout, part: Part, box: Box) -> torch.Tensor | None:
    """A box's published bits, shaped as its axes; None if some were never published."""
    memory = reached_memory(layout, part)
    return None if memory is None else narrow(part.cast, memory.view(box))


def digest_live(layout: Layout, part: Part, streams: SideStreams) -> TensorDigest:
    """Digest of a part's live elements by their places in the tensor, on its device where it can be.

    Raises:
        BaseMismatch: memory holds bits that nobody published.
    """
    memory, found = reached_memory(layout, part), None
    if memory is not None:
        with streams.on(memory.device):
            found = _digest_part(layout, part)
    if found is not None:
        return found
    return digest_part(part, lambda p, box: read_live(layout, p, box))


def _digest_part(layout: Layout, part: Part) -> TensorDigest | None:
    """None if some bits were never published: the host says which."""
    memory, box = reached_memory(layout, part), part.box
    if memory is None:
        return None
    if part.cast.is_identity and box.is_run:
        return _digest_run(memory.flat[box.place : box.place + box.n_elements], box.source)
    total = TensorDigest()
    for each in bounded(box):
        bits = read_box(layout, part, each)
        if bits is None:
            return None
        total += _digest_box(each, bits.reshape(-1))
    return total


def _digest_run(bits: torch.Tensor, first: int) -> TensorDigest:
    from weightwire.kernels.triton.digest import digest_all

    return digests_of(digest_all([bits], [first]))[0]


def _digest_box(box: Box, bits: torch.Tensor) -> TensorDigest:
    if box.n_elements == box.stop - box.source:
        return _digest_run(bits, box.source)
    import torch

    from weightwire.kernels.triton.digest import digest_at_all

    places = torch.zeros(1, dtype=torch.int64, device=bits.device)
    for axis in box.axes:
        steps = torch.arange(axis.n, device=bits.device) * axis.source
        places = (places[:, None] + steps).reshape(-1)
    return digests_of(digest_at_all([(places, bits)], [box.source]))[0]


def part_writes(layout: Layout, staged: DeviceWrite) -> Iterator[NamedWrite]:
    """Where changes of a tensor that ``device_of`` finds go: to every part that holds some."""
    for part in layout.parts_of(staged.name):
        memory = reached_memory(layout, part)
        if memory is not None and staged.start < part.box.stop and part.box.source < staged.stop:
            yield part.parameter, _placed(part, memory.flat, staged)


def _placed(part: Part, flat: torch.Tensor, staged: DeviceWrite) -> Write:
    box, changes = part.box, staged.changes
    is_covered = box.source <= staged.start and staged.stop <= box.stop
    if box.is_run and is_covered:
        # Positions count from the piece's start, wherever the memory has it: they stay as they are.
        first = box.place + staged.start - box.source
        room = flat[first : first + staged.stop - staged.start]
        return room, changes.positions, widen(part.cast, changes.bits)
    positions, bits = changes.positions.long() + (staged.start - box.source), changes.bits
    if not is_covered or box.n_elements != box.stop - box.source:
        chosen = _are_inside(box, positions)
        positions, bits = positions[chosen], bits[chosen]
    return flat, _short(_places(box, positions), flat), widen(part.cast, bits)


def _are_inside(box: Box, positions: torch.Tensor) -> torch.Tensor:
    """Which positions, counted from the box's first element, are among its elements."""
    inside, rest = positions >= 0, positions
    for axis in box.axes:
        inside = inside & (rest // axis.source < axis.n)
        rest = rest % axis.source
    return inside & (rest == 0)


def _places(box: Box, positions: torch.Tensor) -> torch.Tensor:
    """Where elements of the box, counted from its first one, lie in the engine's memory."""
    import torch

    places, rest = torch.full_like(positions, box.place), positions
    for axis in box.axes:
        places += rest // axis.source * axis.place
        rest = rest % axis.source
    return places


def _short(places: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return places.int() if len(flat) <= _MAX_NARROW else places
