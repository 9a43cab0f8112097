"""The device's way to 8-bit floats: scales and bits are made where the weights are.

Of finite weights they are those of the host, bit for bit; nothing waits for the host. Weights are
widened ``PART_ELEMENTS`` at a time, whatever the shape of a matrix and its blocks: a few copies of
16 MiB each, beside what is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weightwire.diff.fp8 import MAX, Scales, matrix_shape, power_of_two_bits
from weightwire.diff.state import StateReader, require_device_bits
from weightwire.diff.views import torch_type

PART_ELEMENTS = 1 << 22
"""Weights that are widened to fp32 at once: enough to hide a launch, few enough for a GPU's cache."""


@dataclass(frozen=True)
class _Part:
    """A rectangle of a matrix whose elements follow each other in memory."""

    row: int
    column: int
    n_rows: int
    n_columns: int


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix of a state, on a device."""

    state: StateReader
    name: str
    device: torch.device
    block: int | None

    def scales(self, kind: Scales) -> torch.Tensor:
        """What each block is divided by, in a matrix of blocks; one number without blocks."""
        return _scales(self._peaks(self.block) if self.block else self._peak(), kind)

    def quantised(self, start: int, stop: int, scales: torch.Tensor) -> torch.Tensor:
        """The elements of a run in e4m3."""
        made = torch.empty(stop - start, dtype=torch.float8_e4m3fn, device=self.device)
        _, n_columns = self._shape
        for part in _parts(n_columns, start, stop):
            first = part.row * n_columns + part.column - start
            room = made[first : first + part.n_rows * part.n_columns]
            scaled = self._numbers(part) / self._spread(part, scales)
            room.view(scaled.shape).copy_(scaled.clamp_(-float(MAX), float(MAX)))
        return made

    @property
    def _shape(self) -> tuple[int, int]:
        return matrix_shape(self.state.specs[self.name])

    def _peak(self) -> torch.Tensor:
        """The largest magnitude of all."""
        n_rows, n_columns = self._shape
        parts = _parts(n_columns, 0, n_rows * n_columns)
        peaks = [self._numbers(part).abs().amax().reshape(1) for part in parts]
        return torch.cat([torch.zeros(1, device=self.device), *peaks]).amax(0, keepdim=True)

    def _peaks(self, block: int) -> torch.Tensor:
        """The largest magnitude of each block: of columns first, then across."""
        n_rows, n_columns = self._shape
        width = min(block, n_columns)
        peaks = torch.zeros(-(-n_rows // block), -(-n_columns // width), device=self.device)
        for first, last in _bands(n_rows, n_columns, block):
            for part in _parts(n_columns, first * n_columns, last * n_columns):
                n_down = max(part.n_rows // block, 1)
                numbers = self._numbers(part).view(n_down, -1, part.n_columns)
                across = _across(numbers.abs().amax(1), part.column % width, width)
                row, column = part.row // block, part.column // width
                found = peaks[row : row + n_down, column : column + across.shape[1]]
                found.copy_(torch.maximum(found, across))
        return peaks

    def _spread(self, part: _Part, scales: torch.Tensor) -> torch.Tensor:
        """The scale of each element of a part."""
        if self.block is None:
            return scales
        found = scales.index_select(0, self._blocks(part.row, part.n_rows, self.block))
        return found.index_select(1, self._blocks(part.column, part.n_columns, self.block))

    def _blocks(self, first: int, n: int, block: int) -> torch.Tensor:
        """The number of the block of each of so many rows or columns."""
        # Short numbers, counted from the first block's start: a row may have very many columns.
        steps = torch.arange(
            first % block, first % block + n, dtype=torch.int32, device=self.device
        )
        return steps.div_(block, rounding_mode="floor").add_(first // block)

    def _numbers(self, part: _Part) -> torch.Tensor:
        """A part as fp32: the live memory itself where it is that already."""
        start = part.row * self._shape[1] + part.column
        stop = start + part.n_rows * part.n_columns
        bits = require_device_bits(self.state, self.name, start, stop)
        numbers = bits.view(torch_type(self.state.specs[self.name].dtype)).to(torch.float32)
        return numbers.view(part.n_rows, part.n_columns)


def _parts(n_columns: int, start: int, stop: int) -> Iterator[_Part]:
    """A run of elements, cut into rectangles: whole rows together, else parts of one."""
    while start < stop:
        row, column = divmod(start, n_columns)
        n_rows = min(stop - start, PART_ELEMENTS) // n_columns
        if column == 0 and n_rows:
            part = _Part(row, 0, n_rows, n_columns)
        else:
            part = _Part(row, column, 1, min(n_columns - column, stop - start, PART_ELEMENTS))
        yield part
        start += part.n_rows * part.n_columns


def _bands(n_rows: int, n_columns: int, block: int) -> Iterator[tuple[int, int]]:
    """Rows of whole blocks, as many as make a part; the last ones, if they are fewer, by themselves."""
    height = max(PART_ELEMENTS // (block * n_columns), 1) * block
    n_whole = n_rows - n_rows % block
    for first in range(0, n_whole, height):
        yield first, min(first + height, n_whole)
    if n_whole < n_rows:
        yield n_whole, n_rows


def _across(peaks: torch.Tensor, n_before: int, width: int) -> torch.Tensor:
    """The peaks of columns, those of each block in one; the first block lacks ``n_before``."""
    n_after = -(n_before + peaks.shape[1]) % width
    padded = torch.nn.functional.pad(peaks, (n_before, n_after))
    return padded.view(len(peaks), -1, width).amax(2)


def _scales(peaks: torch.Tensor, kind: Scales) -> torch.Tensor:
    """The twin of the host's; divided by a tensor, since a GPU multiplies by a number's inverse."""
    largest = torch.full_like(peaks, float(MAX))
    sound = torch.where(torch.isfinite(peaks) & (peaks > 0), peaks, largest)
    scales = (sound / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    if kind == "power of two":
        scales = power_of_two_bits(scales.view(torch.int32)).view(torch.float32)
    return scales
