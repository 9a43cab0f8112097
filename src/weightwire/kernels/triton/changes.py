"""Changes that stay on the device: what an encoder kept, and what a decoder found."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeviceChanges(NamedTuple):
    """What is written to one piece: positions, ascending, as uint32 in an int32, and the new bits.

    A decoder lists an element that was expected to change and did not as well, twice, with the bits
    it has: writing it does nothing, and costs less than leaving it out.
    """

    positions: torch.Tensor
    bits: torch.Tensor

    n_changed: int
    """How many of them are changes."""
