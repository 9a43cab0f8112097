"""A torch tensor on a device as bits: the twin of ``TensorView`` for memory the host cannot reach.

What it reads for the host is a copy. Stages with kernels for the device ask for ``read_device``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weightwire.kernels.devices import is_reached
from weightwire.model import Bits, Changes, DType, TensorSpec

if TYPE_CHECKING:
    import torch

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class DeviceView:
    """A live tensor on a device, as integers of its own shape and strides; shares its memory."""

    spec: TensorSpec
    tensor: torch.Tensor

    @property
    def storage(self) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
        """Equal for two names exactly when they are the same elements of the same memory."""
        strides = tuple(step * self.tensor.element_size() for step in self.tensor.stride())
        return self.tensor.data_ptr(), tuple(self.tensor.shape), strides, self.spec.dtype.name

    def read_device(self, start: int, stop: int) -> torch.Tensor | None:
        """A flat view of live memory; None where elements do not lie in a row, or have no kernels."""
        if not self.tensor.is_contiguous() or not is_reached(self.tensor):
            return None
        return self.tensor.reshape(-1)[start:stop]

    def read(self, start: int, stop: int) -> Bits:
        """A copy on the host."""
        found = self._elements(start, stop).cpu().numpy()
        bits: Bits = found.view(self.spec.dtype.bits_dtype)
        return bits

    def write(self, start: int, changes: Changes, n_threads: int) -> None:
        """Overwrite elements ``start + positions``; safe to repeat."""
        del n_threads
        self.tensor[self._places(start, changes)] = self._sent(changes.bits)

    def holds(self, start: int, changes: Changes, n_threads: int) -> bool:
        """Whether elements ``start + positions`` have these bits now."""
        del n_threads
        return bool((self.tensor[self._places(start, changes)] == self._sent(changes.bits)).all())

    def overwrite(self, start: int, bits: Bits) -> None:
        """Overwrite a run of elements; safe to repeat."""
        if self.tensor.is_contiguous():
            self.tensor.reshape(-1)[start : start + len(bits)].copy_(self._sent(bits))
            return
        positions: Bits = np.arange(len(bits), dtype=np.uint64)
        self.write(start, Changes(positions, bits), 1)

    def require_writable(self) -> None:
        """A device's memory always is."""

    def _elements(self, start: int, stop: int) -> torch.Tensor:
        if self.tensor.is_contiguous():
            return self.tensor.reshape(-1)[start:stop]
        import torch

        places = torch.arange(start, stop, device=self.tensor.device)
        return self.tensor[torch.unravel_index(places, self.tensor.shape)]

    def _places(self, start: int, changes: Changes) -> tuple[torch.Tensor, ...]:
        import torch

        at = torch.from_numpy(changes.positions.astype(np.int64) + start).to(self.tensor.device)
        return tuple(torch.unravel_index(at, self.tensor.shape))

    def _sent(self, bits: Bits) -> torch.Tensor:
        import torch

        # A copy in any case: torch warns of memory that it must not write to.
        copied = bits.copy()
        signed = copied if bits.itemsize == 1 else copied.view(f"<i{bits.itemsize}")
        return torch.from_numpy(signed).to(self.tensor.device)


def view_on_device(spec: TensorSpec, tensor: Any) -> DeviceView:
    """See a strided tensor on a device as integers, without a copy."""
    return DeviceView(spec, as_integers(tensor.detach(), spec.dtype))


def empty_integers(n_elements: int, dtype: DType, device: torch.device) -> torch.Tensor:
    """Room for bits on a device, as such integers."""
    import torch

    return torch.empty(n_elements, dtype=getattr(torch, _INTEGERS[dtype.n_bytes]), device=device)


def as_integers(tensor: Any, dtype: DType) -> torch.Tensor:
    """A tensor's bits as the integers that torch and the kernels agree on, over the same memory."""
    import torch

    integers: torch.Tensor = tensor.view(getattr(torch, _INTEGERS[dtype.n_bytes]))
    return integers
