"""Any tensor as bits: NumPy, torch, DLPack; a view where memory allows, never a guess."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightwire.diff.device_views import DeviceView, view_on_device
from weightwire.errors import UnsupportedDType, UnsupportedLayout
from weightwire.kernels import devices, kernels
from weightwire.model import Bits, Changes, DType, TensorSpec, dtype_named

_NUMPY_NAMES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint16): "U16",
    np.dtype(np.int16): "I16",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int32): "I32",
    np.dtype(np.float32): "F32",
    np.dtype(np.uint64): "U64",
    np.dtype(np.int64): "I64",
    np.dtype(np.float64): "F64",
    np.dtype(np.complex64): "C64",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "F8_E4M3FNUZ",
    np.dtype(ml_dtypes.float8_e5m2fnuz): "F8_E5M2FNUZ",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in _NUMPY_NAMES.items()}
_TORCH_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_TORCH_TYPES = {name: torch_name for torch_name, name in _TORCH_NAMES.items()}


@dataclass(frozen=True)
class TensorView:
    """A live tensor as unsigned integers of its own shape and strides; shares its memory."""

    spec: TensorSpec
    array: npt.NDArray[np.unsignedinteger]

    @property
    def storage(self) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
        """Equal for two names exactly when they are the same elements of the same memory."""
        pointer = self.array.__array_interface__["data"][0]
        return pointer, self.array.shape, self.array.strides, self.spec.dtype.name

    def read(self, start: int, stop: int) -> Bits:
        """Elements in row-major order: a view if they lie so in memory, else a copy."""
        if self.array.flags.c_contiguous:
            return self.array.reshape(-1)[start:stop]
        places = np.unravel_index(np.arange(start, stop), self.array.shape)
        copied: Bits = self.array[places]
        return copied

    def write(self, start: int, changes: Changes, n_threads: int) -> None:
        """Overwrite elements ``start + positions``; safe to repeat.

        Raises:
            UnsupportedLayout: the memory is read-only.
        """
        self.require_writable()
        if self.array.flags.c_contiguous and self.array.flags.aligned:
            flat = self.array.reshape(-1)[start:]
            kernels().scatter(flat, changes.positions, changes.bits, n_threads)
            return
        places = np.unravel_index(changes.positions.astype(np.int64) + start, self.array.shape)
        self.array[places] = changes.bits

    def holds(self, start: int, changes: Changes, n_threads: int) -> bool:
        """Whether elements ``start + positions`` have these bits now."""
        if self.array.flags.c_contiguous and self.array.flags.aligned:
            flat = self.array.reshape(-1)[start:]
            return kernels().matches(flat, changes.positions, changes.bits, n_threads)
        places = changes.positions.astype(np.int64) + start
        found = self.array[np.unravel_index(places, self.array.shape)]
        return bool(np.array_equal(found, changes.bits))

    def overwrite(self, start: int, bits: Bits) -> None:
        """Overwrite a run of elements; safe to repeat.

        Raises:
            UnsupportedLayout: the memory is read-only.
        """
        self.require_writable()
        if self.array.flags.c_contiguous:
            self.array.reshape(-1)[start : start + len(bits)] = bits
            return
        places = np.unravel_index(np.arange(start, start + len(bits)), self.array.shape)
        self.array[places] = bits

    def require_writable(self) -> None:
        """Say so before anything is written.

        Raises:
            UnsupportedLayout: the memory is read-only.
        """
        if not self.array.flags.writeable:
            raise UnsupportedLayout(f"{self.spec.name!r} is read-only; pass writable tensors")


def view_tensor(name: str, tensor: Any) -> TensorView | DeviceView:
    """See a tensor as bits, without a copy.

    Raises:
        UnsupportedDType: an element type Weightwire has no code for.
        UnsupportedLayout: not in memory, not strided, or not little-endian.
    """
    if isinstance(tensor, np.ndarray):
        return _view_numpy(name, tensor)
    if is_torch(tensor):
        return _view_torch(name, tensor)
    if hasattr(tensor, "__dlpack__"):
        return _view_dlpack(name, tensor)
    if np.isscalar(tensor) or isinstance(tensor, np.generic):
        scalar = np.asarray(tensor)
        # A number is no memory of anyone's: what is written to this copy would be lost.
        scalar.flags.writeable = False
        return _view_numpy(name, scalar)
    raise UnsupportedLayout(
        f"{name!r} is a {type(tensor).__name__}; pass NumPy arrays, torch tensors or DLPack"
    )


def new_like(spec: TensorSpec, bits: Bits, neighbour: Any) -> Any:
    """A fresh tensor with these bits, of the same library as its neighbour and on its device."""
    array = bits.astype(bits.dtype, copy=True).reshape(spec.shape)
    if not is_torch(neighbour):
        return as_numpy(array, spec.dtype)
    return as_torch(array, spec.dtype).to(neighbour.device)


def as_numpy(bits: npt.NDArray[np.unsignedinteger], dtype: DType) -> npt.NDArray[Any]:
    """Bits as numbers of their type, over the same memory."""
    return bits.view(numpy_type(dtype))


def as_torch(bits: npt.NDArray[np.unsignedinteger], dtype: DType) -> Any:
    """Bits as a torch tensor of their type, over the same memory."""
    signed = bits.view(f"<i{dtype.n_bytes}") if dtype.n_bytes > 1 else bits
    return sys.modules["torch"].from_numpy(signed).view(torch_type(dtype))


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """What NumPy, or ml_dtypes, calls this element type."""
    return _NUMPY_TYPES[dtype.name]


def torch_type(dtype: DType) -> Any:
    """What torch calls this element type."""
    return getattr(sys.modules["torch"], _TORCH_TYPES[dtype.name])


def torch_element_type(name: str, dtype: Any) -> DType:
    """The element type behind torch's name for it, wherever the tensor ``name`` lies.

    Raises:
        UnsupportedDType: Weightwire has no code for it.
    """
    torch_name = str(dtype).removeprefix("torch.")
    if torch_name not in _TORCH_NAMES:
        raise UnsupportedDType(f"{name!r} has torch type {torch_name}, which has no code")
    return dtype_named(_TORCH_NAMES[torch_name])


def is_torch(tensor: Any) -> bool:
    """Without importing torch: a torch tensor cannot exist before torch is imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _view_numpy(name: str, array: npt.NDArray[Any]) -> TensorView:
    if array.dtype not in _NUMPY_NAMES:
        if array.dtype.newbyteorder("<") in _NUMPY_NAMES:
            raise UnsupportedLayout(f"{name!r} is big-endian; convert it with .astype")
        raise UnsupportedDType(f"{name!r} has NumPy type {array.dtype}, which has no code")
    dtype = dtype_named(_NUMPY_NAMES[array.dtype])
    return TensorView(TensorSpec(name, dtype, array.shape), array.view(dtype.bits_dtype))


