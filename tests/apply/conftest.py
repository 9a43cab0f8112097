"""Where staging on a device is tested: on a GPU if there is one, else in Triton's interpreter."""

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
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that the kernels reach: without a GPU, the CPU counts as one."""
    torch = pytest.importorskip("torch", reason="devices are reached through torch")
    pytest.importorskip("triton", reason="GPU kernels need triton")
    if HAS_GPU:
        return torch.device("cuda")
    monkeypatch.setattr("weightwire.kernels.devices.TYPES", {"cuda", "cpu"})
    return torch.device("cpu")
