"""Changes that stay on the device: what an encoder kept, and what a decoder found."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceChanges:
    """What differs in one piece: positions, ascending, as uint32 in an int32, and the new bits."""

    positions: torch.Tensor
    bits: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)
