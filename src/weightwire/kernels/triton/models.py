"""The models of many pieces, as tables that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import N_CLASSES, PROBABILITY_SUM, ClassModel, StepTable
from weightwire.kernels.gaps import GAP_CUMULATIVE
from weightwire.kernels.triton.launch import to_device
from weightwire.kernels.triton.uploads import send_tables
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
    """[piece, class, 128], ascending; or the first of each class, if the others follow it"""
    frequencies: npt.NDArray[np.uint16]
    """[piece, class, 128]"""

    def some(self, numbers: slice | npt.NDArray[np.intp]) -> ModelArrays:
        """A few of them."""
        return ModelArrays(*(getattr(self, field.name)[numbers] for field in fields(self)))

    def model(self, number: int) -> ClassModel:
        """One of them, as everyone else knows it."""
        tokens = self.tokens[number]
        if tokens.shape[-1] < ROW:
            tokens = tokens + np.arange(ROW, dtype=np.uint8)
        tables = zip(
            self.n_tokens[number].tolist(),
            tokens.tolist(),
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
class StepModels:
    """Step tables on the device."""

    tables: torch.Tensor
    """int32 [piece, class]: first token, number of tokens, and whether single steps are coded."""
    tokens: torch.Tensor
    """uint8 [piece, class, 128]"""
    entries: torch.Tensor
    """int32 [piece, class, 128]: the sum of frequencies before each token, and its frequency."""

    def part(self, numbers: slice) -> StepModels:
        """Those of some pieces that follow each other."""
        return StepModels(self.tables[numbers], self.tokens[numbers], self.entries[numbers])


class DeviceModels:
    """Models on a device. Their step tables, which are large, are sent when they are first needed."""

    def __init__(self, arrays: ModelArrays, dtype: DType, device: torch.device) -> None:
        """Send models, without waiting for them to arrive."""
        classes = (arrays.log2_weights | arrays.expected << 4).astype(np.uint8)
        heaviest = arrays.log2_weights.max(axis=1, initial=0).astype(np.int32)
        base_keys, self.heaviest, sent = send_tables(
            [arrays.base_keys.astype(np.int32), heaviest, classes.reshape(-1)], device
        )
        self.elements = _by_key(base_keys, sent.view(-1, N_CLASSES), dtype)
        """int32 [piece, key]: what a key says of an element; see the masks below."""
        self.n_keys = dtype.key_mask + 1
        self.has_expected = bool(arrays.expected.any())
        self._send_steps: Callable[[], StepModels] = cache(lambda: _send_steps(arrays, device))

    @property
    def tables(self) -> torch.Tensor:
        """As ``StepModels`` has them."""
        return self._send_steps().tables

    @property
    def tokens(self) -> torch.Tensor:
        """As ``StepModels`` has them."""
        return self._send_steps().tokens

    @property
    def entries(self) -> torch.Tensor:
        """As ``StepModels`` has them."""
        return self._send_steps().entries

    def part(self, numbers: slice) -> DeviceModels:
        """Those of some pieces that follow each other."""
        part = copy(self)
        part.elements, part.heaviest = self.elements[numbers], self.heaviest[numbers]
        part._send_steps = cache(lambda: self._send_steps().part(numbers))
        return part


# What ``elements`` holds for a key.
WEIGHT_MASK = (1 << 9) - 1
MARK_SHIFT = 12
"""Eight bits from here on are set where a change is expected: one for each place in a group."""
EXPECTED_SHIFT = 20
"""Far enough above the weight that sums over a few elements hold both, side by side."""
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


def repeated(model: ClassModel, n: int) -> ModelArrays:
    """One model for so many pieces; nothing is copied."""
    one = arrays_of([model])
    columns = (getattr(one, field.name)[0] for field in fields(one))
    return ModelArrays(*(np.broadcast_to(column, (n, *column.shape)) for column in columns))


def _send_steps(arrays: ModelArrays, device: torch.device) -> StepModels:
    is_one_step = (arrays.n_tokens == 1) & (arrays.tokens[:, :, 0] == 0)
    tables = (
        arrays.tokens[:, :, 0].astype(np.int32)
        | arrays.n_tokens.astype(np.int32) << COUNT_SHIFT
        | is_one_step.astype(np.int32) << ONE_STEP_SHIFT
    )
    # Most of a row is past the last token: nobody looks there.
    most = max(1, int(arrays.n_tokens.max(initial=0)))
    frequencies = np.ascontiguousarray(arrays.frequencies[:, :, :most]).view(np.int16)
    tokens = np.ascontiguousarray(arrays.tokens)
    flat = [tables.reshape(-1), tokens.reshape(-1), frequencies.reshape(-1)]
    shape = (len(arrays.base_keys), N_CLASSES)
    sent = send_tables(flat, device)
    counts = sent[2].view(*shape, most).int()
    starts = counts.cumsum(-1, dtype=torch.int32) - counts
    entries = torch.zeros((*shape, ROW), dtype=torch.int32, device=device)
    entries[:, :, :most] = starts | counts << FREQUENCY_SHIFT
    every = sent[1].view(*shape, -1)
    if every.shape[-1] < ROW:
        every = every + torch.arange(ROW, dtype=torch.uint8, device=device)
    return StepModels(sent[0].view(shape), every, entries)


def _by_key(base_keys: torch.Tensor, classes: torch.Tensor, dtype: DType) -> torch.Tensor:
    """What every key says of an element, from what its class says: log2 weight, and bit 4."""
    n_keys = dtype.key_mask + 1
    elements = torch.empty((len(base_keys), n_keys), dtype=torch.int32, device=base_keys.device)
    _by_key_kernel[(len(base_keys),)](
        base_keys, classes, elements, N_KEYS=n_keys, N_CLASSES=N_CLASSES,
        MARKS=0xFF << MARK_SHIFT | 1 << EXPECTED_SHIFT, CLASS_SHIFT=CLASS_SHIFT,
        LOG2_SHIFT=LOG2_SHIFT, num_warps=1,
    )  # fmt: skip
    return elements


@triton.jit
def _by_key_kernel(
    base_keys, classes, elements,
    N_KEYS: tl.constexpr, N_CLASSES: tl.constexpr, MARKS: tl.constexpr,
    CLASS_SHIFT: tl.constexpr, LOG2_SHIFT: tl.constexpr,
):  # fmt: skip
    """One piece."""
    piece = tl.program_id(0)
    key = tl.arange(0, N_KEYS)
    own = tl.minimum(tl.maximum(key - tl.load(base_keys + piece), 0), N_CLASSES - 1)
    told = tl.load(classes + piece * N_CLASSES + own).to(tl.int32)
    log2_weight = told & 15
    packed = tl.full((N_KEYS,), 1, tl.int32) << log2_weight
    packed |= tl.where((told >> 4) != 0, MARKS, 0)
    packed |= (own << CLASS_SHIFT) | (log2_weight << LOG2_SHIFT)
    tl.store(elements + piece * N_KEYS + key, packed)


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
