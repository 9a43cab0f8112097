"""The one pass over the old bits of coded chunks: sums of weights, to find events by.

A *row* is 128 elements. Its sum of weights takes two bytes, and a third says which part of that is
its first half's: a hundredth of what they stand for, and enough to come within half a row of almost
any event. On the way the elements that are expected to change are counted, and the
rows marked that have any, to be listed once there is room for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.elements import (
    EXPECTED_SHIFT,
    SUMMED_MASK,
    WEIGHT_SUM_MASK,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at, register_limit
from weightwire.kernels.triton.memories import VECTOR_BYTES
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

ROW = tl.constexpr(128)
HALF = tl.constexpr(64)
ROWS = tl.constexpr(32)
SPAN = tl.constexpr(4096)
"""Elements that are looked at together: as many rows as a word has bits, to mark them with."""

SPAN_ELEMENTS: int = SPAN.value
SPAN_ROWS: int = ROWS.value

PART = tl.constexpr(8)
"""Spans that one program lists the expected elements of."""

TOGETHER = tl.constexpr(4)
"""Marked rows that it looks at together."""

_WARPS = 4
_REGISTERS = 64
"""As few as leave enough warps on a processor to wait for memory in turns."""
_PROGRAMS = 1 << 16
"""Enough to keep every processor busy to the end; chunks are shared out among so many."""


@dataclass(frozen=True)
class CodedChunks:
    """Chunks of some pieces: those that are coded, or those that are dense."""

    piece: torch.Tensor
    start: torch.Tensor
    """int64: the chunk's first element in its piece."""
    n_elements: torch.Tensor
    head: torch.Tensor
    first_word: torch.Tensor
    """int64, in the payload."""
    n_words: torch.Tensor
    first_span: torch.Tensor
    """int64: how many spans the chunks before it have."""
    n_spans: int
    """Of all chunks."""
    most_spans: int
    """Of one chunk."""

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True)
class Marks:
    """Where elements are that are expected to change."""

    rows: torch.Tensor
    """int32 per span: a bit for each row that has any."""
    before: torch.Tensor
    """int64 per span: how many the spans before it have."""
    counts: torch.Tensor
    """int32: how many each chunk has."""


@dataclass(frozen=True)
class WeightIndex:
    """What the pass found."""

    sums: torch.Tensor
    """int16, 32 per span, as unsigned: the weight of every row."""
    hints: torch.Tensor
    """uint8, 32 per span: the weight of a row's first half, without its lowest bits."""
    told: torch.Tensor
    """int32 [piece, key]: a weight, and whether a change is expected; nothing else, to be summed."""
    marks: Marks


@dataclass(frozen=True)
class Expected:
    """The elements of every chunk that are expected to change, chunk after chunk."""

    counts: torch.Tensor
    """int32, per chunk."""
    first: torch.Tensor
    """int64: where each chunk's begin."""
    places: torch.Tensor
    """int32: each one's place in its chunk."""


