"""Streams beside an engine's own: what is staged on a GPU runs while the engine serves.

Memory that is made on a side stream may be used on another one only after a wait for the whole
device, and is given back only after such a wait: ``settle`` is that wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightwire.kernels.devices import on_stream, once

if TYPE_CHECKING:
    import torch


class SideStreams:
    """One side stream for each device that is used, for the time of one piece of work.

    Each begins after what its device's current stream was told when it was first entered. The host
    never waits for the engine's work here, only for its own.
    """

    def __init__(self) -> None:
        self._begun: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """What is submitted in here goes to the device's side stream; a CPU has none."""
        if device.type == "cpu":
            yield
            return
        with on_stream(self._stream(device)):
            yield

    def wait(self) -> None:
        """Wait for what was submitted here, and for nothing else."""
        for stream in self._begun.values():
            stream.synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._begun:
            import torch

            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._begun[device] = stream
        return self._begun[device]


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until devices have done all they were told, on whatever stream.

    An engine may use streams of its own, and other threads than the one that activates: only a
    wait for the whole device orders its reads before our writes, and ours before its next ones. In
    a pause there is little to wait for.
    """
    for device in devices:
        if device.type != "cpu":
            import torch

            wait = torch.cuda if device.type == "cuda" else torch.accelerator
            wait.synchronize(device)


@once
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch keeps freed memory apart for every stream."""
    import torch

    # Zero is the lowest priority there is: a waiting kernel of a higher one goes first.
    return torch.cuda.Stream(device, priority=0)
