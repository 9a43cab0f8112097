"""The element types that are measured: what torch and the kernels call them, and how masters become them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightwire.model import DType, dtype_named

SECTOR_BYTES = 32
"""A memory sector: the least a GPU reads or writes."""
POSITION_BYTES = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The integers that kernels take elements of so many bytes as."""


@dataclass(frozen=True)
class ElementType:
    """An element type by its common name."""

    name: str
    dtype: DType
    rounds_to: torch.dtype
    scale: float = 1.0
    """What masters are multiplied by first; a power of two, so that it rounds nothing."""

    @property
    def n_bytes(self) -> int:
        """Of an element."""
        return self.dtype.n_bytes

    @property
    def n_pair_bytes(self) -> int:
        """Of a position and its new bits."""
        return POSITION_BYTES + self.n_bytes

    @property
    def n_sector_elements(self) -> int:
        """How many share a memory sector."""
        return SECTOR_BYTES // self.n_bytes

    @property
    def bits(self) -> torch.dtype:
        """The integer of its width."""
        return _BITS[self.n_bytes]

    @property
    def holds_masters(self) -> bool:
        """Whether masters keep all of their bits: then any step at all changes an element."""
        return bool(self.rounds_to == torch.float32)

    def rounded(self, masters: torch.Tensor) -> torch.Tensor:
        """The bits of fp32 masters in this type."""
        scaled = masters if self.scale == 1.0 else masters * self.scale
        return scaled.to(self.rounds_to).view(self.bits)


BF16 = ElementType("bf16", dtype_named("BF16"), torch.bfloat16)
FP16 = ElementType("fp16", dtype_named("F16"), torch.float16)
FP32 = ElementType("fp32", dtype_named("F32"), torch.float32)
# Weights of 0.02 become 5: a quarter of a percent is left below the smallest normal number, and
# norms, which are about one, stay below the largest. At twice that they would be no numbers.
FP8 = ElementType("fp8", dtype_named("F8_E4M3"), torch.float8_e4m3fn, scale=2.0**8)

ELEMENT_TYPES = {each.name: each for each in (BF16, FP16, FP32, FP8)}
