"""The stack coder's reader on a GPU: mirrors ``push.py``, and trusts nothing it reads.

Gaps first, then step magnitudes (``pop_steps.py``), both with a lane per chunk: there are tens of
thousands, and a lane has nothing to wait for but its own stream. The place of an event must be found
among the weights of the elements before the next gap can be read: the weight index leads to half a
row, and a look at that to the element.

A stream that no encoder wrote ends in a mark, never in a wild access: words are read inside the
chunk, elements inside the sixteen bytes that the piece has a part in, and every loop moves forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import PROBABILITY_SUM
from weightwire.kernels.gaps import CONTINUE
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.kernels.triton.elements import (
    LOG2_SHIFT,
    WEIGHT_MASK,
    WEIGHT_SUM_MASK,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at, register_limit
from weightwire.kernels.triton.memories import VECTOR_BYTES
from weightwire.kernels.triton.models import DeviceModels, gap_slots
from weightwire.kernels.triton.weight_index import (
    HALF,
    ROW,
    ROWS,
    SPAN,
    CodedChunks,
    WeightIndex,
    hint_shift,
)
from weightwire.model import DType

__all__ = ["LANES", "TROUBLES", "CodedChunks", "Popped", "pop_gaps"]

LANES = 32
"""Chunks per program: one for each thread of a warp, so that no value changes its thread."""

CONTINUE_SYMBOL = tl.constexpr(CONTINUE)
HAS_EXCEPTIONS = tl.constexpr(EXCEPTIONS)
EVENTS = tl.constexpr(EVENT_MASK)
SLOTS = tl.constexpr(PROBABILITY_SUM)

GAP_REGISTERS = 128
"""Enough to have half a row on its way."""

WORD_ROWS = tl.constexpr(4)
"""Sums of rows in eight bytes."""

FAR = tl.constexpr(1 << 29)
"""A slot past every chunk, whose weights add up to 2^28 at most."""

TROUBLES = (
    "",
    "a position lies past the end of its chunk",
    "stream does not end where it must",
    "an exception is out of order or out of range",
)
"""What a chunk's mark means."""


@dataclass(frozen=True)
class Popped:
    """Where each chunk's stream stands after its gaps, and what went wrong."""

    state: torch.Tensor
    next_word: torch.Tensor
    told: torch.Tensor
    """int32 [2, chunk]: trouble, and the number of changes."""


