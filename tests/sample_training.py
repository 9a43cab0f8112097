"""A trainer that is not one: weights that move like weights, and a store to publish them to."""

from __future__ import annotations

from concurrent.futures import Executor

import ml_dtypes
import numpy as np

from weightwire.diff.memory import tensors_of
from weightwire.diff.views import view_tensor
from weightwire.workers import InlineExecutor

Weights = dict[str, np.ndarray]


def inline(n_threads: int, name: str) -> Executor:
    """Everything in the caller's thread."""
    return InlineExecutor()


def weights(seed: int = 0, n_elements: int = 3000) -> Weights:
    """A few tensors of several types and shapes."""
    source = np.random.default_rng(seed)

    def draw(n: int) -> np.ndarray:
        return source.standard_normal(n) * 0.02

    return {
        "embed": draw(n_elements).astype(ml_dtypes.bfloat16).reshape(-1, 10),
        "mlp": draw(n_elements).astype(np.float32),
        "norm": np.ones(16, np.float16),
        "scale": np.array(1.5, np.float32),
        "steps": np.zeros(4, np.int64),
    }


def train(state: Weights, seed: int, share: float = 0.01) -> None:
    """One optimizer step, in place: some bits move, and a counter."""
    source = np.random.default_rng(seed)
    for name in ("embed", "mlp"):
        bits = state[name].reshape(-1).view(f"u{state[name].dtype.itemsize}")
        places = source.choice(len(bits), max(1, int(share * len(bits))), replace=False)
        bits[places] += 1
    state["steps"] += 1


def zeros_like(state: Weights) -> Weights:
    """What a freshly started engine holds."""
    return {name: np.zeros_like(tensor) for name, tensor in state.items()}


def bits_of(state: object) -> dict[str, bytes]:
    """Every bit, for comparing."""
    return {name: view_tensor(name, tensor).array.tobytes() for name, tensor in tensors_of(state)}
