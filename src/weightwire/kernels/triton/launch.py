"""How kernels reach many tensors with one launch.

A *bucket* lists memory by address, so that a model of hundreds of tensors costs one launch per
kernel and no synchronisation per tensor. Its work is cut into *spans* of equal length; a program
takes one span and finds in two small tables which memory it belongs to and where it starts there.

Counts that are others at every call are not specialised on: Triton would compile a kernel anew when
one happens to be a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.memories import addresses_of, alignment_of, sizes_of
from weightwire.kernels.triton.uploads import send_tables

TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Torch's integer of each width: it does little with unsigned ones, kernels see them as unsigned."""

TRITON_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}


@dataclass(frozen=True)
class Bucket:
    """Memory of one element width on one device, and its spans."""

    memories: tuple[torch.Tensor, ...]
    """Flat and contiguous; held here so that no address outlives its memory."""
    addresses: torch.Tensor
    """int64, one per memory."""
    sizes: torch.Tensor
    """int64, in elements."""
    span_memory: torch.Tensor
    """int32, one per span: the memory it is in."""
    span_number: torch.Tensor
    """int32: how many spans of the same memory come before it."""
    alignment: int
    """What all addresses are multiples of: 16 bytes, the widest load, or one element."""

    @property
    def n_spans(self) -> int:
        """How many programs cover everything."""
        return len(self.span_memory)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.addresses.device


def make_bucket(memories: Sequence[torch.Tensor], span: int) -> Bucket:
    """Cut memories into spans of so many elements; they were found to be alike."""
    first, sizes, addresses = memories[0], sizes_of(memories), addresses_of(memories)
    tables: list[npt.NDArray[Any]] = [addresses, sizes, *owners_of(-(-sizes // span))]
    at, lengths, numbers, within = send_tables(tables, first.device)
    alignment = alignment_of(addresses, first.element_size())
    return Bucket(tuple(memories), at, lengths, numbers, within, alignment)


def owners_of(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For owners of so many things each: every thing's owner, and its number with it."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    return owner, np.arange(len(owner), dtype=np.int32) - np.repeat(firsts, counts)


def register_limit(n: int) -> dict[str, int]:
    """The launch option for at most so many registers a thread; only NVIDIA's compiler has it."""
    return {} if torch.version.hip else {"maxnreg": n}


def to_device(array: Any, device: torch.device) -> torch.Tensor:
    """A small table, sent without waiting for it to arrive."""
    flat = np.ascontiguousarray(array)
    return send_tables([flat.reshape(-1)], device)[0].view(flat.shape)


def kept_on(device: torch.device, array: Any) -> torch.Tensor:
    """A small table that is made once and kept: it is there, whichever stream asks for it next."""
    table = to_device(array, device)
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
    return table


@triton.jit
def memory_at(addresses, number, kind: tl.constexpr):
    """The pointer behind an entry of an address table."""
    return tl.load(addresses + number).to(tl.pointer_type(kind))
