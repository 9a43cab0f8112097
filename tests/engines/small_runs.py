"""A small torch module that trains and publishes, and modules that follow it."""

from __future__ import annotations

from pathlib import Path

import torch

import weightwire as ww
from weightwire.subscriber import Polling

SOON = Polling(first_s=0.01, max_s=0.02)


def small_module(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 8)
    ).to(dtype)


class SmallRun:
    """A publisher whose every version is kept for comparing."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "run"
        self.module = small_module(seed=1)
        self.bits: dict[int, dict[str, bytes]] = {}
        self.digests: dict[int, str] = {}
        self._publisher = ww.Publisher(self.store, self.module)

    def publish(self) -> int:
        if self.bits:
            self._train()
        done = self._publisher.publish().result()
        self.bits[done.version] = bits_of(self.module)
        self.digests[done.version] = done.digest
        return done.version

    def close(self) -> None:
        self._publisher.close()

    def _train(self) -> None:
        generator = torch.Generator().manual_seed(len(self.bits))
        with torch.no_grad():
            for parameter in self.module.parameters():
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.add_(((noise < 0.1) * 0.01).to(parameter.dtype))


def bits_of(module: torch.nn.Module) -> dict[str, bytes]:
    """Every bit, as bf16: an fp32 module that follows a bf16 run holds bf16 numbers."""
    found = {}
    for name, tensor in module.state_dict().items():
        narrow = tensor.to(torch.bfloat16)
        assert torch.equal(narrow.to(tensor.dtype), tensor), f"{name} holds more than bf16"
        found[name] = narrow.view(torch.int16).numpy().tobytes()
    return found
