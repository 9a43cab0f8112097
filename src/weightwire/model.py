"""The typed values that cross stages: element types, tensor specs, digests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from weightwire import limits
from weightwire.errors import LimitExceeded, StopError, UnsupportedDType

Bits: TypeAlias = npt.NDArray[np.unsignedinteger]
"""A tensor's elements as a flat array of unsigned integers of the same width."""


@dataclass(frozen=True)
class DType:
    """An element type, seen as bits.

    The *key* of an element is ``(bits >> key_shift) & key_mask``: the exponent of a float,
    always 0 for everything else. ``ordered`` says that the bits are sign and magnitude, so that
    neighbouring floats are one step apart after the sign is folded away.
    """

    name: str
    """The safetensors name, e.g. ``BF16``."""
    code: int
    """The byte that stands for it in a patch record."""
    n_bytes: int
    key_shift: int = 0
    key_mask: int = 0
    ordered: bool = False

    @property
    def bits_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The little-endian unsigned integer of the same width."""
        return np.dtype(f"<u{self.n_bytes}")


_DTYPES = (
    DType("BOOL", 1, 1),
    DType("U8", 2, 1),
    DType("I8", 3, 1),
    DType("F8_E5M2", 4, 1, 2, 0x1F, True),
    DType("F8_E4M3", 5, 1, 3, 0x0F, True),
    DType("F8_E8M0", 6, 1),
    DType("F8_E4M3FNUZ", 7, 1, 3, 0x0F, True),
    DType("F8_E5M2FNUZ", 8, 1, 2, 0x1F, True),
    DType("U16", 16, 2),
    DType("I16", 17, 2),
    DType("F16", 18, 2, 10, 0x1F, True),
    DType("BF16", 19, 2, 7, 0xFF, True),
    DType("U32", 32, 4),
    DType("I32", 33, 4),
    DType("F32", 34, 4, 23, 0xFF, True),
    DType("U64", 64, 8),
    DType("I64", 65, 8),
    DType("F64", 66, 8, 52, 0x7FF, True),
    DType("C64", 67, 8),
)
_BY_NAME = {dtype.name: dtype for dtype in _DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in _DTYPES}


def dtype_named(name: str) -> DType:
    """The element type with this safetensors name.

    Raises:
        UnsupportedDType: no such type, or one whose elements are not whole bytes.
    """
    if name not in _BY_NAME:
        raise UnsupportedDType(
            f"element type {name!r} is not supported; known: {', '.join(_BY_NAME)}"
        )
    return _BY_NAME[name]


def dtype_coded(code: int) -> DType:
    """The element type with this code in a patch record.

    Raises:
        UnsupportedDType: the code is not assigned in this format version.
    """
    if code not in _BY_CODE:
        raise UnsupportedDType(f"element type code {code} is not assigned in this format version")
    return _BY_CODE[code]


def _utf8_length(name: object) -> int:
    """Bytes of a name in a file. Lone surrogates can stand in a Python string, but in no file.

    Raises:
        StopError: no string, or one that no file can hold.
    """
    try:
        if isinstance(name, str):
            return len(name.encode())
    except UnicodeEncodeError:
        pass
    raise StopError(f"a tensor cannot be called {name!r:.80}; use a Unicode string")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if _utf8_length(self.name) > limits.MAX_NAME_BYTES:
            raise LimitExceeded(f"tensor name longer than {limits.MAX_NAME_BYTES} bytes")
        if len(self.shape) > limits.MAX_DIMS:
            raise LimitExceeded(f"{self.name!r} has {len(self.shape)} dimensions")
        # Extents of empty tensors count too: no library can make one that is 2^60 wide.
        n_spanned = math.prod(filter(None, self.shape))
        if min(self.shape, default=0) < 0 or n_spanned > limits.MAX_ELEMENTS:
            raise LimitExceeded(f"{self.name!r} has shape {self.shape}")

    @property
    def n_elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size of the dense tensor."""
        return self.n_elements * self.dtype.n_bytes


@dataclass(frozen=True)
class Changes:
    """What differs: flat positions, ascending, and the new bits there."""

    positions: npt.NDArray[np.unsignedinteger]
    bits: Bits

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_bytes(self) -> int:
        """What keeping it costs."""
        return self.positions.nbytes + self.bits.nbytes
