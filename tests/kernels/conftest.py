"""Where GPU kernels are tested: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


HAS_GPU = _has_gpu()
if not HAS_GPU:
    # Triton reads it once, when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """The device whose memory the kernels are given."""
    import torch

    return torch.device("cuda" if HAS_GPU else "cpu")
