"""A state in 8-bit floats: matrices as e4m3 with scales, as fp8 checkpoints on the Hugging Face Hub.

With blocks, ``x.weight`` becomes F8_E4M3 and ``x.weight_scale_inv`` its F32 scales, one for every
block of so many rows and columns: the layout of Hugging Face's ``fp8`` checkpoints. Without, one
``x.weight_scale`` per tensor, as ``compressed-tensors`` has it. Either way a weight is its 8 bits
times its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightwire.diff.device_streams import stream_now
from weightwire.diff.device_views import as_integers, empty_integers
from weightwire.diff.held import as_bits
from weightwire.diff.memory import State, open_state
from weightwire.diff.state import DerivedState, StateReader, device_bits, makes_device_bits
from weightwire.diff.views import as_numpy
from weightwire.errors import DuplicateTensor, StopError
from weightwire.model import Bits, TensorSpec, dtype_named

if TYPE_CHECKING:
    import torch

    from weightwire.diff.device_fp8 import DeviceMatrix

Scales = Literal["power of two", "exact"]

MAX = np.float32(448)
"""The largest e4m3 number."""
_E4M3, _F32 = dtype_named("F8_E4M3"), dtype_named("F32")
_BLOCK_ROWS = 128
"""Rows read at a time where a tensor has one scale."""


def is_matrix(spec: TensorSpec) -> bool:
    """What is quantised by default: weights of linear layers, not embeddings, heads or norms."""
    is_linear = spec.name.endswith("weight") and len(spec.shape) == 2
    return is_linear and not any(part in spec.name for part in ("embed", "lm_head", "norm"))


@dataclass(frozen=True)
class Fp8(DerivedState):
    """Another state, with its matrices quantised as they are read."""

    source: State
    block: int | None
    scales: Scales
    only: Callable[[TensorSpec], bool]

    def reader(self) -> Fp8Reader:
        """The source as it is now.

        Raises:
            DuplicateTensor: the source has a tensor of a scale's name.
        """
        state = open_state(self.source)
        specs: dict[str, TensorSpec] = {}
        matrices: dict[str, str] = {}
        for spec in state.specs.values():
            if not spec.dtype.ordered or not self.only(spec):
                specs[spec.name] = spec
                continue
            scale = self._scale(spec)
            if scale.name in state.specs or scale.name in state.ties:
                raise DuplicateTensor(f"{scale.name!r} is there already: is this fp8 already?")
            specs[spec.name], specs[scale.name] = replace(spec, dtype=_E4M3), scale
            matrices[scale.name] = spec.name
        return Fp8Reader(state, specs, dict(state.ties), matrices, self.block, self.scales)

    def _scale(self, spec: TensorSpec) -> TensorSpec:
        if self.block is None:
            return TensorSpec(f"{spec.name}_scale", _F32, (1,))
        n_rows, n_columns = matrix_shape(spec)
        shape = (-(-n_rows // self.block), -(-n_columns // self.block))
        return TensorSpec(f"{spec.name}_scale_inv", _F32, shape)


@dataclass(frozen=True)
class Fp8Reader:
    """A matrix is read twice, for its scales and for its bits.

    Implements ``StateReader``, ``DeviceReader`` and ``DeviceMaker``. What is on a device is quantised
    there, for the host too: devices differ in what becomes of a NaN, and a state has one set of bits.
    """

    state: StateReader
    specs: Mapping[str, TensorSpec]
    ties: Mapping[str, str]
    matrices: Mapping[str, str]
    """The matrix that each scale belongs to."""
    block: int | None
    scales: Scales
    _known: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    _on_device: dict[tuple[str, Any], torch.Tensor] = field(default_factory=dict)
    """Scales of matrices there, and the stream that made them: another one would not wait for them."""

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Bits of a matrix, of its scales, or of a tensor that is as it was."""
        if not self._is_made(name):
            return self.state.read(name, start, stop)
        on_device = self.read_device(name, start, stop)
        if on_device is not None:
            return as_bits(on_device)
        if name in self.matrices:
            found = self._scales_of(self.matrices[name])
            return found.reshape(-1)[start:stop].view(np.uint32)
        return self._quantised(name, start, stop)

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """The same on the source's device, by the current stream, if the source is on one."""
        if not self._is_made(name):
            return device_bits(self.state, name, start, stop)
        matrix = self._device_matrix(self.matrices.get(name, name))
        return None if matrix is None else self._made_there(matrix, name, start, stop)

    def makes_device_bits(self, name: str) -> bool:
        """Whether the tensor is quantised, or a scale, or made by the source."""
        return self._is_made(name) or makes_device_bits(self.state, name)

    def _is_made(self, name: str) -> bool:
        return name in self.matrices or self.specs[name].dtype != self.state.specs[name].dtype

    def _device_matrix(self, name: str) -> DeviceMatrix | None:
        probe = device_bits(self.state, name, 0, 0)
        if probe is None:
            return None
        from weightwire.diff.device_fp8 import DeviceMatrix

        return DeviceMatrix(self.state, name, probe.device, self.block)

    def _made_there(self, matrix: DeviceMatrix, name: str, start: int, stop: int) -> torch.Tensor:
        dtype = self.specs[name].dtype
        if start == stop:
            return empty_integers(0, dtype, matrix.device)
        scales = self._device_scales(matrix)
        if name in self.matrices:
            return as_integers(scales.reshape(-1)[start:stop], dtype)
        return as_integers(matrix.quantised(start, stop, scales), dtype)

    def _device_scales(self, matrix: DeviceMatrix) -> torch.Tensor:
        key = (matrix.name, stream_now(matrix.device))
        if key not in self._on_device:
            self._on_device[key] = matrix.scales(self.scales)
        return self._on_device[key]

    def _quantised(self, name: str, start: int, stop: int) -> Bits:
        scaled = self._numbers(name, start, stop) / self._spread(name, start, stop)
        scaled = np.clip(scaled, -MAX, MAX)  # beyond it there is only NaN
        bits: Bits = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return bits

    def _spread(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """The scale of each element of a run."""
        scales = self._scales_of(name)
        if self.block is None:
            return scales
        _, n_columns = matrix_shape(self.specs[name])
        first, last = start // n_columns, -(-stop // n_columns)
        rows = scales[np.arange(first, last) // self.block]
        whole: npt.NDArray[np.float32] = rows[:, np.arange(n_columns) // self.block].reshape(-1)
        return whole[start - first * n_columns : stop - first * n_columns]

    def _scales_of(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._known:
            peaks = self._peaks(name)
            self._known[name] = peaks if self.block else peaks.max(initial=0).reshape(1)
            self._known[name] = _scales(self._known[name], self.scales)
        return self._known[name]

    def _peaks(self, name: str) -> npt.NDArray[np.float32]:
        """The largest magnitude of each block, a row of blocks at a time."""
        n_rows, n_columns = matrix_shape(self.specs[name])
        size = self.block or _BLOCK_ROWS
        n_across = -(-n_columns // size)
        rows = []
        for row in range(0, n_rows, size):
            stop = min(row + size, n_rows)
            peaks = np.abs(self._numbers(name, row * n_columns, stop * n_columns))
            columns = peaks.reshape(-1, n_columns).max(axis=0, initial=0)
            padded = np.zeros(n_across * size, np.float32)
            padded[:n_columns] = columns
            rows.append(padded.reshape(n_across, size).max(axis=1, initial=0))
        return np.array(rows, np.float32).reshape(-1, n_across)

    def _numbers(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        bits = self.state.read(name, start, stop)
        return as_numpy(bits, self.state.specs[name].dtype).astype(np.float32)


def fp8(
    state: State,
    *,
    block: int | None = 128,
    scales: Scales = "power of two",
    only: Callable[[TensorSpec], bool] = is_matrix,
) -> Fp8:
    """The state with its matrices in e4m3, quantised as they are read; deterministic.

    A scale that changes rewrites every element below it. Powers of two change only when a block's
    largest weight crosses one, and cost no precision but for the very smallest weights; ``exact``
    scales use the whole range, and change with nearly every step.

    Raises:
        StopError: a block of no size, or scales nobody knows.
    """
    if block is not None and block < 1:
        raise StopError(
            f"blocks of {block} rows; give at least 1, or None for one scale per tensor"
        )
    if scales not in ("power of two", "exact"):
        raise StopError(f"no scales {scales!r:.80}; choose 'power of two' or 'exact'")
    return Fp8(state, block, scales, only)


def _scales(peaks: npt.NDArray[np.float32], kind: Scales) -> npt.NDArray[np.float32]:
    """What peaks are divided by to fit; a block of zeros, or with an infinity or NaN, has scale 1."""
    sound = np.where(np.isfinite(peaks) & (peaks > 0), peaks, MAX)
    scales: npt.NDArray[np.float32] = np.maximum(sound / MAX, np.finfo(np.float32).tiny)
    if kind == "power of two":
        scales = power_of_two_bits(scales.view(np.int32)).view(np.float32)
    return scales


def power_of_two_bits(bits: Any) -> Any:
    """Bits of positive normal fp32 numbers, rounded up to powers of two: an array's, or a tensor's.

    Integers, so that hosts and devices agree: a mantissa that is not zero carries into the exponent.
    """
    return (bits + 0x7FFFFF) & 0x7F800000


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns; leading dimensions count as rows."""
    n_columns = spec.shape[-1] if spec.shape else 1
    return (spec.n_elements // n_columns if n_columns else 0), max(n_columns, 1)
