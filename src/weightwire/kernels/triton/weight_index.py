"""The one pass over the old bits of coded chunks: sums of weights, to find events by.

A *row* is 128 elements. Its sum of weights takes two bytes, and a third says which part of that is
its first half's, to eight bits: a hundredth of what they stand for, and enough to come within half a
row of almost any event. On the way the elements that are expected
to change are counted, and the rows marked that have any, to be listed once there is room for them.
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
from weightwire.kernels.triton.launch import (
    TRITON_BITS,
    VECTOR_BYTES,
    Bucket,
    alignment_of,
    memory_at,
)
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

ROW = tl.constexpr(128)
HALF = tl.constexpr(64)
ROWS = tl.constexpr(32)
SPAN = tl.constexpr(4096)
"""Elements that are looked at together: as many rows as a word has bits, to mark them with."""

SPAN_ELEMENTS: int = SPAN.value
SPAN_ROWS: int = ROWS.value

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
class WeightIndex:
    """What the pass found."""

    sums: torch.Tensor
    """int16, 32 per span, as unsigned: the weight of every row."""
    hints: torch.Tensor
    """uint8, 32 per span: the weight of a row's first half, without its lowest bits."""
    marks: torch.Tensor
    """int32 per span: a bit for each row with elements that are expected to change."""
    n_expected: torch.Tensor
    """int32 per chunk."""
    told: torch.Tensor
    """int32 [piece, key]: a weight, and whether a change is expected; nothing else, to be summed."""


@dataclass(frozen=True)
class Expected:
    """The elements of every chunk that are expected to change, chunk after chunk."""

    counts: torch.Tensor
    """int32, per chunk."""
    first: torch.Tensor
    """int64: where each chunk's begin."""
    low: torch.Tensor
    """int16: the low half of each one's place in its chunk."""
    high: torch.Tensor
    bits: torch.Tensor
    """Their old bits."""


