"""CUDA streams of our own: what a publisher does waits for nobody, and nobody waits for it.

A version is what the caller's streams had been given when it published. That point is marked with
events, in the caller's thread; whoever reads later, in whichever thread, waits for them and then
works on streams of Weightwire's own. Memory made on one of them is let go only after the host has
waited for its last use, so the allocator need not be told of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from weightwire.diff.state import StateReader, device_bits
from weightwire.kernels.devices import on_stream, once

if TYPE_CHECKING:
    import torch

Purpose = Literal["work", "fill", "read"]
"""Coding and writing; filling memory for work that is to come; copies for the host."""


class Moment:
    """How far the streams of this thread are now, on some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = []
        for device in _with_streams(devices):
            import torch

            self._events.append(torch.cuda.current_stream(device).record_event())

    def __bool__(self) -> bool:
        return bool(self._events)

    def wait(self) -> None:
        """Until everything that was submitted before is done; for nothing that came later."""
        for event in self._events:
            event.synchronize()


class Filling:
    """Fills memory on a stream of its own; whoever uses it waits on their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filled: torch.cuda.Event | None = None

    @contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """What is submitted here is part of the filling."""
        if self._device.type != "cuda":
            yield
            return
        stream = own_stream(self._device, "fill")
        with on_stream(stream):
            yield
        self._filled = stream.record_event()

    def await_here(self) -> None:
        """What is submitted to the current stream from now on comes after it; the host goes on."""
        if self._filled is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(self._filled)


@contextmanager
def own_streams(devices: Iterable[torch.device], purpose: Purpose = "work") -> Iterator[None]:
    """Work on streams of our own; the host has waited for them, and no others, when this ends.

    What is read must be there already: see ``Moment``.
    """
    with ExitStack() as stack:
        for device in _with_streams(devices):
            stream = own_stream(device, purpose)
            stack.enter_context(on_stream(stream))
            stack.callback(stream.synchronize)
        yield


@contextmanager
def reading(state: StateReader, after: Moment) -> Iterator[None]:
    """Read a live state on streams of our own, as it was at a moment.

    Without one, as it is now: what makes its tensors when it is opened does so on this thread's streams.
    """
    devices = devices_of(state)
    (after or Moment(devices)).wait()
    with own_streams(devices):
        yield


@once
def own_stream(device: torch.device, purpose: Purpose) -> torch.cuda.Stream:
    """One for each purpose, for all of this process: torch has few, and hands them out in turns."""
    import torch

    del purpose

    return torch.cuda.Stream(device)


def stream_now(device: torch.device) -> Any:
    """Who makes what is made now: another stream would neither wait for it nor keep its memory.

    A host has none.
    """
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_stream(device)


def devices_in_use() -> list[torch.device]:
    """Those that this process has something on, and the current one; nothing is begun on others."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    numbers = range(torch.cuda.device_count())
    used = [n for n in numbers if n == current or torch.cuda.memory_reserved(n)]
    return [torch.device("cuda", number) for number in used]


def devices_of(state: StateReader) -> set[torch.device]:
    """Where the tensors of a state are that kernels can work on."""
    probes = (device_bits(state, name, 0, 0) for name in state.specs)
    return {probe.device for probe in probes if probe is not None}


def _with_streams(devices: Iterable[torch.device]) -> list[torch.device]:
    """In an order that does not depend on how they were gathered."""
    return sorted({device for device in devices if device.type == "cuda"}, key=str)
