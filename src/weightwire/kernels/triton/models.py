"""The models of many pieces, as tables that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import N_CLASSES, N_TOKENS, PROBABILITY_SUM
from weightwire.kernels.gaps import GAP_CUMULATIVE
from weightwire.kernels.model_batch import ModelBatch
from weightwire.kernels.triton.launch import kept_on
from weightwire.kernels.triton.uploads import send_tables
from weightwire.model import DType


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

    def __init__(self, models: ModelBatch, dtype: DType, device: torch.device) -> None:
        """Send models, without waiting for them to arrive."""
        classes = (models.log2_weights | models.expected << 4).astype(np.uint8)
        heaviest = models.log2_weights.max(axis=1, initial=0).astype(np.int32)
        base_keys, self.heaviest, sent = send_tables(
            [models.base_keys.astype(np.int32), heaviest, classes.reshape(-1)], device
        )
        self.elements = _by_key(base_keys, sent.view(-1, N_CLASSES), dtype)
        """int32 [piece, key]: what a key says of an element; see the masks below."""
        self.n_keys = dtype.key_mask + 1
        self.has_expected = bool(models.expected.any())
        self._send_steps: Callable[[], StepModels] = cache(lambda: _send_steps(models, device))

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


def _send_steps(models: ModelBatch, device: torch.device) -> StepModels:
    is_one_step = (models.n_tokens == 1) & (models.first_token == 0)
    tables = (
        models.first_token.astype(np.int32)
        | models.n_tokens.astype(np.int32) << COUNT_SHIFT
        | is_one_step.astype(np.int32) << ONE_STEP_SHIFT
    )
    # Most of a row is past the last token: nobody looks there.
    most = max(1, int(models.n_tokens.max(initial=0)))
    frequencies = np.ascontiguousarray(models.frequencies[:, :, :most]).view(np.int16)
    firsts = np.ascontiguousarray(models.first_token)
    shape = (len(models), N_CLASSES)
    sent = send_tables([tables.reshape(-1), firsts.reshape(-1), frequencies.reshape(-1)], device)
    counts = sent[2].view(*shape, most).int()
    starts = counts.cumsum(-1, dtype=torch.int32) - counts
    entries = torch.zeros((*shape, N_TOKENS), dtype=torch.int32, device=device)
    entries[:, :, :most] = starts | counts << FREQUENCY_SHIFT
    tokens = sent[1].view(*shape, 1) + torch.arange(N_TOKENS, dtype=torch.uint8, device=device)
    return StepModels(sent[0].view(shape), tokens, entries)


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
    return kept_on(device, rows)


@cache
def reciprocals(device: torch.device) -> torch.Tensor:
    """int64 [4097]: floor(2^64 / frequency), as unsigned; 2^64 - 1 for a frequency of 1.

    The high word of a product with it is the quotient, or one less: a remainder tells.
    """
    values = [0, (1 << 64) - 1, *((1 << 64) // n for n in range(2, PROBABILITY_SUM + 1))]
    return kept_on(device, np.array(values, dtype=np.uint64).view(np.int64))


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
    return kept_on(device, rows.astype(np.uint32).view(np.int32))