def index_weights(
    old: Bucket, chunks: CodedChunks, models: DeviceModels, dtype: DType
) -> WeightIndex:
    """Look at every element of these chunks once."""
    words = {"dtype": torch.int32, "device": old.device}
    index = WeightIndex(
        torch.empty(chunks.n_spans * SPAN_ROWS, dtype=torch.int16, device=old.device),
        torch.empty(chunks.n_spans * SPAN_ROWS, dtype=torch.uint8, device=old.device),
        torch.empty(chunks.n_spans if models.has_expected else 0, **words),
        torch.zeros(len(chunks), **words),
        models.elements & SUMMED_MASK.value,
    )
    n_parts = min(chunks.most_spans, max(_PROGRAMS // len(chunks), 1))
    alignment = alignment_of(old.memories)
    _index_kernel[(len(chunks), n_parts)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.first_span,
        index.told, index.sums, index.hints, index.marks, index.n_expected,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, HAS_EXPECTED=models.has_expected, ALIGNMENT=alignment,
        IS_PAIRED=dtype.n_bytes == 2 and alignment == VECTOR_BYTES, num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    return index


@triton.jit
def hint_shift(weight):
    """How many low bits a hint leaves out, so that eight are enough for this row's weight."""
    # Such a sum fits a float's fraction, so its exponent is exact.
    exponent = (weight.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent - 7, 0)


@triton.jit
def _note_rows(told, left, sums, hints, marks, span, HAS_EXPECTED: tl.constexpr):
    """Write down what a span's rows weigh; gives the number of expected elements of each."""
    row = tl.arange(0, ROWS)
    halves = tl.sum(tl.reshape(told, (ROWS, 2, HALF)), 2)
    summed = tl.sum(halves, 1)
    weight = summed & WEIGHT_SUM_MASK
    tl.store(sums + span * ROWS + row, weight.to(tl.uint16).to(tl.int16, bitcast=True))
    first = tl.sum(tl.where(tl.arange(0, 2)[None, :] == 0, halves, 0), 1) & WEIGHT_SUM_MASK
    # A row that is not whole is never read from its end: there is no telling what lies behind it.
    hint = tl.where((row + 1) * ROW <= left, first >> hint_shift(weight), 255)
    tl.store(hints + span * ROWS + row, hint.to(tl.uint8))
    count = summed >> EXPECTED_SHIFT
    if HAS_EXPECTED:
        mark = tl.where(count > 0, 1, 0).to(tl.uint32) << row.to(tl.uint32)
        tl.store(marks + span, tl.sum(mark, 0).to(tl.int32, bitcast=True))
    return count


@triton.jit
def _index_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, first_span,
    all_told, sums, hints, marks, n_expected,
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
    found = tl.zeros((ROWS,), tl.int32)
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
        found += _note_rows(told, SPAN, sums, hints, marks, first + number, HAS_EXPECTED)
    left = n - n_whole * SPAN
    if (left > 0) & (n_whole % tl.num_programs(1) == part):
        place = tl.arange(0, SPAN)
        bits = tl.load(old + n_whole * SPAN + place, mask=place < left, other=0).to(tl.uint32)
        told = tl.where(place < left, told_by_key(bits, table, SHIFT, MASK), 0)
        found += _note_rows(told, left, sums, hints, marks, first + n_whole, HAS_EXPECTED)
    if HAS_EXPECTED:
        tl.atomic_add(n_expected + chunk, tl.sum(found, 0), sem="relaxed")


def list_expected(
    old: Bucket,
    chunks: CodedChunks,
    index: WeightIndex,
    models: DeviceModels,
    dtype: DType,
    n_expected: int,
) -> Expected:
    """Write down the elements that are expected to change: ``n_expected`` of them in all."""
    wide = index.n_expected.long()
    low, high, bits = (
        torch.empty(max(n_expected, 1), dtype=kind, device=old.device)
        for kind in (torch.int16, torch.int16, old.memories[0].dtype)
    )
    expected = Expected(index.n_expected, wide.cumsum(0) - wide, low, high, bits)
    if n_expected:
        _list_expected_kernel[(len(chunks),)](
            old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.first_span,
            index.told, index.marks, expected.counts, expected.first, low, high, bits,
            KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
            N_KEYS=models.n_keys, num_warps=1,
        )  # fmt: skip
    return expected


@triton.jit
def _list_expected_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, first_span,
    all_told, marks, n_expected, first_expected, expected_low, expected_high, expected_bits,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, N_KEYS: tl.constexpr,
):  # fmt: skip
    """One chunk, marked row by marked row."""
    chunk = tl.program_id(0)
    if tl.load(n_expected + chunk) == 0:
        return
    piece = tl.load(chunk_piece + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    old = memory_at(olds, piece, KIND) + tl.load(chunk_start + chunk)
    first = tl.load(first_span + chunk)
    table = all_told + piece * N_KEYS
    out = tl.load(first_expected + chunk)
    place = tl.arange(0, ROW)
    for number in range(tl.cdiv(n, SPAN)):
        left = tl.load(marks + first + number).to(tl.uint32, bitcast=True)
        row = number * ROWS
        while left != 0:
            if (left & 1) != 0:
                at = row * ROW + place
                bits = tl.load(old + at, mask=at < n, other=0)
                told = told_by_key(bits.to(tl.uint32), table, SHIFT, MASK)
                is_expected = (at < n) & ((told >> EXPECTED_SHIFT) != 0)
                ranks = tl.cumsum(is_expected.to(tl.int32), 0)
                to = out + ranks - 1
                low = (at & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
                same = bits.to(expected_bits.dtype.element_ty, bitcast=True)
                tl.store(expected_low + to, low, mask=is_expected)
                tl.store(expected_high + to, (at >> 16).to(tl.int16), mask=is_expected)
                tl.store(expected_bits + to, same, mask=is_expected)
                out += tl.max(ranks, 0)
            left = left >> 1
            row += 1
