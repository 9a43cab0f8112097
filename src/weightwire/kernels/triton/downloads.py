"""From a device to the host, through page-locked memory that is kept: to lock pages takes long."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from weightwire.kernels.devices import once

_MAX_FREE_BYTES = 1 << 30
"""Page-locked memory that is held for the next time."""


class Arriving:
    """An array on its way to the host."""

    def __init__(self, array: Any, done: torch.cuda.Event | None) -> None:
        self._array, self._done = array, done

    def wait(self) -> Any:
        """The array, once it is there. Its memory is lent until nobody has the array any more."""
        if self._done is not None:
            self._done.synchronize()
        return self._array


def mark(device: torch.device) -> torch.cuda.Event | None:
    """This moment in the current stream, to be waited for elsewhere."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(
    device: torch.device, after: torch.cuda.Event | None, stream_name: str, *, is_urgent: bool
) -> Iterator[None]:
    """What is launched here comes after this moment, on the stream of this name.

    What is urgent does not wait for all of a long kernel to be begun.
    """
    if after is None:
        yield
        return
    stream = stream_named(device, stream_name, -1 if is_urgent else 0)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def send_to_host(tensor: torch.Tensor, after: torch.cuda.Event | None = None) -> Arriving:
    """Begin a copy: next in the current stream, or elsewhere, after this moment and nothing else."""
    if tensor.device.type == "cpu":
        return Arriving(tensor.numpy(), None)
    current = torch.cuda.current_stream(tensor.device)
    stream = current if after is None else stream_named(tensor.device, "to host")
    n_bytes = tensor.numel() * tensor.element_size()
    memory = _POOL.take(n_bytes)
    through = memory[:n_bytes].view(tensor.dtype).view(tensor.shape)
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
            tensor.record_stream(stream)
        through.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
    return Arriving(np.asarray(_Lent(memory, through, done)), done)


def to_host(tensor: torch.Tensor) -> Any:
    """A copy as an array; waits for this stream and no other."""
    return send_to_host(tensor).wait()


def settle() -> None:
    """Wait for everything on this device: after a failure, when no time is to be won any more."""
    if torch.cuda.is_initialized():
        # A device that failed itself has nothing left to wait for.
        with suppress(RuntimeError):
            torch.cuda.synchronize()


@once
def stream_named(device: torch.device, name: str, priority: int = 0) -> torch.cuda.Stream:
    """A stream beside the others; of those with one name there is one."""
    del name
    return torch.cuda.Stream(device, priority=priority)


class _Pool:
    """Page-locked memory by size."""

    def __init__(self) -> None:
        # Entered again where something is let go of while it is held.
        self._lock = threading.RLock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._n_free_bytes = 0

    def take(self, n_bytes: int) -> torch.Tensor:
        """At least so many bytes."""
        size = 1 << max(n_bytes - 1, 1 << 12).bit_length()
        with self._lock:
            free = self._free.get(size)
            if free:
                self._n_free_bytes -= size
                return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, memory: torch.Tensor) -> None:
        """Keep it for the next time, unless there is enough."""
        with self._lock:
            if self._n_free_bytes + len(memory) <= _MAX_FREE_BYTES:
                self._free.setdefault(len(memory), []).append(memory)
                self._n_free_bytes += len(memory)


_POOL = _Pool()


class _Lent:
    """What an array over page-locked memory holds on to; the memory goes back when it is gone."""

    def __init__(self, memory: torch.Tensor, part: torch.Tensor, done: torch.cuda.Event) -> None:
        # The tensor's own array does not keep the tensor: it would not be told of its end.
        self.__array_interface__ = part.numpy().__array_interface__
        weakref.finalize(self, _give_back, memory, done).atexit = False


def _give_back(memory: torch.Tensor, done: torch.cuda.Event) -> None:
    """Not before the copy has ended: nobody may have waited for it, if something else failed."""
    done.synchronize()
    _POOL.give_back(memory)
