"""Two small versions of a model on disk, and the command line run in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from typer.testing import CliRunner

from weightwire.checkpoint import Checkpoint
from weightwire.cli import app

Arrays = dict[str, npt.NDArray[Any]]
FORMS = ("file", "folder", "sharded")


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line said."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout, which must be exactly one JSON object."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


def run(*arguments: object) -> Outcome:
    """Run ``weightwire`` with these arguments; an escaped exception fails the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def model(seed: int = 0) -> Arrays:
    """Several types, an empty tensor and a 0-d one."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": (rng.standard_normal((64, 50)) * 0.02).astype(ml_dtypes.bfloat16),
        "layer.weight": (rng.standard_normal((90, 30)) * 0.02).astype(np.float16),
        "layer.scale": rng.standard_normal(17).astype(np.float32),
        "layer.empty": np.zeros((0, 3), np.float32),
        "norm.weight": np.ones(33, ml_dtypes.bfloat16),
        "steps": np.array(7, np.int64),
    }


def stepped(arrays: Arrays, seed: int = 1) -> Arrays:
    """The next version: a tenth of the embedding and the layer changed, the rest is the same."""
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in arrays.items()}
    for name in ("embed.weight", "layer.weight"):
        bits = new[name].reshape(-1).view(np.uint16)
        at = rng.choice(bits.size, bits.size // 10, replace=False)
        bits[at] += np.uint16(1)
    return new


def save(root: Path, form: str, arrays: Arrays) -> Path:
    """Write a checkpoint in one of ``FORMS``; gives the path to open."""
    root.parent.mkdir(parents=True, exist_ok=True)
    if form == "file":
        path = root.with_suffix(".safetensors")
        save_file(arrays, path, metadata={"format": "pt"})
        return path
    root.mkdir()
    (root / "config.json").write_text("{}")
    if form == "folder":
        save_file(arrays, root / "model.safetensors", metadata={"format": "pt"})
        return root
    names = list(arrays)
    weight_map = {}
    for number, group in enumerate((names[:2], names[2:]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: arrays[name] for name in group}, root / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def state_on_disk(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor's type, shape and bytes."""
    with Checkpoint.open(path) as checkpoint:
        return {
            name: (spec.dtype.name, spec.shape, checkpoint.read(name, 0, spec.n_elements).tobytes())
            for name, spec in checkpoint.specs.items()
        }


def names_under(folder: Path) -> set[str]:
    """Names in a folder, hidden ones included."""
    return {path.name for path in folder.iterdir()}


@dataclass(frozen=True)
class Pair:
    """A checkpoint, its next version, and the patch between them."""

    base: Path
    target: Path
    patch: Path


def make_pair(root: Path, form: str = "sharded", codec: str = "compact") -> Pair:
    """Write both versions and diff them."""
    base = save(root / "base", form, model())
    target = save(root / "target", form, stepped(model()))
    patch = root / "patch"
    outcome = run("diff", base, target, "-o", patch, "--codec", codec)
    assert outcome.code == 0, outcome.stderr
    return Pair(base, target, patch)
