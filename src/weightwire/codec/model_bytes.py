"""A class model as bytes. What ``model_bytes`` writes, ``parse_model`` reads."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from weightwire import limits
from weightwire.codec.classes import MAX_LOG2_WEIGHT
from weightwire.errors import MalformedRecord
from weightwire.kernels.contract import N_CLASSES, PROBABILITY_SUM, ClassModel, StepTable
from weightwire.kernels.steps import max_token
from weightwire.model import DType

_HEAD = struct.Struct("<BBH")
SAME_TABLE = 0xFF
"""Where a table's first token would stand: this class has the table of the one before."""
EXPECTED = 0x10
"""The bit beside a class's weight."""
TWO_BYTES = 0x80
"""Frequencies from here on take two bytes, the first with this bit."""


def model_bytes(model: ClassModel, chunk_log2: int) -> bytes:
    """The model, padded to whole words."""
    out = bytearray(_HEAD.pack(chunk_log2, 0, model.base_key))
    for log2_weight, expected in zip(model.log2_weights, model.expected, strict=True):
        out.append(log2_weight | (EXPECTED if expected else 0))
    previous = None
    for table in model.steps:
        out += bytes([SAME_TABLE]) if table == previous else _table_bytes(table)
        previous = table
    return bytes(out) + bytes(-len(out) % 4)


def parse_model(body: npt.NDArray[np.uint8], dtype: DType) -> tuple[ClassModel, int, int]:
    """The model at the start of a body, its chunk size, and where the directory starts.

    Raises:
        MalformedRecord: a field is out of range, or the body ends too soon.
    """
    cursor = _Cursor(body)
    chunk_log2, reserved, base_key = _HEAD.unpack(cursor.take(_HEAD.size))
    if not limits.MIN_CHUNK_LOG2 <= chunk_log2 <= limits.MAX_CHUNK_LOG2 or reserved:
        raise MalformedRecord(f"chunk size 2^{chunk_log2} is out of range")
    if base_key > dtype.key_mask:
        raise MalformedRecord(f"class window starts at {base_key}, past every key")
    classes = cursor.take(N_CLASSES)
    if any(c & ~EXPECTED > MAX_LOG2_WEIGHT for c in classes) or classes[-1]:
        raise MalformedRecord("a class weight is out of range")
    steps: list[StepTable] = []
    for _ in classes:
        steps.append(_parse_table(cursor, steps, dtype))
    if any(cursor.take(-cursor.at % 4)):
        raise MalformedRecord("a class model's padding is not zero")
    log2_weights = tuple(c & ~EXPECTED for c in classes)
    expected = tuple(bool(c & EXPECTED) for c in classes)
    return ClassModel(base_key, log2_weights, expected, tuple(steps)), chunk_log2, cursor.at


class _Cursor:
    """Reads bytes forward and refuses to pass the end."""

    def __init__(self, body: npt.NDArray[np.uint8]) -> None:
        # A model is at most 16 tables of 128 two-byte frequencies: nothing beyond can matter.
        self._bytes = body[: 16 * 300].tobytes()
        self.at = 0

    def take(self, n_bytes: int) -> bytes:
        part = self._bytes[self.at : self.at + n_bytes]
        if len(part) < n_bytes:
            raise MalformedRecord("a record ends inside its class model")
        self.at += n_bytes
        return part

    def byte(self) -> int:
        return self.take(1)[0]


def _table_bytes(table: StepTable) -> bytes:
    out = bytearray([table.tokens[0], len(table.tokens)])
    if len(table.tokens) > 1:
        for frequency in table.frequencies:
            out += bytes([frequency]) if frequency < TWO_BYTES else _two_bytes(frequency)
    return bytes(out)


def _two_bytes(frequency: int) -> bytes:
    """Frequencies of 128 and more: seven low bits with the top bit set, then the rest."""
    return bytes([TWO_BYTES | frequency & 0x7F, frequency >> 7])


def _parse_table(cursor: _Cursor, before: list[StepTable], dtype: DType) -> StepTable:
    first = cursor.byte()
    if first == SAME_TABLE:
        if not before:
            raise MalformedRecord("the first step table refers to one before it")
        return before[-1]
    count = cursor.byte()
    if count == 0 or first + count - 1 > max_token(dtype):
        raise MalformedRecord(f"a step table has {count} tokens from {first}")
    frequencies = (PROBABILITY_SUM,) if count == 1 else _parse_frequencies(cursor, count)
    return StepTable(tuple(range(first, first + count)), frequencies)


def _parse_frequencies(cursor: _Cursor, count: int) -> tuple[int, ...]:
    frequencies = []
    for _ in range(count):
        low = cursor.byte()
        frequency = low if low < TWO_BYTES else low & 0x7F | cursor.byte() << 7
        if low >= TWO_BYTES and frequency < TWO_BYTES:
            raise MalformedRecord("a step table says a small frequency in two bytes")
        frequencies.append(frequency)
    if sum(frequencies) != PROBABILITY_SUM or 0 in frequencies:
        raise MalformedRecord("a step table's frequencies do not sum to 4096")
    return tuple(frequencies)
