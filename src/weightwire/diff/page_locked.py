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

from weightwire.model import Bits, TensorSpec

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightwire.publisher")

_MIN_BYTES = 1 << 20
"""Below it a copy is over before locking would have paid."""


def page_locked(spec: TensorSpec, device: torch.device) -> Bits:
    """Room for a tensor; ordinary memory where locking is of no use, or is refused."""
    if device.type != "cuda" or spec.n_bytes < _MIN_BYTES:
        return np.empty(spec.n_elements, spec.dtype.bits_dtype)
    # Pages of its own, since those at the ends would otherwise be locked for two; and shared ones:
    # of private pages a fork would leave this process copies that the device does not know.
    array: Bits = np.frombuffer(mmap.mmap(-1, spec.n_bytes), spec.dtype.bits_dtype)
    _lock(array, device)
    return array


def _lock(array: Bits, device: torch.device) -> None:
    import torch

    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0)):
        log.warning("%d bytes of the baseline cannot be page-locked: copies are slow", array.nbytes)
        _take_error_away(device)
        return
    # Slices keep this array alive, and it is told before its memory goes.
    release = weakref.finalize(array, runtime.cudaHostUnregister, array.ctypes.data)
    release.atexit = False


def _take_error_away(device: torch.device) -> None:
    """CUDA tells a refusal again at the next launch, of whoever that is."""
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        log.debug("as expected: %s", error)
