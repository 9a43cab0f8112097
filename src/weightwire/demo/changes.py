"""Counting what changed, the plain way: a copy of the last version, compared bit by bit.

The codec counts too. This count is the demo's own, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Changed:
    """How much of which tensor changed since the last count."""

    n_elements: int
    n_changed: int
    shares: Mapping[str, float]


class ChangeCounter:
    """Remembers a module's weights as bf16; before the first count, nothing: all is new."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._before: dict[str, Any] = {}

    def count(self) -> Changed:
        """Compare with the last count, and remember this one."""
        import torch

        counts, sizes = {}, {}
        for name, parameter in self._module.named_parameters():
            bits = parameter.detach().to(torch.bfloat16).view(torch.int16)
            old = self._before.get(name)
            counts[name] = bits.numel() if old is None else int((bits != old).sum())
            sizes[name] = bits.numel()
            self._before[name] = bits
        shares = {name: counts[name] / sizes[name] for name in sizes}
        return Changed(sum(sizes.values()), sum(counts.values()), shares)
