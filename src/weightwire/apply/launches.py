"""Changes on a device and the live tensors they go to: found while the engine serves, then launched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightwire.apply.device_staging import DeviceWrite
from weightwire.apply.device_writes import DeviceWrites, prepare_writes
from weightwire.diff.memory import MemoryState, State, tensors_of
from weightwire.diff.views import is_torch
from weightwire.errors import TargetMismatch

if TYPE_CHECKING:
    from weightwire.apply.device_writes import NamedWrite

Copies = Mapping[str, tuple[str, ...]]
"""By tensor, the names that are written like it."""


@dataclass(frozen=True)
class Launches:
    """Everything that is written to tensors by the device they are on."""

    writes: tuple[DeviceWrite, ...]
    copies: Copies
    prepared: DeviceWrites
    addresses: Mapping[str, tuple[Any, ...]]
    """Where the tensors were when it was prepared."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors, without their copies."""
        return frozenset(write.name for write in self.writes)

    def now(self, state: State, view: Callable[[], MemoryState]) -> DeviceWrites:
        """What was prepared; prepared anew if tensors were replaced since.

        Raises:
            TargetMismatch: one is where the device cannot write it.
        """
        if _addresses(state, self.addresses) == self.addresses:
            return self.prepared
        return prepare_writes(_placed(view(), self.copies, self.writes))


def find_launches(
    state: State, memory: MemoryState, copies: Copies, staged: Iterable[DeviceWrite]
) -> Launches:
    """Prepare those of the staged writes whose tensors, and all copies of them, can be launched at."""
    writes = tuple(each for each in staged if _is_reached(memory, copies, each))
    prepared = prepare_writes(_placed(memory, copies, writes))
    names = [name for each in writes for name in with_copies(copies, each.name)]
    return Launches(writes, copies, prepared, _addresses(state, names))


def with_copies(copies: Copies, name: str) -> tuple[str, ...]:
    """A tensor and the names that are written like it."""
    return (name, *copies.get(name, ()))


def _is_reached(memory: MemoryState, copies: Copies, write: DeviceWrite) -> bool:
    found = [memory.read_device(name, 0, 0) for name in with_copies(copies, write.name)]
    device = write.changes.bits.device
    return all(flat is not None and flat.device == device for flat in found)


def _placed(
    memory: MemoryState, copies: Copies, writes: Iterable[DeviceWrite]
) -> Iterator[NamedWrite]:
    for write in writes:
        if not _is_reached(memory, copies, write):
            raise TargetMismatch(
                f"tensor {write.name!r:.200} moved to other memory since this version was prepared;"
                " it must be loaded anew"
            )
        for name in with_copies(copies, write.name):
            flat: Any = memory.read_device(name, write.start, write.stop)
            yield name, (flat, write.changes.positions, write.changes.bits)


def _addresses(state: State, names: Collection[str]) -> dict[str, tuple[Any, ...]]:
    """Equal exactly as long as these tensors are the same memory, seen the same way."""
    live = dict(tensors_of(state)) if names else {}
    return {name: _address(live.get(name)) for name in names}


def _address(tensor: Any) -> tuple[Any, ...]:
    if not is_torch(tensor):
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
