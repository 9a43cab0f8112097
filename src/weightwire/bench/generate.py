"""A language-model-like state and its next version, for those who have no training run at hand.

The change is made as training makes it: fp32 master weights take a step of about the learning
rate, both sides are rounded to nearest-even, and whatever bits then differ have changed. So the
chance to change falls with the exponent and nearly every change is one unit in the last place,
as in measured runs. The learning rate is the one that reaches the wanted density.

Nothing is tiled: every block of ``BLOCK_ELEMENTS`` is drawn from its own seed, and stands for one
tensor with its own spread and its own outlier columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightwire.errors import StopError, UnsupportedDType
from weightwire.model import Bits, DType

Masters: TypeAlias = npt.NDArray[np.float32]
"""Weights as the optimizer keeps them."""

BLOCK_ELEMENTS = 1 << 22
N_COLUMNS = 1024
N_OUTLIER_COLUMNS = 4
OUTLIER_GAIN = np.float32(8.0)
STD = 0.02
STEP_SPREAD = np.float32(0.3)
F32_RATE = 1e-6
MAX_SAMPLE_BLOCKS = 32
SAMPLE_ELEMENTS = 1 << 20
N_BISECTIONS = 32
N_GENERATOR_THREADS = 2


@dataclass(frozen=True)
class Pair:
    """A tensor's bits before and after a step, and the share of elements asked to change."""

    old: Bits
    new: Bits
    dtype: DType
    density: float


@dataclass(frozen=True)
class Format:
    """How masters become the published element type.

    Eight-bit floats are scaled first, as every FP8 recipe does, so that the largest weights come
    near ``limit``; what still lies beyond it saturates.
    """

    dtype: DType
    float_type: npt.DTypeLike
    scale: float = 1.0
    limit: float = math.inf


_FORMATS: dict[str, tuple[npt.DTypeLike, float, float]] = {
    "BF16": (ml_dtypes.bfloat16, 1.0, math.inf),
    "F16": (np.float16, 1.0, math.inf),
    "F32": (np.float32, 1.0, math.inf),
    "F8_E4M3": (ml_dtypes.float8_e4m3fn, 256.0, 448.0),
    "F8_E5M2": (ml_dtypes.float8_e5m2, 32768.0, 57344.0),
}


def format_of(dtype: DType) -> Format:
    """The way from masters to this element type.

    Raises:
        UnsupportedDType: not a float that models are published in.
    """
    if dtype.name not in _FORMATS:
        raise UnsupportedDType(f"cannot generate {dtype.name}; known: {', '.join(_FORMATS)}")
    return Format(dtype, *_FORMATS[dtype.name])


