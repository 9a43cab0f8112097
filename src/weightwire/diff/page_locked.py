"""Host memory that a device reads by itself, at the speed of the bus, while everyone else works.

torch's own page-locked memory comes in powers of two, which for a large tensor may be nearly twice
its size. This is exact.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import TYPE_CHECKING

import numpy as np

from weightwire.model import Bits, DType

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightwire.diff")

_MIN_BYTES = 1 << 20
"""Below it a copy is over before locking would have paid."""


def page_locked(n_elements: int, dtype: DType, device: torch.device | None) -> Bits:
    """Room for elements; ordinary memory where locking is of no use, or is refused."""
    n_bytes = n_elements * dtype.n_bytes
    if device is None or device.type != "cuda" or n_bytes < _MIN_BYTES:
        return np.empty(n_elements, dtype.bits_dtype)
    # Pages of its own, since those at the ends would otherwise be locked for two; and shared ones:
    # of private pages a fork would leave this process copies that the device does not know.
    array: Bits = np.frombuffer(mmap.mmap(-1, n_bytes), dtype.bits_dtype)
    _lock(array, device)
    return array


def _lock(array: Bits, device: torch.device) -> None:
    import torch

    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        is_refused = int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    if is_refused:
        log.warning("%d bytes cannot be page-locked: copies from there are slow", array.nbytes)
        _take_error_away(device)
        return
    # Slices keep this array alive, and it is told before its memory goes.
    release = weakref.finalize(array, _unlock, array.ctypes.data, device)
    release.atexit = False


def _unlock(address: int, device: torch.device) -> None:
    """In whichever thread lets go of it: on its device, for any call begins one on the current."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def _take_error_away(device: torch.device) -> None:
    """CUDA tells a refusal again at the next launch, of whoever that is."""
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        log.debug("as expected: %s", error)
