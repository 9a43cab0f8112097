"""What a state is to the rest of Weightwire: named tensors, read as bits, a piece at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from weightwire.errors import StopError
from weightwire.model import Bits, TensorSpec

if TYPE_CHECKING:
    import torch


class StateReader(Protocol):
    """A state that can be read in bounded memory: live tensors or files on disk.

    The diff asks for ``specs`` once, pairs the names of two states, and then calls ``read`` with
    rising ranges of one tensor after another. A reader may return a view of live memory or a
    buffer of its own; the caller never writes to it and drops it before the next state changes.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by name, in the state's own order; aliases in ``ties`` are not listed."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Alias name to the listed name whose storage it shares."""

    def read(self, name: str, start: int, stop: int) -> Bits:
        """The bits of elements ``start`` to ``stop`` (flat, row-major) of one tensor."""


@runtime_checkable
class DeviceReader(Protocol):
    """A ``StateReader`` some of whose tensors are on a device, where kernels can work on them."""

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The same bits as ``read``, flat, as signed integers on their device (bytes are unsigned).

        None where the kernels cannot work on them. It may be live memory, or memory made for this
        call; the caller never writes to it. What fills it was submitted to the caller's current
        stream, or is waited for there. Asked for no elements at all, it still tells the device.
        """


@runtime_checkable
class DeviceMaker(Protocol):
    """A ``DeviceReader`` that says which of its bits cost memory: those are asked for a few at a time."""

    def makes_device_bits(self, name: str) -> bool:
        """Whether ``read_device`` fills new memory at every call, instead of showing what is there."""


def device_bits(state: StateReader, name: str, start: int, stop: int) -> torch.Tensor | None:
    """A state's bits on a device, if it has them there."""
    # Asked for every piece of a model: whether it is a DeviceReader would take longer to find out.
    read = getattr(state, "read_device", None)
    found: torch.Tensor | None = read(name, start, stop) if read is not None else None
    return found


def require_device_bits(state: StateReader, name: str, start: int, stop: int) -> torch.Tensor:
    """The same, of a tensor that was on a device a moment ago.

    Raises:
        StopError: it is not there any more.
    """
    bits = device_bits(state, name, start, stop)
    if bits is None:
        raise StopError(f"tensor {name!r} left its device while it was read; keep it where it is")
    return bits


def makes_device_bits(state: StateReader, name: str) -> bool:
    """Whether a state's bits on a device are made whenever they are asked for."""
    makes = getattr(state, "makes_device_bits", None)
    return makes is not None and bool(makes(name))


class DerivedState(ABC):
    """A state that is computed from another one while it is read.

    It is opened anew for every publish, since the tensors of a live module may be replaced; the
    source is what is watched for writes meanwhile. A class and not a Protocol: a module may well
    have children of these names.
    """

    source: Any
    """What it is computed from: anything that can be opened as a state."""

    @abstractmethod
    def reader(self) -> StateReader:
        """The state as it is now."""


@dataclass(frozen=True)
class StateView:
    """Another state's bits, with its own idea of tensors and aliases.

    Implements ``StateReader``, ``DeviceReader`` and ``DeviceMaker``.
    """

    state: StateReader
    specs: Mapping[str, TensorSpec]
    ties: Mapping[str, str]

    def read(self, name: str, start: int, stop: int) -> Bits:
        """The other state's bits."""
        return self.state.read(name, start, stop)

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The other state's bits on their device, if it has them there."""
        return device_bits(self.state, name, start, stop)

    def makes_device_bits(self, name: str) -> bool:
        """Whether the other state makes them."""
        return makes_device_bits(self.state, name)