def generate_pair(n_elements: int, dtype: DType, density: float, seed: int) -> Pair:
    """A state and its next version in which about ``density`` of all elements changed.

    The same arguments give the same bits. A density of 1 replaces every element by an
    independent one that differs from it.

    Raises:
        UnsupportedDType: the element type is not one that models are published in.
        StopError: the density is not between 0 and 1.
    """
    _check_density(density)
    form = format_of(dtype)
    n_blocks = -(-n_elements // BLOCK_ELEMENTS)
    change = _change_for(form, density, seed, n_blocks)
    old = np.empty(n_elements, dtype.bits_dtype)
    new = np.empty(n_elements, dtype.bits_dtype)

    def fill(index: int) -> None:
        span = slice(index * BLOCK_ELEMENTS, (index + 1) * BLOCK_ELEMENTS)
        change(random_source(seed, index), old[span], new[span])

    with ThreadPoolExecutor(N_GENERATOR_THREADS) as pool:
        list(pool.map(fill, range(n_blocks)))
    return Pair(old, new, dtype, density)


def random_source(seed: int, index: int) -> np.random.Generator:
    """An independent stream per block, so that blocks can be drawn in any order."""
    return np.random.Generator(np.random.SFC64([seed, index]))


def draw_masters(source: np.random.Generator, n_elements: int, form: Format) -> Masters:
    """One tensor's weights: normal, with its own spread and a few outlier columns."""
    std = np.float32(STD * form.scale * 2.0 ** source.uniform(-1.0, 1.0))
    outliers = source.choice(N_COLUMNS, N_OUTLIER_COLUMNS, replace=False)
    shape = (-(-n_elements // N_COLUMNS), N_COLUMNS)
    grid = source.standard_normal(shape, dtype=np.float32)
    grid *= std
    grid[:, outliers] *= OUTLIER_GAIN
    return grid.reshape(-1)[:n_elements]


def draw_steps(source: np.random.Generator, n_elements: int, rate: float) -> Masters:
    """What an adaptive optimizer adds: about the learning rate everywhere, with either sign."""
    steps = source.standard_normal(n_elements, dtype=np.float32)
    steps *= STEP_SPREAD
    steps += np.float32(1.0)
    np.abs(steps, out=steps)
    steps *= np.float32(rate)
    signs = source.integers(-128, 128, n_elements, dtype=np.int8)
    return np.copysign(steps, signs, out=steps)


def round_masters(masters: Masters, form: Format) -> Bits:
    """The masters as bits of the published type, rounded to nearest-even."""
    if math.isfinite(form.limit):
        masters = np.clip(masters, np.float32(-form.limit), np.float32(form.limit))
    return cast(Bits, masters.astype(form.float_type).view(form.dtype.bits_dtype))


def rate_for(form: Format, density: float, seed: int, n_blocks: int) -> float:
    """The learning rate that changes this share of elements, found by bisection on a sample.

    The sample is the start of the very blocks that the rate is for, since their spreads differ.
    """
    masters = _sample_masters(form, seed, n_blocks)
    steps = draw_steps(random_source(seed, n_blocks), len(masters), 1.0)
    old = round_masters(masters, form)
    low, high = 1e-14 * form.scale, 1.0 * form.scale
    for _ in range(N_BISECTIONS):
        rate = math.sqrt(low * high)
        new = round_masters(masters + steps * np.float32(rate), form)
        too_many = np.count_nonzero(old != new) > density * len(old)
        low, high = (low, rate) if too_many else (rate, high)
    return math.sqrt(low * high)


def _sample_masters(form: Format, seed: int, n_blocks: int) -> Masters:
    n_sampled = max(1, min(n_blocks, MAX_SAMPLE_BLOCKS))
    sources = (random_source(seed, rank * n_blocks // n_sampled) for rank in range(n_sampled))
    each = SAMPLE_ELEMENTS // n_sampled
    return np.concatenate([draw_masters(source, each, form) for source in sources])


_Change: TypeAlias = Callable[[np.random.Generator, Bits, Bits], None]


def _check_density(density: float) -> None:
    if not 0.0 <= density <= 1.0:
        raise StopError(f"a density is a share between 0 and 1, not {density}")


def _change_for(form: Format, density: float, seed: int, n_blocks: int) -> _Change:
    """The kind of change that reaches the density.

    A step of any real size changes every fp32 element, so there the density is how many elements
    take a step at all, as when only some experts or rows saw a gradient.
    """
    if density == 1.0:
        return lambda source, old, new: _replace(source, old, new, form)
    if form.dtype.name == "F32":
        return lambda source, old, new: _step_some(source, old, new, form, density)
    rate = rate_for(form, density, seed, n_blocks)
    return lambda source, old, new: _step_all(source, old, new, form, rate)


def _step_all(source: np.random.Generator, old: Bits, new: Bits, form: Format, rate: float) -> None:
    masters = draw_masters(source, len(old), form)
    old[:] = round_masters(masters, form)
    masters += draw_steps(source, len(old), rate)
    new[:] = round_masters(masters, form)


def _step_some(
    source: np.random.Generator, old: Bits, new: Bits, form: Format, share: float
) -> None:
    masters = draw_masters(source, len(old), form)
    old[:] = round_masters(masters, form)
    steps = draw_steps(source, len(old), F32_RATE)
    steps *= source.random(len(old), dtype=np.float32) < share
    masters += steps
    new[:] = round_masters(masters, form)


def _replace(source: np.random.Generator, old: Bits, new: Bits, form: Format) -> None:
    """Independent values; where two happen to agree, the last bit is flipped."""
    old[:] = round_masters(draw_masters(source, len(old), form), form)
    new[:] = round_masters(draw_masters(source, len(old), form), form)
    new ^= old == new
