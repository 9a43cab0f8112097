"""A trainer's versions on the host, and the same tensors on a device."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from sample_engines import checkpoint
from sample_engines import train as move_bits

from sample_training import inline
from weightwire.apply.layouts.target import LayoutReady, LayoutTarget
from weightwire.apply.targets import Ready
from weightwire.diff.views import as_torch, view_tensor
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp8": ml_dtypes.float8_e4m3fn,
    "uint8": np.uint8,
}


CASES = [
    pytest.param(
        dtype,
        codec,
        # In the interpreter, the compact codec takes its time.
        marks=[pytest.mark.long] if codec == "compact" and dtype != "bf16" else [],
    )
    for dtype in DTYPES
    for codec in ("compact", "plain")
]
"""Every element type with every codec."""


def arrays(dtype: str = "bf16", n: int = 240, seed: int = 0) -> Arrays:
    """Three tensors: the second is smaller than a chunk, the third a single element."""
    source = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        if dtype == "uint8":
            return source.integers(0, 255, shape, dtype=np.uint8)
        return (source.standard_normal(shape) * 0.02).astype(DTYPES[dtype])

    return {"embed": draw(3, n // 3), "mlp": draw(50), "scale": draw(1)}


def train(state: Arrays, seed: int, share: float = 0.05) -> None:
    """Move some bits, in place: mostly by one step, and some far."""
    source = np.random.default_rng(1000 + seed)
    for array in state.values():
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        places = source.choice(bits.size, max(1, int(share * bits.size)), replace=False)
        bits[places] += source.choice([1, 255], len(places), p=[0.95, 0.05]).astype(bits.dtype)


def versions(n: int, dtype: str = "bf16", share: float = 0.05) -> list[Arrays]:
    """So many versions of one state."""
    state, found = arrays(dtype), []
    for seed in range(n):
        found.append({name: array.copy() for name, array in state.items()})
        train(state, seed, share)
    return found


def on(device: torch.device, state: Arrays) -> Tensors:
    """The same bits in a device's memory."""
    return {
        name: as_torch(view.array.copy(), view.spec.dtype).to(device)
        for name, array in state.items()
        for view in [view_tensor(name, array)]
    }


def bits_of(state: Arrays | Tensors) -> dict[str, bytes]:
    """Every tensor, bit for bit."""
    return {name: _bytes_of(each) for name, each in state.items()}


def _bytes_of(each: np.ndarray | torch.Tensor) -> bytes:
    if isinstance(each, np.ndarray):
        return each.tobytes()
    flat = each.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


class HostTraining:
    """As ``sample_engines.Training``, published from the host: from arrays over the same memory."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **options: object) -> None:
        self.store, self.tensors, self.n_steps = MemoryStore(), checkpoint(dtype=dtype), 0
        arrays = {name: _as_array(tensor) for name, tensor in self.tensors.items()}
        options = {"background": inline, "codec": "plain", **options}
        self.publisher = Publisher(self.store, arrays, **options)  # type: ignore[arg-type]
        self.publisher.publish().result()

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.n_steps += 1
            move_bits(self.tensors, self.n_steps, 0.02)
            self.publisher.publish().result()


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    name = str(tensor.dtype).removeprefix("torch.")
    kind = getattr(ml_dtypes, name, None) or getattr(np, name)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.view(integers).numpy().view(kind)


class HostTrainer:
    """Publishes from the host, whatever the receivers have; patches are far smaller than anchors."""

    def __init__(self, dtype: str = "bf16", **options: object) -> None:
        self.store, self.state = MemoryStore(), arrays(dtype, 12_000)
        self.publisher = Publisher(self.store, self.state, background=inline, **options)  # type: ignore[arg-type]
        self.publisher.publish().result()
        self.n_steps = 0

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.n_steps += 1
            train(self.state, self.n_steps, 0.002)
            self.publisher.publish().result()


class Watched(LayoutTarget):
    """Remembers what was prepared."""

    ready: LayoutReady

    def prepare(self, *args: object, **options: object) -> Ready:  # type: ignore[override]
        found = super().prepare(*args, **options)  # type: ignore[arg-type]
        assert isinstance(found, LayoutReady)
        self.ready = found
        return found

    @property
    def names_beside(self) -> set[str]:
        """The tensors whose changes are kept on a device."""
        return {write.name for write in self.ready.staging.device_writes()}
