"""Chain files: consecutive versions of a few tensors, as a base and what each step wrote.

The layout is a plain ``.npz`` of bf16 bits. Every tensor ``name`` has

    name|shape    its extents
    name|base     version 0, flat, uint16
    name|idx{j}   flat positions that step j wrote, ascending, uint32      for j = 1, 2, …
    name|val{j}   the bits it wrote there, uint16

so that version j is version j−1 with ``val{j}`` written at ``idx{j}``.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from weightwire.bench.generate import (
    Format,
    Masters,
    draw_masters,
    draw_steps,
    format_of,
    random_source,
    rate_for,
    round_masters,
)
from weightwire.errors import MalformedHeader, MalformedRecord, NotAPatch, OutputExists
from weightwire.model import Bits, Changes, TensorSpec, dtype_named

_Array: TypeAlias = npt.NDArray[Any]

BF16 = dtype_named("BF16")
_STEP_FIELD = re.compile(r"idx([1-9][0-9]{0,5})")
SAMPLE_SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (256, 256),
    "model.layers.0.mlp.up_proj.weight": (512, 256),
    "model.layers.0.self_attn.k_proj.weight": (64, 256),
    "model.norm.weight": (256,),
}


@dataclass(frozen=True)
class ChainTensor:
    """One tensor's first version and what every step wrote to it."""

    spec: TensorSpec
    base: Bits
    steps: tuple[Changes, ...]


@dataclass(frozen=True)
class Chain:
    """Consecutive versions of several tensors."""

    tensors: tuple[ChainTensor, ...]

    @property
    def n_steps(self) -> int:
        """Number of steps; the chain has one version more."""
        return len(self.tensors[0].steps)

    def versions(self) -> Iterator[dict[str, Bits]]:
        """Every version in turn, as flat bits by name; each is a copy of its own."""
        state = {tensor.spec.name: tensor.base.copy() for tensor in self.tensors}
        yield state
        for step in range(self.n_steps):
            state = {name: bits.copy() for name, bits in state.items()}
            for tensor in self.tensors:
                changes = tensor.steps[step]
                state[tensor.spec.name][changes.positions] = changes.bits
            yield state


def read_chain(path: Path) -> Chain:
    """Read and check a chain file; what comes back can be replayed without further checks.

    Raises:
        NotAPatch: the path holds no ``.npz`` archive of plain arrays, or one with no tensor in it.
        MalformedHeader: an array is missing, has the wrong type, or contradicts its shape.
        MalformedRecord: a step's positions are not ascending or leave the tensor.
    """
    arrays = _load_arrays(path)
    names = [key.removesuffix("|base") for key in arrays if key.endswith("|base")]
    if not names:
        raise NotAPatch(f"{path} holds no chain: it has no array called NAME|base")
    tensors = tuple(_parse_tensor(arrays, name) for name in names)
    if len({len(tensor.steps) for tensor in tensors}) > 1:
        raise MalformedHeader(f"the tensors of {path} have different numbers of steps")
    return Chain(tensors)


def make_chain(
    path: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]] = SAMPLE_SHAPES,
    n_steps: int = 8,
    density: float = 0.016,
    seed: int = 0,
) -> None:
    """Write a small generated chain, for tests and for users who recorded none.

    Raises:
        OutputExists: there is something at the path already.
    """
    if path.exists():
        raise OutputExists(f"{path} exists")
    form = format_of(BF16)
    rate = rate_for(form, density, seed, n_blocks=len(shapes))
    arrays: dict[str, Any] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        spec = TensorSpec(name, BF16, shape)
        source = random_source(seed, index)
        arrays |= _format_tensor(_make_tensor(spec, source, form, rate, n_steps))
    with path.open("xb") as file:
        np.savez_compressed(file, **arrays)


def _make_tensor(
    spec: TensorSpec, source: np.random.Generator, form: Format, rate: float, n_steps: int
) -> ChainTensor:
    masters = draw_masters(source, spec.n_elements, form)
    base = round_masters(masters, form)
    steps = tuple(_take_step(source, masters, form, rate) for _ in range(n_steps))
    return ChainTensor(spec, base, steps)


def _take_step(source: np.random.Generator, masters: Masters, form: Format, rate: float) -> Changes:
    """Move the masters by one step and see which published bits changed."""
    old = round_masters(masters, form)
    masters += draw_steps(source, len(masters), rate)
    new = round_masters(masters, form)
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return Changes(positions, new[positions])


def _format_tensor(tensor: ChainTensor) -> dict[str, _Array]:
    """The arrays of one tensor, under the keys that ``_parse_tensor`` looks for."""
    name = tensor.spec.name
    arrays: dict[str, _Array] = {
        f"{name}|shape": np.array(tensor.spec.shape, np.int64),
        f"{name}|base": tensor.base,
    }
    for step, changes in enumerate(tensor.steps, start=1):
        arrays[f"{name}|idx{step}"] = changes.positions
        arrays[f"{name}|val{step}"] = changes.bits
    return arrays


def _load_arrays(path: Path) -> dict[str, _Array]:
    """Every array of the archive; pickled objects are refused, since loading one runs code."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise NotAPatch(f"{path} is a single array, not a chain file")
            return {key: archive[key] for key in archive.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise NotAPatch(f"{path} is not a readable chain file: {error}") from error


def _parse_tensor(arrays: Mapping[str, _Array], name: str) -> ChainTensor:
    spec = TensorSpec(name, BF16, _parse_shape(arrays, name))
    base = cast(Bits, _field(arrays, f"{name}|base", np.uint16))
    if len(base) != spec.n_elements:
        raise MalformedHeader(f"{name!r} has {len(base)} elements, its shape says {spec.shape}")
    steps = (_parse_step(arrays, spec, step) for step in range(1, _count_steps(arrays, name) + 1))
    return ChainTensor(spec, base, tuple(steps))


def _parse_shape(arrays: Mapping[str, _Array], name: str) -> tuple[int, ...]:
    extents = _field(arrays, f"{name}|shape", np.int64)
    if extents.size and extents.min() < 0:
        raise MalformedHeader(f"{name!r} has a negative extent: {extents.tolist()}")
    return tuple(int(extent) for extent in extents)


def _count_steps(arrays: Mapping[str, _Array], name: str) -> int:
    """The highest step any key names, so that a hole shows up as a missing array."""
    fields = (key.removeprefix(f"{name}|") for key in arrays if key.startswith(f"{name}|"))
    matches = (_STEP_FIELD.fullmatch(field) for field in fields)
    return max((int(match[1]) for match in matches if match), default=0)


def _parse_step(arrays: Mapping[str, _Array], spec: TensorSpec, step: int) -> Changes:
    positions = _field(arrays, f"{spec.name}|idx{step}", np.uint32)
    bits = _field(arrays, f"{spec.name}|val{step}", np.uint16)
    if len(positions) != len(bits):
        raise MalformedRecord(f"{spec.name!r}: step {step} has more positions or more values")
    if len(positions) and positions[-1] >= spec.n_elements:
        raise MalformedRecord(f"{spec.name!r}: step {step} writes beyond the tensor")
    if np.any(positions[1:] <= positions[:-1]):
        raise MalformedRecord(f"{spec.name!r}: the positions of step {step} do not ascend")
    return Changes(positions, bits)


def _field(arrays: Mapping[str, _Array], key: str, dtype: npt.DTypeLike) -> _Array:
    if key not in arrays:
        raise MalformedHeader(f"the chain file has no array {key!r}")
    array = arrays[key]
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise MalformedHeader(f"{key!r} is {array.dtype} with {array.ndim} dimensions")
    return array