def _view_torch(name: str, tensor: Any) -> TensorView | DeviceView:
    torch = sys.modules["torch"]
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise UnsupportedLayout(
            f"{name!r} is a {tensor.layout} tensor on {tensor.device}; pass a strided one in memory"
        )
    dtype = torch_element_type(name, tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedLayout(f"{name!r} is a lazy conjugate; pass tensor.resolve_conj()")
    spec = TensorSpec(name, dtype, tuple(tensor.shape))
    if tensor.device.type != "cpu" or tensor.device.type in devices.TYPES:
        return view_on_device(spec, tensor)
    return TensorView(spec, torch_bits(tensor.detach(), dtype))


def torch_bits(tensor: Any, dtype: DType) -> Bits:
    """A torch CPU tensor's memory as unsigned integers, by way of those torch can hand to NumPy."""
    torch = sys.modules["torch"]
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.n_bytes]
    bits: Bits = tensor.view(words).numpy().view(dtype.bits_dtype)
    return bits


def _view_dlpack(name: str, tensor: Any) -> TensorView:
    from weightwire import _native

    try:
        type_name, bits = _native.dlpack_bits(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLayout(f"{name!r} does not export CPU memory: {error}") from None
    if type_name not in _NUMPY_TYPES:
        raise UnsupportedDType(f"{name!r} has DLPack type {type_name}, which has no code")
    return TensorView(TensorSpec(name, dtype_named(type_name), bits.shape), bits)
