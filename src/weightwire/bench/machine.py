"""The machine a benchmark ran on: speeds mean nothing without it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import numpy as np

from weightwire.kernels import devices, kernels


@dataclass(frozen=True)
class Gpu:
    """One that Weightwire's kernels work on, and what they are compiled by."""

    name: str
    torch: str
    triton: str


@dataclass(frozen=True)
class Machine:
    """What a reader must know to repeat the numbers."""

    architecture: str
    system: str
    n_cpus: int
    n_threads: int
    python: str
    numpy: str
    backend: str
    """Of the host, where all encodings run."""
    gpu: Gpu | None = None
    """What publishers and subscribers here would use beside it."""


def describe_machine(n_threads: int) -> Machine:
    """This machine, and the kernels that Weightwire chose on it."""
    return Machine(
        architecture=platform.machine(),
        system=platform.system(),
        n_cpus=count_cpus(),
        n_threads=n_threads,
        python=platform.python_version(),
        numpy=np.__version__,
        backend=kernels().name,
        gpu=_find_gpu(),
    )


def _find_gpu() -> Gpu | None:
    try:
        import torch
    except (ImportError, OSError):
        # Not installed, or installed for another machine: either way there is no GPU for us.
        return None
    if not devices.has_device():
        return None
    import triton

    return Gpu(torch.cuda.get_device_name(), torch.__version__, triton.__version__)


def count_cpus() -> int:
    """The CPUs this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
