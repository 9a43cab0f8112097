"""Wide masters, published narrow: a state that is rounded while it is read, a piece at a time.

Trainers keep fp32 masters, engines serve bf16. Rounding the whole model first would cost a second
copy of it at every publish; rounding each piece as the diff asks for it costs one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightwire.diff.device_views import as_integers
from weightwire.diff.held import as_bits
from weightwire.diff.memory import State, open_state
from weightwire.diff.state import DerivedState, StateReader, device_bits, makes_device_bits
from weightwire.diff.views import as_numpy, as_torch, numpy_type, torch_type
from weightwire.errors import StopError
from weightwire.model import Bits, DType, TensorSpec, dtype_named

if TYPE_CHECKING:
    import torch

_NAMES = {
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp16": "F16",
    "float16": "F16",
    "fp32": "F32",
    "float32": "F32",
}


@dataclass(frozen=True)
class Cast(DerivedState):
    """Another state, with its wide floats rounded to one type."""

    source: State
    """What is read and rounded; writes to it are watched for."""
    dtype: DType
    only: Callable[[str], bool]

    def reader(self) -> CastReader:
        """The source as it is now."""
        state = open_state(self.source)
        return self.over(state, getattr(state, "torch_names", frozenset()))

    def over(self, state: StateReader, torch_names: frozenset[str]) -> CastReader:
        """Any state, rounded the same way: the source, or a part of it."""
        specs = {name: self.spec(spec) for name, spec in state.specs.items()}
        return CastReader(state, specs, state.ties, torch_names)

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """What becomes of a tensor of the source."""
        is_wide = spec.dtype.ordered and spec.dtype.n_bytes >= self.dtype.n_bytes
        return replace(spec, dtype=self.dtype) if is_wide and self.only(spec.name) else spec


@dataclass(frozen=True)
class CastReader:
    """Bits of another state, rounded on the way.

    Implements ``StateReader``, ``DeviceReader`` and ``DeviceMaker``. What is on a device is rounded
    there, for the host too: devices differ in what becomes of a NaN, and a state has one set of bits.
    """

    state: StateReader
    specs: Mapping[str, TensorSpec]
    ties: Mapping[str, str]
    torch_names: frozenset[str]
    """Tensors that torch rounds; NumPy does the others."""

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A piece of the source, rounded; a tensor that needs none is given as it is."""
        if not self._is_rounded(name):
            return self.state.read(name, start, stop)
        on_device = self.read_device(name, start, stop)
        if on_device is not None:
            return as_bits(on_device)
        bits = self.state.read(name, start, stop)
        old, new = self.state.specs[name].dtype, self.specs[name].dtype
        return round_bits(bits, old, new, by_torch=name in self.torch_names)

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The same on the source's device, by the current stream, if the source is on one."""
        bits = device_bits(self.state, name, start, stop)
        if bits is None or not self._is_rounded(name):
            return bits
        old, new = self.state.specs[name].dtype, self.specs[name].dtype
        return as_integers(bits.view(torch_type(old)).to(torch_type(new)), new)

    def makes_device_bits(self, name: str) -> bool:
        """Whether the tensor is rounded, or made by the source."""
        return self._is_rounded(name) or makes_device_bits(self.state, name)

    def _is_rounded(self, name: str) -> bool:
        return self.state.specs[name].dtype != self.specs[name].dtype


def cast(state: State, dtype: Any, *, only: Callable[[str], bool] = lambda _: True) -> Cast:
    """The state with its floats rounded to ``dtype`` (``bf16``, ``fp16``, ``fp32``) as it is read.

    For a trainer with fp32 masters: ``Publisher(store, cast(model, "bf16"))``. Every publish reads
    the live tensors anew. Floats at least as wide as ``dtype`` are rounded to the nearest, ties to
    even: what ``model.to(dtype)`` gives, bit for bit. Narrower floats, integers and booleans are
    passed through, and so are tensors whose name ``only`` refuses.

    Raises:
        StopError: a type that is not one of these.
    """
    name = str(dtype).removeprefix("torch.").lower()
    if name not in _NAMES:
        raise StopError(f"cannot cast to {dtype!r:.80}; choose one of: {', '.join(_NAMES)}")
    return Cast(state, dtype_named(_NAMES[name]), only)


def round_bits(bits: Bits, old: DType, new: DType, *, by_torch: bool) -> Bits:
    """The same numbers in another type, by the library that made them: they differ in NaNs."""
    if by_torch:
        # Into NumPy's memory: torch's own allocator keeps what another thread frees.
        rounded: Bits = np.empty(len(bits), new.bits_dtype)
        as_torch(rounded, new).copy_(as_torch(bits, old))
        return rounded
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is the right answer
        return as_numpy(bits, old).astype(numpy_type(new)).view(new.bits_dtype)
