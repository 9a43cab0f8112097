"""The models of many pieces, as tables that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels.contract import N_CLASSES, PROBABILITY_SUM, ClassModel, StepTable
from weightwire.kernels.gaps import GAP_CUMULATIVE
from weightwire.kernels.triton.launch import to_device

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

    base_keys: torch.Tensor
    nibbles: torch.Tensor
    """int64: sixteen log2 weights of four bits."""
    expected: torch.Tensor
    """int32: a bit per class."""
    one_step: torch.Tensor
    """int32: classes in which a change by one step is not coded at all."""
    n_tokens: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    """int32 [piece, class, 128]: the sum of frequencies before each token."""
    frequencies: torch.Tensor
    has_expected: bool


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


def upload(arrays: ModelArrays, device: torch.device) -> DeviceModels:
    """Send models to a device, without waiting for them to arrive."""
    shifts = np.arange(N_CLASSES, dtype=np.uint64)
    nibbles = (arrays.log2_weights.astype(np.uint64) << (4 * shifts)).sum(axis=1, dtype=np.uint64)
    is_one_step = (arrays.n_tokens == 1) & (arrays.tokens[:, :, 0] == 0)
    frequencies = to_device(arrays.frequencies.astype(np.int32), device)
    return DeviceModels(
        base_keys=to_device(arrays.base_keys, device),
        nibbles=to_device(nibbles.view(np.int64), device),
        expected=to_device(_as_mask(arrays.expected), device),
        one_step=to_device(_as_mask(is_one_step), device),
        n_tokens=to_device(arrays.n_tokens.astype(np.int32), device),
        tokens=to_device(arrays.tokens, device),
        starts=(frequencies.cumsum(-1, dtype=torch.int32) - frequencies),
        frequencies=frequencies,
        has_expected=bool(arrays.expected.any()),
    )


def _as_mask(flags: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    shifts = np.arange(N_CLASSES, dtype=np.int32)
    mask: npt.NDArray[np.int32] = (flags.astype(np.int32) << shifts).sum(axis=1, dtype=np.int32)
    return mask


def gap_starts(device: torch.device) -> torch.Tensor:
    """int32 [8, 32]: the cumulative frequencies of every gap table; rows are padded with 2^12."""
    rows = np.full((8, 32), PROBABILITY_SUM, dtype=np.int32)
    for number, cumulative in enumerate(GAP_CUMULATIVE):
        rows[number, : len(cumulative)] = cumulative
    return to_device(rows, device)
