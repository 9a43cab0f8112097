"""The models of many pieces, as tables that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels.contract import N_CLASSES, PROBABILITY_SUM, ClassModel, StepTable
from weightwire.kernels.gaps import GAP_CUMULATIVE
from weightwire.kernels.triton.launch import to_device
from weightwire.model import DType

ROW = 128
"""Entries of a step table's row; the sums' rows have one more in use only if all 128 are."""


@dataclass(frozen=True)
class ModelArrays:
    """Models on the host, one row per piece."""

    base_keys: npt.NDArray[np.int32]
    log2_weights: npt.NDArray[np.uint8]
    """[piece, class]"""
    expected: npt.NDArray[np.uint8]
    n_tokens: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.uint8]
    """[piece, class, 128], ascending"""
    frequencies: npt.NDArray[np.uint16]
    """[piece, class, 128]"""

    def some(self, numbers: npt.NDArray[np.intp]) -> ModelArrays:
        """A few of them."""
        return ModelArrays(*(getattr(self, field.name)[numbers] for field in fields(self)))

    def model(self, number: int) -> ClassModel:
        """One of them, as everyone else knows it."""
        tables = zip(
            self.n_tokens[number].tolist(),
            self.tokens[number].tolist(),
            self.frequencies[number].tolist(),
            strict=True,
        )
        return ClassModel(
            int(self.base_keys[number]),
            tuple(self.log2_weights[number].tolist()),
            tuple(bool(flag) for flag in self.expected[number]),
            tuple(StepTable(tuple(t[:n]), tuple(f[:n])) for n, t, f in tables),
        )


@dataclass(frozen=True)
class DeviceModels:
    """The same on the device."""

    elements: torch.Tensor
    """int32 [piece, key]: what a key says of an element; see the masks below."""
    tables: torch.Tensor
    """int32 [piece, class]: first token, number of tokens, and whether single steps are coded."""
    tokens: torch.Tensor
    """uint8 [piece, class, 128]"""
    entries: torch.Tensor
    """int32 [piece, class, 128]: the sum of frequencies before each token, and its frequency."""
    heaviest: torch.Tensor
    """int32 [piece]: the log2 of the largest weight."""
    n_keys: int
    has_expected: bool


# What ``elements`` holds for a key.
WEIGHT_MASK = (1 << 9) - 1
EXPECTED_SHIFT = 20
"""Far enough above the weight that sums over a tile hold both, side by side."""
CLASS_SHIFT = 21
LOG2_SHIFT = 25

# What ``tables`` holds for a class.
COUNT_SHIFT = 8
ONE_STEP_SHIFT = 16
"""Set where a change by one step is not coded at all."""

FREQUENCY_SHIFT = 12
"""Where the frequency stands in an entry; the sum of those before it stands below."""


def arrays_of(models: Sequence[ClassModel]) -> ModelArrays:
    """Models one by one, as arrays."""
    shape = (len(models), N_CLASSES)
    tokens = np.zeros((*shape, ROW), dtype=np.uint8)
    frequencies = np.zeros((*shape, ROW), dtype=np.uint16)
    n_tokens = np.zeros(shape, dtype=np.uint8)
    for p, model in enumerate(models):
        for c, table in enumerate(model.steps):
            n_tokens[p, c] = len(table.tokens)
            tokens[p, c, : len(table.tokens)] = table.tokens
            frequencies[p, c, : len(table.tokens)] = table.frequencies
    return ModelArrays(
        np.array([model.base_key for model in models], dtype=np.int32),
        np.array([model.log2_weights for model in models], dtype=np.uint8).reshape(shape),
        np.array([model.expected for model in models], dtype=np.uint8).reshape(shape),
        n_tokens,
        tokens,
        frequencies,
    )


def upload(arrays: ModelArrays, dtype: DType, device: torch.device) -> DeviceModels:
    """Send models to a device, without waiting for them to arrive."""
    frequencies = to_device(arrays.frequencies.view(np.int16), device).int()
    starts = frequencies.cumsum(-1, dtype=torch.int32) - frequencies
    is_one_step = (arrays.n_tokens == 1) & (arrays.tokens[:, :, 0] == 0)
    tables = (
        arrays.tokens[:, :, 0].astype(np.int32)
        | arrays.n_tokens.astype(np.int32) << COUNT_SHIFT
        | is_one_step.astype(np.int32) << ONE_STEP_SHIFT
    )
    return DeviceModels(
        elements=to_device(_by_key(arrays, dtype), device),
        tables=to_device(tables, device),
        tokens=to_device(arrays.tokens, device),
        entries=starts | frequencies << FREQUENCY_SHIFT,
        heaviest=to_device(arrays.log2_weights.max(axis=1).astype(np.int32), device),
        n_keys=dtype.key_mask + 1,
        has_expected=bool(arrays.expected.any()),
    )


def _by_key(arrays: ModelArrays, dtype: DType) -> npt.NDArray[np.int32]:
    keys = np.arange(dtype.key_mask + 1, dtype=np.int32)
    classes = np.clip(keys - arrays.base_keys[:, None], 0, N_CLASSES - 1)
    log2_weights = np.take_along_axis(arrays.log2_weights, classes, axis=1).astype(np.int32)
    expected = np.take_along_axis(arrays.expected, classes, axis=1).astype(np.int32)
    packed: npt.NDArray[np.int32] = (
        np.int32(1) << log2_weights
        | expected << EXPECTED_SHIFT
        | classes << CLASS_SHIFT
        | log2_weights << LOG2_SHIFT
    ).astype(np.int32)
    return packed


@cache
def gap_entries(device: torch.device) -> torch.Tensor:
    """int32 [8, 32]: every gap table, its symbols as ``entries`` has those of steps."""
    rows = np.zeros((8, 32), dtype=np.int32)
    for number, cumulative in enumerate(GAP_CUMULATIVE):
        borders = np.array(cumulative, dtype=np.int32)
        rows[number, : len(borders) - 1] = borders[:-1] | np.diff(borders) << FREQUENCY_SHIFT
    return to_device(rows, device)


@cache
def reciprocals(device: torch.device) -> torch.Tensor:
    """int64 [4097]: floor(2^64 / frequency), as unsigned; 2^64 - 1 for a frequency of 1.

    The high word of a product with it is the quotient, or one less: a remainder tells.
    """
    values = [0, (1 << 64) - 1, *((1 << 64) // n for n in range(2, PROBABILITY_SUM + 1))]
    return to_device(np.array(values, dtype=np.uint64).view(np.int64), device)


@cache
def gap_slots(device: torch.device) -> torch.Tensor:
    """int32 [8, 4096]: what a reader finds at a slot: symbol, offset in it, frequency."""
    rows = np.zeros((8, PROBABILITY_SUM), dtype=np.int64)
    slot = np.arange(PROBABILITY_SUM)
    for number, cumulative in enumerate(GAP_CUMULATIVE):
        borders = np.array(cumulative)
        symbol = np.searchsorted(borders, slot, side="right") - 1
        frequency = borders[symbol + 1] - borders[symbol]
        rows[number] = symbol | (slot - borders[symbol]) << 8 | frequency << 20
    return to_device(rows.astype(np.uint32).view(np.int32), device)
