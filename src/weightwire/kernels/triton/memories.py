"""Both states' pieces, looked at once: a model has hundreds, and to ask each of them takes its time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightwire.errors import StopError
from weightwire.kernels.triton.launch import alignment_of


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
        sizes = [sizes_of(olds), sizes_of(news)]
        if sizes[0] != sizes[1]:
            raise StopError("old and new have different lengths")
        if olds[0].element_size() != news[0].element_size() or olds[0].device != news[0].device:
            raise StopError("old and new have different widths, or are on different devices")
        self.olds, self.news, self.device = olds, news, olds[0].device
        self.n_bytes = olds[0].element_size()
        """Of an element."""
        self.sizes = np.array(sizes[0], dtype=np.int64)
        self.addresses = np.stack([addresses_of(olds), addresses_of(news)])
        self.alignment = alignment_of(self.addresses, self.n_bytes)


def sizes_of(memories: Sequence[torch.Tensor]) -> list[int]:
    """Their lengths, in elements.

    Raises:
        StopError: memories of different types or devices, or with gaps.
    """
    # There are hundreds: a loop of Python's own takes several times as long.
    is_flat = {*map(torch.Tensor.dim, memories)} == {1}
    if not is_flat or not all(map(torch.Tensor.is_contiguous, memories)):
        raise StopError("pieces are flat memory without gaps")
    kinds = {memory.dtype for memory in memories}
    if len(kinds) > 1 or len({*map(torch.Tensor.get_device, memories)}) > 1:
        raise StopError("pieces are of one element type, on one device")
    return list(map(torch.Tensor.numel, memories))


def addresses_of(memories: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Where they lie."""
    return np.fromiter(map(torch.Tensor.data_ptr, memories), dtype=np.int64, count=len(memories))
