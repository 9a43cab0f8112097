"""Tiny models: what a trainer holds, how it changes, and copies of it that nobody can touch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightwire.testing.world.handles import Chances
from weightwire.testing.world.troubles import Trouble

Array = npt.NDArray[Any]
Model = dict[str, Array]

_DTYPES = ("bfloat16", "bfloat16", "float32", "float16", "int32", "uint8", "int64")


@dataclass(frozen=True)
class Frozen:
    """One tensor, bit by bit."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Snapshot:
    """A whole model, bit by bit; tied names stand for themselves."""

    tensors: Mapping[str, Frozen]

    def differences(self, other: Mapping[str, Frozen], names: Iterable[str]) -> list[str]:
        """Which of these names are not the same in both."""
        return [name for name in names if self.tensors.get(name) != other.get(name)]


def freeze(model: Mapping[str, Array]) -> Snapshot:
    """A copy of every bit."""
    return Snapshot({name: frozen(array) for name, array in model.items()})


def frozen(array: Array) -> Frozen:
    """A copy of one tensor's bits."""
    return Frozen(array.dtype.name, array.shape, array.tobytes())


def thaw(snapshot: Snapshot) -> Model:
    """A model with these bits, in memory of its own; ties are not restored."""
    return {
        name: np.frombuffer(each.data, _dtype(each.dtype)).reshape(each.shape).copy()
        for name, each in snapshot.tensors.items()
    }


def bits_of(array: Array) -> npt.NDArray[np.unsignedinteger]:
    """The same memory, flat, as unsigned integers."""
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def flip_bit(model: Mapping[str, Array], chance: random.Random) -> str:
    """One wrong bit somewhere; gives the tensor's name."""
    name = chance.choice([name for name, array in model.items() if array.size] or [""])
    if not name:
        return name
    bits = bits_of(model[name])
    mask = np.array(1 << chance.randrange(8 * bits.dtype.itemsize), bits.dtype)
    bits[chance.randrange(len(bits))] ^= mask
    return name


def scribble(model: Mapping[str, Array], chance: random.Random) -> str:
    """Other values in a part of one tensor; gives its name."""
    name = chance.choice([name for name, array in model.items() if array.size])
    bits = bits_of(model[name])
    start = chance.randrange(len(bits))
    bits[start : start + chance.randint(1, 20)] ^= np.array(chance.randint(1, 255), bits.dtype)
    return name


def draw_model(chance: random.Random) -> Model:
    """Two to four tensors, one of them 0-d, sometimes two names of one storage."""
    model = {f"layer.{n}": _draw_tensor(chance) for n in range(chance.randint(1, 3))}
    model["scale"] = np.array(chance.random(), np.float32)
    if chance.random() < 0.3:
        model["tied"] = model["layer.0"]
    return model


def _draw_tensor(chance: random.Random) -> Array:
    dtype = _dtype(chance.choice(_DTYPES))
    n_elements = chance.choice((0, 7, 64, 300, 1000)) if chance.random() < 0.5 else 256
    n_bytes = n_elements * dtype.itemsize
    noise: Array = np.frombuffer(chance.randbytes(n_bytes), dtype).copy()
    if n_elements % 4 == 0 and chance.random() < 0.5:
        return noise.reshape(4, -1) if n_elements else noise.reshape(0, 4)
    return noise


def train(model: Model, chances: Chances) -> None:
    """What happens between two publishes: a step, several, none, or something rare."""
    chance = chances.chance
    if chances.strikes(Trouble.NOTHING_CHANGED):
        return
    n_steps = chance.randint(2, 4) if chances.strikes(Trouble.MANY_STEPS) else 1
    for _ in range(n_steps):
        _step(model, chance)
    if chances.strikes(Trouble.EVERYTHING_CHANGED):
        _change_all(model)
    if chances.strikes(Trouble.NAN_PAYLOAD):
        _set_floats(model, chance, _nan_bits)
    if chances.strikes(Trouble.ZERO_SIGN):
        _set_floats(model, chance, _zero_bits)
    if chances.strikes(Trouble.STRUCTURE_CHANGED):
        _restructure(model, chance)


def _step(model: Model, chance: random.Random) -> None:
    """A few elements of some tensors move by one in their bits."""
    for array in model.values():
        if not array.size or chance.random() < 0.2:
            continue
        bits = bits_of(array)
        for _ in range(chance.randint(1, max(1, len(bits) // 50))):
            bits[chance.randrange(len(bits))] += np.array(chance.choice((1, 1, 1, 7)), bits.dtype)


def _change_all(model: Model) -> None:
    for array in {id(array): array for array in model.values()}.values():
        bits = bits_of(array)
        bits ^= np.array(1, bits.dtype)


def _set_floats(
    model: Model, chance: random.Random, draw: Callable[[Array, random.Random], int]
) -> None:
    for array in model.values():
        if array.dtype.kind not in "iu" and array.size:
            bits = bits_of(array)
            bits[chance.randrange(len(bits))] = draw(array, chance)


def _nan_bits(array: Array, chance: random.Random) -> int:
    """Some NaN, quiet or signalling, of either sign."""
    infinity = int(bits_of(np.array(np.inf, array.dtype))[0])
    sign = chance.getrandbits(1) << (8 * array.dtype.itemsize - 1)
    return infinity | chance.randint(1, 63) | sign


def _zero_bits(array: Array, chance: random.Random) -> int:
    return chance.getrandbits(1) << (8 * array.dtype.itemsize - 1)


def _restructure(model: Model, chance: random.Random) -> None:
    """Add, remove, reshape or tie; one tensor always stays as it is."""
    what = chance.randrange(4)
    name = f"layer.{chance.randint(1, 4)}"
    if what == 0:
        model[name] = _draw_tensor(chance)
    elif what == 1:
        model.pop(name, None)
    elif what == 2 and name in model:
        model[name] = model[name].reshape(-1).copy()
    elif what == 3:
        model["tied"] = model[chance.choice([each for each in model if each != "tied"])]
        bits_of(model["scale"])[0] += 1  # a digest does not see ties; the record of truth needs one


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
