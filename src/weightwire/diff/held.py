"""A tensor of the baseline: on the host, on the host beside a device that works on it, or there."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from weightwire.codec.piece import thread_count
from weightwire.diff.device_streams import own_streams
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class HeldOnHost:
    """In memory, or mapped from a file."""

    array: Bits
    device: torch.device | None = None
    """Where its pieces are copied to be worked on, if anywhere."""

    def read(self, start: int, stop: int) -> Bits:
        """A view, valid until the baseline moves; a copy where it is a file."""
        if not isinstance(self.array, np.memmap):
            return self.array[start:stop]
        return self.copy(start, stop)

    def copy(self, start: int, stop: int) -> Bits:
        """The bits in memory of their own."""
        bits: Bits = np.array(self.array[start:stop])
        self.let_go()
        return bits

    def read_device(self, start: int, stop: int) -> torch.Tensor | None:
        """A copy on its device, under way on the current stream."""
        if self.device is None:
            return None
        import torch

        source = as_tensor(self.array)[start:stop]
        piece = torch.empty(len(source), dtype=source.dtype, device=self.device)
        return piece.copy_(source, non_blocking=True)

    def overwrite(self, start: int, stop: int, changes: Changes) -> None:
        """Write changes of a piece; safe to repeat."""
        piece = self.array[start:stop]
        kernels().scatter(piece, changes.positions, changes.bits, thread_count())
        self.let_go()

    def exchange(self, start: int, stop: int, changes: Changes) -> Changes:
        """The same, and what would undo it."""
        piece = self.array[start:stop]
        before = kernels().exchange(piece, changes.positions, changes.bits, thread_count())
        self.let_go()
        return Changes(changes.positions, before)

    def let_go(self) -> None:
        """Pages of a mapped file that were touched count as ours until they are given back.

        What was written stays in the system's cache of the file.
        """
        mapped = getattr(self.array, "_mmap", None)
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False)
class HeldOnDevice:
    """On a device, flat, as integers. Whoever writes to it waits until it is done."""

    tensor: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.tensor.device

    def read(self, start: int, stop: int) -> Bits:
        """A copy on the host."""
        with own_streams([self.device], "read"):
            return as_bits(self.tensor[start:stop])

    def copy(self, start: int, stop: int) -> Bits:
        """The same, also where a device is the host."""
        return np.array(self.read(start, stop))

    def read_device(self, start: int, stop: int) -> torch.Tensor | None:
        """The baseline's own memory."""
        return self.tensor[start:stop]

    def overwrite(self, start: int, stop: int, changes: Changes) -> None:
        """Write changes that were found on the host; safe to repeat."""
        self._rewrite(start, stop, changes)

    def exchange(self, start: int, stop: int, changes: Changes) -> Changes:
        """The same, and what would undo it."""
        return Changes(changes.positions, self._rewrite(start, stop, changes))

    def _rewrite(self, start: int, stop: int, changes: Changes) -> Bits:
        """Through the host, what was there included: a device may have no memory left for changes."""
        bits = self.copy(start, stop)
        before = kernels().exchange(bits, changes.positions, changes.bits, thread_count())
        with own_streams([self.device]):
            self.tensor[start:stop].copy_(as_tensor(bits))
        return before


Held: TypeAlias = HeldOnHost | HeldOnDevice


def as_tensor(array: Bits) -> torch.Tensor:
    """Bits as torch's integers of the same width, over the same memory."""
    import torch

    return torch.from_numpy(array if array.itemsize == 1 else array.view(f"<i{array.itemsize}"))


def as_bits(tensor: torch.Tensor) -> Bits:
    """Integers as bits on the host: a copy, or the same memory where they are there."""
    found = tensor.cpu().numpy()
    bits: Bits = found.view(f"<u{found.itemsize}")
    return bits
