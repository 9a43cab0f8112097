"""Casts that lose nothing, on a device: the twin of ``Cast`` for integers that torch holds.

Every cast from one or two bytes is a table of all patterns, so it is exact by construction, NaN
payloads included, and so is the way back: a search in that table.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from weightwire.apply.layouts.casts import Cast

if TYPE_CHECKING:
    import torch


def is_on_device(cast: Cast) -> bool:
    """Whether a device can do it: neither side is wider than what kernels know."""
    return cast.is_identity or (cast.published.n_bytes <= 2 and cast.runtime.n_bytes <= 4)


def widen(cast: Cast, bits: torch.Tensor) -> torch.Tensor:
    """The engine's bits."""
    if cast.is_identity:
        return bits
    if _is_shift(cast):
        return bits.int() << 16
    mask = (1 << 8 * cast.published.n_bytes) - 1
    return _table(cast, bits.device)[bits.int() & mask]


def narrow(cast: Cast, bits: torch.Tensor) -> torch.Tensor | None:
    """Published bits; None if some are not ones that ``widen`` gives. Waits for the device."""
    if cast.is_identity:
        return bits
    if _is_shift(cast):
        return None if bool((bits & 0xFFFF).any()) else (bits >> 16).short()
    import torch

    ordered, pattern = _ordered(cast, bits.device)
    at = torch.searchsorted(ordered, bits.contiguous(), out_int32=True).clamp_(max=len(ordered) - 1)
    return None if bool((ordered[at] != bits).any()) else pattern[at]


def _is_shift(cast: Cast) -> bool:
    return (cast.published.name, cast.runtime.name) == ("BF16", "F32")


@lru_cache(maxsize=16)
def _table(cast: Cast, device: torch.device) -> torch.Tensor:
    """The engine's bits of every published pattern."""
    import torch

    every = np.arange(1 << 8 * cast.published.n_bytes).astype(cast.published.bits_dtype)
    return torch.from_numpy(cast.widen(every).view(f"<i{cast.runtime.n_bytes}")).to(device)


@lru_cache(maxsize=16)
def _ordered(cast: Cast, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in ascending order, and the published pattern of each."""
    import torch

    ordered, pattern = _table(cast, device).sort()
    pattern = pattern.to(torch.uint8 if cast.published.n_bytes == 1 else torch.int16)
    if device.type == "cuda":  # other streams get it too
        torch.cuda.current_stream(device).synchronize()
    return ordered, pattern
