"""States whose tensors are on a device, and the same bits on the host."""

from __future__ import annotations

import numpy as np
import torch

from weightwire.diff.views import as_numpy, torch_element_type

TORCH_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}
Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


def drawn(shape: tuple[int, ...], dtype: str = "bf16", seed: int = 0) -> torch.Tensor:
    """Weights, or bytes."""
    source = np.random.default_rng(seed)
    if dtype == "uint8":
        return torch.from_numpy(np.array(source.integers(0, 256, shape, dtype=np.uint8)))
    floats = np.array(source.standard_normal(shape) * 0.02, np.float32)
    return torch.from_numpy(floats).to(TORCH_TYPES[dtype])


def moved(tensor: torch.Tensor, seed: int, share: float = 0.05) -> torch.Tensor:
    """A copy in the same layout, some of whose bits are a step or more away."""
    source = np.random.default_rng(1000 + seed)
    other = tensor.clone(memory_format=torch.preserve_format)
    bits = integers(other if other.dim() else other.view(1))
    places = np.unravel_index(
        source.choice(bits.numel(), int(share * bits.numel()) or bits.numel(), replace=False),
        bits.shape,
    )
    steps = source.choice([1, 2, 77], len(places[0]), p=[0.9, 0.06, 0.04])
    at = tuple(torch.from_numpy(each).to(bits.device) for each in places)
    bits[at] += torch.from_numpy(steps).to(bits.dtype).to(bits.device)
    return other


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as torch's integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])


def train(state: Tensors, seed: int, share: float = 0.05) -> None:
    """One optimizer step, in place."""
    with torch.no_grad():
        for number, tensor in enumerate(state.values()):
            if tensor.numel():
                integers(tensor).copy_(integers(moved(tensor, seed + 100 * number, share)))


def on_host(state: Tensors) -> Arrays:
    """The same state in NumPy's memory."""
    found = {}
    for name, tensor in state.items():
        dtype = torch_element_type(name, tensor.dtype)
        bits = integers(tensor).cpu().contiguous().numpy().copy().view(dtype.bits_dtype)
        found[name] = as_numpy(bits, dtype)
    return found


def bits_of(state: Tensors | Arrays) -> dict[str, bytes]:
    """Every bit, for comparing."""
    return {
        name: (on_host({name: each})[name] if isinstance(each, torch.Tensor) else each).tobytes()
        for name, each in state.items()
    }


def sample(device: torch.device, n: int = 120) -> Tensors:
    """Like a model: matrices, a norm, a scalar, wide ones among them, a counter, an empty tensor."""
    state = {
        "embed": drawn((n // 10, 10), "bf16", 1),
        "norm": drawn((16,), "fp32", 2),
        "mlp": drawn((n,), "bf16", 3),
        "scale": drawn((), "fp32", 4),
        "steps": torch.arange(4),
        "nothing": drawn((0, 7), "bf16"),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}
