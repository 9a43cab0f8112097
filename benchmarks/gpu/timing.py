"""How long work takes on the device and for the host, and how much device memory it adds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

N_ROUNDS = 15
MIN_ROUNDS = 5
SOME_SECONDS = 5.0
"""After so long the rounds end once there are enough of them for a median."""
MAX_SECONDS = 20.0
"""After so long they end anyway: the row has shown that it is slow."""


@dataclass(frozen=True)
class Timing:
    """Medians over the rounds after two runs to warm up."""

    device_ms: float
    """Between two events on the stream the work was put on."""
    wall_ms: float
    """The host's clock, until the device has finished."""
    n_rounds: int
    n_extra_bytes: int | None
    """The most device memory held at once beyond what was there before; None without a GPU."""


def measure(work: Callable[[], object]) -> Timing:
    """Run it to compile, once more for its memory, then several times for its time."""
    work()
    n_extra_bytes = _extra_memory(work)
    rounds: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(rounds) < N_ROUNDS:
        rounds.append(_one_round(work))
        seconds = time.perf_counter() - began
        if seconds > (SOME_SECONDS if len(rounds) >= MIN_ROUNDS else MAX_SECONDS):
            break
    device_ms, wall_ms = (statistics.median(times) for times in zip(*rounds, strict=True))
    return Timing(device_ms, wall_ms, len(rounds), n_extra_bytes)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _one_round(work: Callable[[], object]) -> tuple[float, float]:
    synchronize()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        work()
        wall = 1e3 * (time.perf_counter() - began)
        return wall, wall
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    first.record()
    result = work()
    last.record()
    synchronize()
    wall = 1e3 * (time.perf_counter() - began)
    del result
    return first.elapsed_time(last), wall


def _extra_memory(work: Callable[[], object]) -> int | None:
    if not torch.cuda.is_available():
        work()
        return None
    gc.collect()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    del result
    return int(extra)
