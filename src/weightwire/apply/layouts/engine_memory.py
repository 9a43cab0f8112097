"""An engine's memory as flat bits: read, overwritten and read back, on the host or on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from weightwire.apply import device_stream
from weightwire.apply.layouts.regions import Box, Positions, strided
from weightwire.kernels import devices, kernels
from weightwire.model import Bits


@dataclass(frozen=True)
class Writes:
    """Places in one memory and the bits they get; made ready before the engine pauses."""

    places: Any
    bits: Any


class EngineMemory(Protocol):
    """One storage of the engine. Reads and writes are in elements from the storage's start."""

    is_host: bool

    def read(self, box: Box) -> Bits:
        """The box's bits, shaped as its axes; a view where it can be."""

    def overwrite(self, box: Box, bits: Bits) -> None:
        """Put bits, shaped as the box's axes."""

    def ready(self, places: Positions, bits: Bits) -> Writes:
        """Bring single writes to where the memory is."""

    def holds(self, writes: Writes, n_threads: int) -> bool:
        """Whether single elements are what was written."""


class HostMemory:
    """Implements ``EngineMemory`` for storage on the CPU."""

    is_host = True

    def __init__(self, flat: Bits) -> None:
        self.flat = flat

    def read(self, box: Box) -> Bits:
        """A view of live memory."""
        return strided(self.flat, box.place, box.shape, [axis.place for axis in box.axes])

    def overwrite(self, box: Box, bits: Bits) -> None:
        """Put bits, shaped as the box's axes."""
        self.read(box)[...] = bits

    def ready(self, places: Positions, bits: Bits) -> Writes:
        """Short positions where they fit: half the memory, and faster."""
        wide = np.uint32 if len(self.flat) <= 1 << 32 else np.uint64
        return Writes(places.astype(wide), bits)

    def holds(self, writes: Writes, n_threads: int) -> bool:
        """Read single elements back."""
        return kernels().matches(self.flat, writes.places, writes.bits, n_threads)


class DeviceMemory:
    """Implements ``EngineMemory`` for storage that only its device can reach."""

    is_host = False

    def __init__(self, flat: Any) -> None:
        """``flat``: the storage as a one-dimensional torch tensor of signed integers."""
        self.flat = flat
        self.device = flat.device

    @property
    def is_reached(self) -> bool:
        """Whether kernels work on it: what it is given then is written by one launch for all."""
        return devices.is_reached(self.flat)

    def view(self, box: Box) -> Any:
        """The box as a tensor of its own shape, sharing live memory."""
        return self.flat.as_strided(box.shape, [axis.place for axis in box.axes], box.place)

    def read(self, box: Box) -> Bits:
        """A copy on the host."""
        found = self.view(box).cpu().numpy()
        bits: Bits = found.view(f"<u{found.itemsize}")
        return bits

    def overwrite(self, box: Box, bits: Bits) -> None:
        """Put bits, shaped as the box's axes."""
        self.view(box).copy_(self._integers(bits))

    def ready(self, places: Positions, bits: Bits) -> Writes:
        """On the device already when the engine pauses."""
        import torch

        # torch's own indexing takes long numbers only.
        is_short = self.is_reached and len(self.flat) <= 1 << 31
        at = torch.from_numpy(places.astype(np.int32 if is_short else np.int64))
        return Writes(at.to(self.device), self._integers(bits).to(self.device))

    def write(self, writes: Writes) -> None:
        """Overwrite single elements of memory that no kernel reaches."""
        self.flat.index_put_((writes.places,), writes.bits)

    def holds(self, writes: Writes, n_threads: int) -> bool:
        """Read single elements back, of memory that no kernel reaches."""
        del n_threads
        return bool((self.flat[writes.places] == writes.bits).all())

    @staticmethod
    def _integers(bits: Bits) -> Any:
        import torch

        # A copy in any case: torch warns of memory that it must not write to. And an array: what a
        # table gives for a box without axes is a number.
        copied = np.array(bits)
        return torch.from_numpy(copied if bits.itemsize == 1 else copied.view(f"<i{bits.itemsize}"))


def write_all(pairs: Iterable[tuple[EngineMemory, Writes]], n_threads: int) -> None:
    """Overwrite single elements of many memories; safe to repeat."""
    on_host = []
    for memory, writes in pairs:
        if isinstance(memory, HostMemory):
            on_host.append((memory.flat, writes.places, writes.bits))
        elif isinstance(memory, DeviceMemory):
            memory.write(writes)
    kernels().scatter_all(on_host, n_threads)


def settle(memories: Iterable[EngineMemory]) -> None:
    """Wait until devices have done what they were told: an engine may use streams of its own."""
    device_stream.settle({each.device for each in memories if isinstance(each, DeviceMemory)})


def memory_of(tensor: Any) -> EngineMemory:
    """The whole storage behind a torch tensor, in elements of the tensor's size."""
    flat = storage_integers(tensor)
    if tensor.device.type != "cpu" or tensor.device.type in devices.TYPES:
        return DeviceMemory(flat)
    return HostMemory(flat.numpy().view(f"<u{tensor.element_size()}"))


def storage_integers(tensor: Any) -> Any:
    """The whole storage behind a torch tensor, flat, as integers of its elements' size."""
    import torch

    size = tensor.element_size()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=integers, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // size,), (1,))
