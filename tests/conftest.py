"""What all tests share: a device for the GPU kernels, and a count of the simulated worlds."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

_DRIVERS = ("nvidia*", "kfd", "dxg")
"""What a GPU's driver leaves in /dev: NVIDIA's, AMD's, and Windows' for a Linux inside it."""


def _has_gpu() -> bool:
    """torch takes seconds to load: it is asked only where there may be a GPU."""
    if not any(any(Path("/dev").glob(name)) for name in _DRIVERS):
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


HAS_GPU = _has_gpu()


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, have Triton interpret kernels; not those of real engines, tested by themselves.

    It asks once, when it is imported, and torch's optimizers import it.
    """
    if not HAS_GPU and not all("integrations" in Path(each).parts for each in config.args):
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that the kernels reach: without a GPU the CPU counts as one, in Triton's interpreter."""
    torch = pytest.importorskip("torch", reason="devices are reached through torch")
    pytest.importorskip("triton", reason="GPU kernels need triton")
    if HAS_GPU:
        return torch.device("cuda")
    monkeypatch.setattr("weightwire.kernels.devices.TYPES", {"cuda", "cpu"})
    return torch.device("cpu")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many worlds were run and how many faults they met."""
    faults: Counter[str] = Counter()
    n_worlds = 0
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        found = dict(getattr(report, "user_properties", ()))
        if getattr(report, "when", "") == "call" and "faults" in found:
            faults.update(json.loads(str(found["faults"])))
            n_worlds += int(str(found["worlds"]))
    if n_worlds:
        terminalreporter.write_line(
            f"simulated worlds: {n_worlds:,}, with {faults.total():,} faults of {len(faults)} kinds"
        )
