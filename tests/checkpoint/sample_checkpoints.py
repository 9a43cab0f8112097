"""Small checkpoints on disk, in each of the three forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from weightwire.checkpoint import Checkpoint
from weightwire.model import Bits, Changes

Arrays = dict[str, npt.NDArray[np.generic]]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
FORMS = ("file", "folder", "sharded")


def sample_arrays(seed: int = 0) -> Arrays:
    """Two shards' worth of tensors: several widths, an empty one, a 0-d one."""
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.integers(0, 1 << 16, (40, 25), np.uint16),
        "a.scale": rng.integers(0, 1 << 32, 7, np.uint32),
        "b.weight": rng.integers(0, 1 << 63, (3, 5, 2), np.uint64),
        "b.empty": np.zeros((0, 4), np.int16),
        "b.scalar": np.array(int(rng.integers(256)), np.uint8),
    }


def write_sharded(folder: Path, shards: list[Arrays]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for name, arrays in zip(SHARDS, shards, strict=True):
        save_file(arrays, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, name)
    total_size = sum(array.nbytes for arrays in shards for array in arrays.values())
    write_index(folder, weight_map, {"total_size": total_size})
    return folder


def write_index(folder: Path, weight_map: object, metadata: object = None) -> None:
    index = {"metadata": metadata or {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_sample(root: Path, form: str, arrays: Arrays) -> Path:
    """Write a checkpoint in one of ``FORMS`` and return the path to open."""
    if form == "file":
        save_file(arrays, root / "base.safetensors", metadata={"format": "pt"})
        return root / "base.safetensors"
    if form == "folder":
        (root / "base").mkdir()
        save_file(arrays, root / "base" / "model.safetensors", metadata={"format": "pt"})
        return root / "base"
    first = {name: array for name, array in arrays.items() if name.startswith("a.")}
    rest = {name: array for name, array in arrays.items() if name not in first}
    return write_sharded(root / "base", [first, rest])


def read_state(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes, read through Weightwire."""
    with Checkpoint.open(path) as checkpoint:
        return {
            name: checkpoint.read(name, 0, spec.n_elements).tobytes()
            for name, spec in checkpoint.specs.items()
        }


def state_of(arrays: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def files_under(root: Path) -> dict[str, bytes]:
    """Every file's bytes by relative path, hidden ones included."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def bits_of(array: npt.NDArray[np.generic]) -> Bits:
    return array.reshape(-1).view(f"<u{array.itemsize}")


def changes_between(old: Arrays, new: Arrays) -> list[tuple[str, Changes]]:
    """The changes of every tensor, by plain comparison."""
    found = []
    for name, array in old.items():
        before, after = bits_of(array), bits_of(new[name])
        positions = np.flatnonzero(before != after).astype(np.uint64)
        found.append((name, Changes(positions, after[positions])))
    return found


def changed(arrays: Arrays, seed: int = 1) -> Arrays:
    """The same tensors with about a third of the elements changed."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, array in arrays.items():
        copy = array.copy()
        flat = copy.reshape(-1)
        flat[rng.random(flat.size) < 0.3] += 1
        result[name] = copy
    return result
