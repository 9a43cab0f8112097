"""Which memory the GPU kernels reach, and whether they load here."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from weightwire.errors import DeviceFull

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)

TYPES = {"cuda"}
"""What torch calls the devices that Triton compiles for; ROCm's are among them, under the same name."""

ELEMENT_BYTES = frozenset({1, 2, 4})
"""Element sizes the kernels know; others are read through the host."""


def is_reached(tensor: Any) -> bool:
    """Whether GPU kernels can work on this torch tensor where it is."""
    return tensor.device.type in TYPES and tensor.element_size() in ELEMENT_BYTES and is_ready()


def has_device() -> bool:
    """Whether this process has a GPU whose memory the kernels reach.

    torch is not loaded to find out: whoever has tensors on a GPU has loaded it.
    """
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available()) and is_ready()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that a device has no memory left; torch and Triton say it in their own ways."""
    # torch's own class says so in its text, and has moved from module to module.
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)


def unless_out_of_memory(work: Callable[[], T]) -> T | None:
    """What work on a device gives; None if memory there runs out, and all of the work's is let go."""
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        _LOG.debug("the host does it instead: %s", str(error))
    return None


@contextmanager
def typed_memory_errors() -> Iterator[None]:
    """Work for which a device has no memory left can be tried again.

    Raises:
        DeviceFull: in place of what torch or Triton says.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceFull(
            f"a GPU has no memory left for this; nothing was written or published: {error}"
        ) from error


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on a stream, and on its device; then be where one was before.

    To leave the stream alone would go back in earnest: where the device before was never used, that
    takes half a gigabyte there, maybe of another rank's. To leave a device does not.
    """
    import torch

    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def once(make: Callable[P, T]) -> Callable[P, T]:
    """Like ``functools.cache``, and two threads that are first at the same time get the same thing."""
    lock = threading.Lock()
    kept: Callable[..., T] = cache(make)

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return kept(*args, **kwargs)

    return found


@cache
def is_ready() -> bool:
    """Whether Triton loads here; without it, tensors on a device are read through the host."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        _LOG.warning("Triton does not load (%s): tensors on a GPU are read through the host", error)
        return False
    return True