def index_weights(
    old: Bucket, chunks: CodedChunks, models: DeviceModels, dtype: DType
) -> WeightIndex:
    """Look at every element of these chunks once."""
    n_marked = chunks.n_spans if models.has_expected else 0
    sums = torch.empty(chunks.n_spans * SPAN_ROWS, dtype=torch.int16, device=old.device)
    hints = torch.empty(chunks.n_spans * SPAN_ROWS, dtype=torch.uint8, device=old.device)
    rows = torch.empty(n_marked, dtype=torch.int32, device=old.device)
    counts = torch.empty(n_marked, dtype=torch.int16, device=old.device)
    told = models.elements & SUMMED_MASK.value
    n_parts = min(chunks.most_spans, max(_PROGRAMS // len(chunks), 1))
    alignment = old.alignment
    _index_kernel[(len(chunks), n_parts)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.first_span,
        told, sums, hints, rows, counts,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, HAS_EXPECTED=models.has_expected, ALIGNMENT=alignment,
        IS_PAIRED=dtype.n_bytes == 2 and alignment == VECTOR_BYTES, num_warps=_WARPS,
        **register_limit(_REGISTERS),
    )  # fmt: skip
    return WeightIndex(sums, hints, told, _marks(chunks, rows, counts))


def _marks(chunks: CodedChunks, rows: torch.Tensor, counts: torch.Tensor) -> Marks:
    if not len(rows):
        none = torch.zeros(len(chunks), dtype=torch.int32, device=rows.device)
        return Marks(rows, none, none)
    ends = counts.cumsum(0, dtype=torch.int64)
    last = ends[chunks.first_span.roll(-1) - 1]
    before = ends.sub_(counts)
    return Marks(rows, before, (last - before[chunks.first_span]).int())


@triton.jit
def hint_shift(weight):
    """How many low bits a hint leaves out, so that eight are enough for this row's weight."""
    # Such a sum fits a float's fraction, so its exponent is exact.
    exponent = (weight.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent - 7, 0)


@triton.jit
def _note_rows(told, left, sums, hints, marks, counts, span, HAS_EXPECTED: tl.constexpr):
    """Write down what a span's rows weigh, which have expected elements, and how many there are."""
    row = tl.arange(0, ROWS)
    first, second = tl.split(tl.sum(tl.reshape(told, (ROWS, 2, HALF)), 2))
    summed = first + second
    weight = summed & WEIGHT_SUM_MASK
    tl.store(sums + span * ROWS + row, weight.to(tl.uint16).to(tl.int16, bitcast=True))
    # A row that is not whole is never read from its end: there is no telling what lies behind it.
    hint = tl.where((row + 1) * ROW <= left, (first & WEIGHT_SUM_MASK) >> hint_shift(weight), 255)
    tl.store(hints + span * ROWS + row, hint.to(tl.uint8))
    if HAS_EXPECTED:
        count = (summed >> EXPECTED_SHIFT).to(tl.int64)
        # Both in one sum: every mark is a bit of its own, so that none carries into the count.
        both = tl.sum(count << 32 | tl.where(count > 0, 1, 0).to(tl.int64) << row, 0)
        tl.store(marks + span, both.to(tl.int32))
        tl.store(counts + span, (both >> 32).to(tl.int16))


@triton.jit
def _index_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, first_span,
    all_told, sums, hints, marks, counts,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, N_KEYS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr, ALIGNMENT: tl.constexpr, IS_PAIRED: tl.constexpr,
):  # fmt: skip
    """Some spans of one chunk; whole ones are read without masks, in the widest loads there are."""
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    piece = tl.load(chunk_piece + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    old = memory_at(olds, piece, KIND) + tl.load(chunk_start + chunk)
    first = tl.load(first_span + chunk)
    table = all_told + piece * N_KEYS
    # The table is looked into where all warps share it: an address there is one small number.
    known = tl.load(table + tl.arange(0, N_KEYS))
    n_whole = n // SPAN
    for number in range(part, n_whole, tl.num_programs(1)):
        # Said of the sum, since the compiler does not follow alignment through a cast.
        here = tl.multiple_of(old + number * SPAN, ALIGNMENT)
        if IS_PAIRED:
            pairs = tl.load(here.to(tl.pointer_type(tl.uint32)) + tl.arange(0, SPAN // 2))
            bits = tl.reshape(tl.join(pairs, pairs >> 16), (SPAN,))
        else:
            bits = tl.load(here + tl.arange(0, SPAN)).to(tl.uint32)
        told = tl.gather(known, ((bits >> SHIFT) & MASK).to(tl.int32), 0)
        _note_rows(told, SPAN, sums, hints, marks, counts, first + number, HAS_EXPECTED)
    left = n - n_whole * SPAN
    if (left > 0) & (n_whole % tl.num_programs(1) == part):
        place = tl.arange(0, SPAN)
        bits = tl.load(old + n_whole * SPAN + place, mask=place < left, other=0).to(tl.uint32)
        told = tl.where(place < left, told_by_key(bits, table, SHIFT, MASK), 0)
        _note_rows(told, left, sums, hints, marks, counts, first + n_whole, HAS_EXPECTED)


def list_expected(
    old: Bucket,
    chunks: CodedChunks,
    marks: Marks,
    models: DeviceModels,
    dtype: DType,
    n_expected: int,
) -> Expected:
    """Write down the elements that are expected to change: ``n_expected`` of them in all."""
    places = torch.empty(n_expected, dtype=torch.int32, device=old.device)
    if not n_expected:
        return Expected(marks.counts, chunks.first_span, places)
    # All memory is made before the launch: should it run out, nothing is at work on what is let go.
    expected = Expected(marks.counts, marks.before[chunks.first_span], places)
    is_aligned = old.alignment == VECTOR_BYTES
    _list_expected_kernel[(len(chunks), triton.cdiv(chunks.most_spans, PART.value))](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.first_span,
        models.elements, marks.rows, marks.before, places,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, WIDTH=8 * dtype.n_bytes,
        PER_UNIT=4 // dtype.n_bytes if is_aligned else 1, num_warps=1,
    )  # fmt: skip
    return expected


@triton.jit
def _take_row(left):
    """The lowest bit's number, less than 0 if there is none, and the bits without it."""
    lowest = left & (~left + 1)
    # A power of two is a float's exponent, and nothing else.
    number = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return number, left ^ lowest


@triton.jit
def _list_units(
    units_at, place, n, table, places, out,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, PER_UNIT: tl.constexpr,
):  # fmt: skip
    """Write down the expected elements of some units, in order; gives the end of what is written.

    A *unit* is a word of several elements where memory allows it, else a single one; ``place`` is
    its first element's in the chunk. All of it is read if one element is there: a word that the
    piece has a part in lies in memory that is there.
    """
    units = tl.load(units_at, mask=place < n, other=0).to(tl.uint32)
    found = tl.zeros_like(place)
    for part in tl.static_range(PER_UNIT):
        told = told_by_key(units, table, SHIFT + part * WIDTH, MASK)
        is_expected = (place + part < n) & (((told >> EXPECTED_SHIFT) & 1) != 0)
        found |= is_expected.to(tl.int32) << part
    count = found & 1
    for part in tl.static_range(1, PER_UNIT):
        count += (found >> part) & 1
    ends = tl.cumsum(count, 0)
    to = places + out + ends - count
    for part in tl.static_range(PER_UNIT):
        is_expected = (found >> part) & 1
        tl.store(to, place + part, mask=is_expected != 0)
        to += is_expected
    return out + tl.max(ends, 0)


@triton.jit
def _list_expected_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, first_span,
    elements, marks, first_expected, places,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, N_KEYS: tl.constexpr,
    WIDTH: tl.constexpr, PER_UNIT: tl.constexpr,
):  # fmt: skip
    """Some spans of one chunk, a few marked rows at a time."""
    UNITS: tl.constexpr = ROW // PER_UNIT
    UNIT: tl.constexpr = KIND if PER_UNIT == 1 else tl.uint32
    chunk = tl.program_id(0)
    begin = tl.program_id(1) * PART
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    piece = tl.load(chunk_piece + chunk)
    old = memory_at(olds, piece, KIND) + tl.load(chunk_start + chunk)
    old_units = old.to(tl.pointer_type(UNIT))
    table = elements + piece * N_KEYS
    first = tl.load(first_span + chunk)
    unit = tl.arange(0, TOGETHER * UNITS)
    end = tl.minimum(begin + PART, tl.cdiv(n, SPAN))
    coming = tl.load(marks + first + begin, mask=begin < end, other=0)
    out = tl.load(first_expected + first + begin, mask=begin < end, other=0)
    for span in range(begin, end):
        left = coming.to(tl.uint32, bitcast=True)
        coming = tl.load(marks + first + span + 1, mask=span + 1 < end, other=0)
        while left != 0:
            at = unit % UNITS
            for turn in tl.static_range(TOGETHER):
                row, left = _take_row(left)
                at += tl.where(unit // UNITS == turn, row * UNITS, 0)
            # What is not taken lies past every chunk.
            place = tl.where(at >= 0, span * SPAN + at * PER_UNIT, n)
            units_at = old_units + span * (SPAN // PER_UNIT) + at
            out = _list_units(units_at, place, n, table, places, out, WIDTH, SHIFT, MASK, PER_UNIT)
