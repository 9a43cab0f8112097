"""What the processes of these tests have in common: weights, training, a store, a log of their own."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from weightwire.checkpoint import Checkpoint
from weightwire.store.contract import ObjectStore
from weightwire.store.open import open_store

Tensors = dict[str, Any]
FENCED = 3
"""Exit status of a publisher that was fenced: expected, not a failure."""


def first_state(n_elements: int = 40_000) -> Tensors:
    """Every trainer and every engine begins with the same architecture."""
    rng = np.random.default_rng(11)
    state: Tensors = {
        f"layer.{n}": (rng.standard_normal(n_elements) * 0.02).astype(ml_dtypes.bfloat16)
        for n in range(3)
    }
    state["scale"] = rng.standard_normal(n_elements // 10).astype(np.float32)
    return state


def train(state: Tensors, rng: np.random.Generator) -> None:
    """One pseudo-update: a hundredth of every tensor moves by one bit pattern."""
    for tensor in state.values():
        bits = tensor.view(f"<u{tensor.itemsize}")
        bits[rng.choice(bits.size, bits.size // 100, replace=False)] += 1


def sha256_of(state: Tensors) -> str:
    """The raw bits of everything, by name."""
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(name.encode() + np.ascontiguousarray(state[name]).tobytes())
    return whole.hexdigest()


def sha256_of_folder(folder: Path) -> str:
    """The same, of a checkpoint folder."""
    with Checkpoint.open(folder) as checkpoint:
        return sha256_of(
            {
                name: checkpoint.read(name, 0, spec.n_elements)
                for name, spec in checkpoint.specs.items()
            }
        )


def store_of_environment() -> ObjectStore:
    """The store the supervisor told this process to use."""
    options = json.loads(os.environ["STORE_OPTIONS"])
    return open_store(os.environ["STORE_URL"], options=options)


def note(path: Path, **fields: object) -> None:
    """Append one line in one write: a kill leaves it whole or absent."""
    line = json.dumps({"pid": os.getpid(), **fields}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def notes(path: Path) -> list[dict[str, Any]]:
    """Every line of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
