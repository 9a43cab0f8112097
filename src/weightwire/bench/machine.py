"""The machine a benchmark ran on: speeds mean nothing without it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import numpy as np


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


def describe_machine(n_threads: int) -> Machine:
    """This machine, and the kernel backend that Weightwire chose on it."""
    from weightwire.kernels import kernels

    return Machine(
        architecture=platform.machine(),
        system=platform.system(),
        n_cpus=count_cpus(),
        n_threads=n_threads,
        python=platform.python_version(),
        numpy=np.__version__,
        backend=kernels().name,
    )


def count_cpus() -> int:
    """The CPUs this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
