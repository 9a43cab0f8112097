"""Memories that kernels are to reach, looked at once: a model has hundreds, and to ask each takes time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import StopError

VECTOR_BYTES = 16
"""The widest load of a thread."""


class Memories:
    """Where pieces lie before and after, and how long they are."""

    def __init__(self, olds: Sequence[torch.Tensor], news: Sequence[torch.Tensor]) -> None:
        """Look at pieces of one element type on one device.

        Raises:
            StopError: no pieces, or memories of different types or devices, or with gaps, or that do
                not match.
        """
        if not olds or not news:
            raise StopError("no pieces")
        check_alike(olds)
        check_alike(news)
        self.sizes = sizes_of(olds)
        if not np.array_equal(self.sizes, sizes_of(news)):
            raise StopError("old and new have different lengths")
        if olds[0].element_size() != news[0].element_size() or olds[0].device != news[0].device:
            raise StopError("old and new have different widths, or are on different devices")
        self.olds, self.news, self.device = olds, news, olds[0].device
        self.n_bytes = olds[0].element_size()
        """Of an element."""
        self.addresses = np.stack([addresses_of(olds), addresses_of(news)])
        self.alignment = alignment_of(self.addresses, self.n_bytes)


def check_alike(memories: Sequence[torch.Tensor]) -> None:
    """Refuse memories that cannot be told to one kernel.

    Raises:
        StopError: memories of different types or devices, or with gaps.
    """
    check_flat(memories)
    if len({memory.dtype for memory in memories}) > 1:
        raise StopError("memories must be of one element type")


def check_flat(memories: Sequence[torch.Tensor]) -> None:
    """Refuse memories that an address and a length do not tell.

    Raises:
        StopError: memories with gaps, or on different devices.
    """
    # There are hundreds: a loop of Python's own takes several times as long.
    is_flat = {*map(torch.Tensor.dim, memories)} <= {1}
    if not is_flat or not all(map(torch.Tensor.is_contiguous, memories)):
        raise StopError("memories must be flat and without gaps")
    if len({*map(torch.Tensor.get_device, memories)}) > 1:
        raise StopError("memories must be on one device")


def sizes_of(memories: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Their lengths, in elements."""
    return np.array([*map(torch.Tensor.numel, memories)], dtype=np.int64)


def addresses_of(memories: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Where they lie."""
    return np.array([*map(torch.Tensor.data_ptr, memories)], dtype=np.int64)


def alignment_of(addresses: npt.NDArray[np.int64], n_bytes: int) -> int:
    """What all addresses are multiples of: 16 bytes, the widest load, or one element."""
    return n_bytes if (addresses % VECTOR_BYTES).any() else VECTOR_BYTES
