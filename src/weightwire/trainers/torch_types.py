"""Element types of torch tensors on any device."""

from __future__ import annotations

from typing import Any

import torch

from weightwire.diff.views import view_tensor
from weightwire.model import DType


def element_type(name: str, tensor: Any) -> DType:
    """The element type of a tensor, which may lie on a GPU or have no memory at all.

    Raises:
        UnsupportedDType: Weightwire has no code for it.
    """
    return view_tensor(name, torch.empty(0, dtype=tensor.dtype)).spec.dtype