def pop_gaps(
    old: Bucket,
    chunks: CodedChunks,
    payload: torch.Tensor,
    models: DeviceModels,
    dtype: DType,
    index: WeightIndex,
    n_expected: torch.Tensor,
    first_out: torch.Tensor,
    positions: torch.Tensor,
) -> Popped:
    """List the position of every event.

    A chunk has room for its events and for what is expected from ``first_out`` on; the events stand
    at the end of that, to be merged with what was expected.
    ``n_expected``: how many elements of each chunk are.
    """
    n, device = len(chunks), payload.device
    popped = Popped(
        torch.empty(n, dtype=torch.int64, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
        torch.empty((2, n), dtype=torch.int32, device=device),
    )
    alignment = old.alignment
    _pop_gaps_kernel[(triton.cdiv(n, LANES),)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.head,
        chunks.first_word, chunks.n_words, chunks.first_span, payload,
        models.elements, index.told, index.sums.view(torch.int64), index.hints.view(torch.int32),
        gap_slots(device),
        n_expected, first_out, positions,
        popped.state, popped.next_word, popped.told, n,
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, N_KEYS=models.n_keys, ALIGNMENT=alignment,
        IS_ALIGNED=alignment == VECTOR_BYTES, LANES=LANES, num_warps=LANES // 32,
        **register_limit(GAP_REGISTERS),
    )  # fmt: skip
    return popped


@triton.jit
def _row_weight(word, number: tl.constexpr):
    """One of the four sums in a word."""
    return ((word >> (16 * number)) & 0xFFFF).to(tl.int32)


@triton.jit
def _find_row(sums, hints, window, n_words, slot):
    """The row that a slot falls on, seen from a window of eight; and the row's weight and hint.

    The window slides on so far that the slot, told from its start, falls into its first four rows;
    if it lies past all eight, the window is behind them and there is no hit.
    """
    near = tl.load(sums + window, mask=window < n_words, other=0)
    far = tl.load(sums + window + 1, mask=window + 1 < n_words, other=0)
    near_hints = tl.load(hints + window, mask=window < n_words, other=0)
    far_hints = tl.load(hints + window + 1, mask=window + 1 < n_words, other=0)
    near_sum = _row_weight(near, 0) + _row_weight(near, 1)
    near_sum += _row_weight(near, 2) + _row_weight(near, 3)
    is_past = slot >= near_sum
    slot = tl.where(is_past, slot - near_sum, slot)
    window += is_past.to(tl.int32)
    word = tl.where(is_past, far, near)
    first = _row_weight(word, 0)
    second = first + _row_weight(word, 1)
    third = second + _row_weight(word, 2)
    total = third + _row_weight(word, 3)
    before = tl.where(slot >= first, first, 0)
    before = tl.where(slot >= second, second, before)
    before = tl.where(slot >= third, third, before)
    after = tl.where(slot >= first, second, first)
    after = tl.where(slot >= second, third, after)
    after = tl.where(slot >= third, total, after)
    number = (slot >= first).to(tl.int32) + (slot >= second).to(tl.int32)
    number += (slot >= third).to(tl.int32)
    hint = (tl.where(is_past, far_hints, near_hints) >> (8 * number)) & 0xFF
    row = WORD_ROWS * window + number
    is_hit = slot < total
    inside = slot - before
    window = tl.where(is_hit, window, window + 1)
    slot = tl.where(is_hit, slot, slot - total)
    return window, slot, is_hit, row, inside, after - before, hint


@triton.jit
def _weigh(
    at, left, table, WIDTH: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """The weight of sixteen bytes of elements in every lane; of garbage, past the last one."""
    if IS_ALIGNED:
        words_at = at.to(tl.pointer_type(tl.uint32))[:, None] + tl.arange(0, 4)[None, :]
        # A part of them is the piece's, so all of them lie in memory that is there.
        words = tl.load(tl.multiple_of(words_at, (4, 16)), mask=(left > 0)[:, None])
        told = told_by_key(words, table[:, None], SHIFT, MASK)
        for number in tl.static_range(1, 32 // WIDTH):
            told += told_by_key(words, table[:, None], SHIFT + number * WIDTH, MASK)
    else:
        place = tl.arange(0, 128 // WIDTH)[None, :]
        bits = tl.load(at[:, None] + place, mask=place < left[:, None], other=0).to(tl.uint32)
        told = told_by_key(bits, table[:, None], SHIFT, MASK)
    return tl.sum(told, 1)


@triton.jit
def _find_element(
    at, left, inside, weight, hint, is_later, table,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    ALIGNMENT: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """The element of a row that a slot falls on, the slots of the row before it, and if it was found.

    Half a row is looked at. A hint that says more than enough means the second half, from its end;
    else it is the first. If the slot is not in that, the hint was too short to tell: it is in the
    second half, which ``is_later`` says the next time, and its slots are told from its own start.
    """
    GROUP: tl.constexpr = 128 // WIDTH
    is_back = ~is_later & ((inside >> hint_shift(weight)) > hint)
    first = tl.where(is_back, ROW - GROUP, tl.where(is_later, HALF, 0))
    step = tl.where(is_back, 0 - GROUP, GROUP)
    limit = tl.where(is_back, weight - inside - 1, inside)
    running = tl.zeros_like(inside)
    passed = tl.zeros_like(inside)
    hit = first
    here = first
    for _ in tl.static_range(HALF // GROUP):
        running += _weigh(at + here, left - here, table, WIDTH, SHIFT, MASK, IS_ALIGNED)
        so_far = running & WEIGHT_SUM_MASK
        is_past = so_far <= limit
        passed = tl.where(is_past, so_far, passed)
        hit = tl.where(is_past, hit + step, hit)
        here += step
    is_found = is_later | (hit != here)
    place = tl.arange(0, GROUP)[None, :]
    group_at = tl.multiple_of((at + hit)[:, None] + place, (1, ALIGNMENT))
    is_there = (hit < left)[:, None] if IS_ALIGNED else place < (left - hit)[:, None]
    bits = tl.load(group_at, mask=is_there, other=0).to(tl.uint32)
    weights = told_by_key(bits, table[:, None], SHIFT, MASK) & WEIGHT_MASK
    before = tl.where(is_back, weight - passed - tl.sum(weights, 1), passed)
    is_before = tl.cumsum(weights, 1) + before[:, None] <= inside[:, None]
    before += tl.sum(tl.where(is_before, weights, 0), 1)
    hit += tl.sum(is_before.to(tl.int32), 1)
    return hit, before, is_found, passed


@triton.jit(do_not_specialize=["n_chunks"])
def _pop_gaps_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, heads,
    first_word, chunk_words, first_span, payload,
    elements, all_told, all_sums, all_hints, all_slots,
    n_expected, first_out, positions,
    states, next_word, told, n_chunks,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, N_KEYS: tl.constexpr, ALIGNMENT: tl.constexpr,
    IS_ALIGNED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane per chunk. ``slot`` is the next event's place in weight space, from the window's start.

    In every round a lane looks for its slot in the window. If it is there, that is an event, and the
    next gap's first symbol is read; if a gap has symbols still to be read, the next one is; else the
    window has moved on, or half a row.
    """
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = number < n_chunks
    # Lanes without a chunk have the last one's, and no events.
    chunk = tl.minimum(number, n_chunks - 1)
    piece = tl.load(chunk_piece + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    start = tl.load(chunk_start + chunk)
    head = tl.load(heads + chunk).to(tl.uint32, bitcast=True)
    words = payload + tl.load(first_word + chunk)
    stop = tl.load(chunk_words + chunk)
    table = all_told + piece * N_KEYS
    span = tl.load(first_span + chunk)
    sums = all_sums + span * (ROWS // WORD_ROWS)
    hints = all_hints + span * (ROWS // WORD_ROWS)
    n_sum_words = tl.cdiv(n, SPAN) * (ROWS // WORD_ROWS)
    old = memory_at(olds, piece, KIND) + start
    out = tl.load(first_out + chunk) + tl.load(n_expected + chunk)
    rate = (head >> 24).to(tl.int32)
    shift = rate >> 3
    low_mask = (1 << shift) - 1
    slots = all_slots + (rate & 7) * SLOTS
    at = tl.where((head & HAS_EXCEPTIONS) != 0, 1, 0)
    low_word = tl.load(words + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    high_word = tl.load(words + at + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    state = low_word | (high_word << 32)
    at += 2
    left = tl.where(is_chunk, (head & EVENTS).to(tl.int32), 0)
    is_open = left > 0
    is_on = left > 0
    window = tl.zeros_like(left)
    slot = tl.zeros_like(left)
    # Whether the slot was found to lie in a row's second half, and what its first half weighs.
    is_later = left < 0
    in_first = tl.zeros_like(left)
    while tl.max(is_on.to(tl.int32), 0) > 0:
        window, slot, is_hit, row, inside, weight, hint = _find_row(
            sums, hints, window, n_sum_words, slot
        )
        is_sought = is_on & is_hit & ~is_open
        row_at = row * ROW
        inside -= in_first
        hit, before, is_found, passed = _find_element(
            old + row_at, tl.where(is_sought, n - row_at, 0), inside, weight, hint, is_later, table,
            WIDTH, SHIFT, MASK, ALIGNMENT, IS_ALIGNED,
        )  # fmt: skip
        is_event = is_sought & is_found
        is_later = is_sought & ~is_found
        in_first = tl.where(is_later, passed, 0)
        hit = tl.minimum(row_at + hit, n - 1)
        same = tl.load(old + hit, mask=is_event, other=0)
        key = ((same.to(tl.uint32) >> SHIFT) & MASK).to(tl.int32)
        log2_weight = (tl.load(elements + piece * N_KEYS + key) >> LOG2_SHIFT) & 15
        tl.store(positions + out, (start + hit).to(tl.int32), mask=is_event)
        out += is_event.to(tl.int32)

        # The bits that chose a slot inside the element's weight go back; nothing for others.
        offset = tl.where(is_event, inside - before, 0)
        log2_weight = tl.where(is_event, log2_weight, 0)
        word = tl.load(words + tl.minimum(at, stop - 1)).to(tl.uint32, bitcast=True).to(tl.uint64)
        by = log2_weight.to(tl.uint64)
        is_due = (is_event | is_open) & (state < ((tl.full((), 1, tl.uint64) << 32) >> by))
        state = tl.where(is_due, (state << 32) | word, state)
        at += is_due.to(tl.int32)
        state = (state << by) | offset.to(tl.uint64)
        slot += tl.where(is_event, (1 << log2_weight) - offset, 0)
        left -= is_event.to(tl.int32)

        is_taken = (left > 0) & (is_event | is_open)
        packed = tl.load(slots + (state & (SLOTS - 1)).to(tl.int32)).to(tl.uint32, bitcast=True)
        taken = (packed >> 20).to(tl.uint64) * (state >> 12)
        taken += ((packed >> 8) & (SLOTS - 1)).to(tl.uint64)
        symbol = (packed & 0xFF).to(tl.int32)
        state = tl.where(is_taken, taken, state)
        is_open = is_taken & (symbol == CONTINUE_SYMBOL)
        is_ended = is_taken & (symbol != CONTINUE_SYMBOL)
        low = state.to(tl.uint32).to(tl.int32, bitcast=True) & low_mask
        state = state >> tl.where(is_ended, shift, 0).to(tl.uint64)
        gap = tl.where(is_taken, symbol << shift, 0) + tl.where(is_ended, low, 0)
        slot = tl.minimum(slot + gap, FAR)
        is_on = (left > 0) & (at <= stop) & (window < n_sum_words)
    tl.store(states + chunk, state.to(tl.int64, bitcast=True), mask=is_chunk)
    tl.store(next_word + chunk, at, mask=is_chunk)
    is_bad_end = (at > stop) | (high_word == 0)
    trouble = tl.where(left > 0, 1, tl.where(is_bad_end, 2, 0))
    tl.store(told + chunk, trouble, mask=is_chunk)
