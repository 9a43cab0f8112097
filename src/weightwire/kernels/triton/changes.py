"""Changes that stay on the device: what an encoder kept, and what a decoder found."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceChanges:
    """What is written to one piece: positions, ascending, as uint32 in an int32, and the new bits.

    A decoder lists an element that was expected to change and did not as well, twice, with the bits
    it has: writing it does nothing, and costs less than leaving it out.
    """

    positions: torch.Tensor
    bits: torch.Tensor

    n_changed: int
    """How many of them are changes."""
