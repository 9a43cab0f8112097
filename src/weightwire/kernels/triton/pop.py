"""The stack coder's reader on a GPU: mirrors ``push.py``, and trusts nothing it reads.

Gaps first, a program per chunk: the place of an event must be found among the weights of the
elements before the next gap can be read, and all lanes search together. Then step magnitudes, a
lane per chunk. A stream that no encoder wrote ends in a mark, never in a wild access: words are read
inside the chunk, elements inside the tile, and every loop moves forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import PROBABILITY_SUM
from weightwire.kernels.gaps import CONTINUE, GAP_CUMULATIVE
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.kernels.triton.elements import (
    N_CLASSES,
    TABLE_ROW,
    TILE,
    bit_of,
    class_of,
    from_ordered,
    log2_weight_of,
    magnitude_of_token,
    raw_bits_of,
    to_ordered,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at, to_device
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

LANES = 32
CONTINUE_SYMBOL = tl.constexpr(CONTINUE)
HAS_EXCEPTIONS = tl.constexpr(EXCEPTIONS)
EVENTS = tl.constexpr(EVENT_MASK)
SLOTS = tl.constexpr(PROBABILITY_SUM)

PAST_END = 1
"""A position lies past the end of its chunk."""
BAD_END = 2
"""A stream does not end where it must."""
BAD_EXCEPTION = 3
"""An exception is out of order or out of range, or there are more than changes."""


@dataclass(frozen=True)
class CodedChunks:
    """Coded chunks of some pieces; empty and dense ones are not among them."""

    piece: torch.Tensor
    start: torch.Tensor
    """int64: the chunk's first element in its piece."""
    n_elements: torch.Tensor
    head: torch.Tensor
    first_word: torch.Tensor
    """int64, in the payload."""
    n_words: torch.Tensor

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True)
class Popped:
    """Where each chunk's stream stands after its gaps, and what went wrong."""

    state: torch.Tensor
    next_word: torch.Tensor
    n_changed: torch.Tensor
    trouble: torch.Tensor


def pop_gaps(
    old: Bucket,
    chunks: CodedChunks,
    payload: torch.Tensor,
    models: DeviceModels,
    dtype: DType,
    slots: torch.Tensor,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
    *,
    is_only_counted: bool = False,
) -> Popped:
    """List what every chunk changes: positions in the piece, and for now the *old* bits there."""
    n = len(chunks)
    device = payload.device
    popped = Popped(
        torch.empty(n, dtype=torch.int64, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
        torch.zeros(n, dtype=torch.int32, device=device),
    )
    _pop_gaps_kernel[(n,)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.head,
        chunks.first_word, chunks.n_words, payload, models.base_keys, models.nibbles,
        models.expected, slots, first_out, positions, bits,
        popped.state, popped.next_word, popped.n_changed, popped.trouble,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        HAS_EXPECTED=models.has_expected, IS_STORED=not is_only_counted, num_warps=1,
    )  # fmt: skip
    return popped


def gap_slots(device: torch.device) -> torch.Tensor:
    """int32 [8, 4096]: what a reader finds at a slot: symbol, offset in it, frequency."""
    rows = np.zeros((8, PROBABILITY_SUM), dtype=np.int64)
    for number, cumulative in enumerate(GAP_CUMULATIVE):
        borders = np.array(cumulative)
        slot = np.arange(PROBABILITY_SUM)
        symbol = np.searchsorted(borders, slot, side="right") - 1
        frequency = borders[symbol + 1] - borders[symbol]
        rows[number] = symbol | (slot - borders[symbol]) << 8 | frequency << 20
    return to_device(rows.astype(np.uint32).view(np.int32), device)


@triton.jit
def _refill(state, bound, words, at, stop):
    """Take a word where the state fell below its bound; past the end the last one is read again."""
    word = tl.load(words + tl.minimum(at, stop - 1)).to(tl.uint32, bitcast=True).to(tl.uint64)
    due = state < bound
    return tl.where(due, (state << 32) | word, state), at + due.to(tl.int32)


@triton.jit
def _take_gap_symbol(state, slots):
    packed = tl.load(slots + (state & (SLOTS - 1)).to(tl.int32)).to(tl.uint32, bitcast=True)
    frequency = (packed >> 20).to(tl.uint64)
    offset = ((packed >> 8) & (SLOTS - 1)).to(tl.uint64)
    return frequency * (state >> 12) + offset, (packed & 0xFF).to(tl.int32)


@triton.jit
def _pop_gap(state, slots, shift, words, at, stop):
    """A whole gap, as int64; the state is left below its bound until bits are given back."""
    low_bound = tl.full((), 1, tl.uint64) << 32
    state, symbol = _take_gap_symbol(state, slots)
    quotient = tl.full((), 0, tl.int64)
    while (symbol == CONTINUE_SYMBOL) & (at <= stop):
        quotient += CONTINUE_SYMBOL
        state, at = _refill(state, low_bound, words, at, stop)
        state, symbol = _take_gap_symbol(state, slots)
    by = shift.to(tl.uint64)
    low = (state & ((tl.full((), 1, tl.uint64) << by) - 1)).to(tl.int64)
    gap = ((quotient + symbol) << shift.to(tl.int64)) | low
    return state >> by, at, gap


@triton.jit
def _pop_gaps_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, heads,
    first_word, chunk_words, payload, base_keys, all_nibbles,
    expected_masks, slots, first_out, positions, bits,
    states, next_word, n_changed, trouble,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    HAS_EXPECTED: tl.constexpr, IS_STORED: tl.constexpr,
):  # fmt: skip
    """One chunk, tile by tile. ``slot`` is the next event's place in the chunk's weight space."""
    chunk = tl.program_id(0)
    piece = tl.load(chunk_piece + chunk)
    start = tl.load(chunk_start + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    head = tl.load(heads + chunk).to(tl.uint32, bitcast=True)
    words = payload + tl.load(first_word + chunk)
    stop = tl.load(chunk_words + chunk)
    base_key = tl.load(base_keys + piece)
    nibbles = tl.load(all_nibbles + piece)
    expected = tl.load(expected_masks + piece)
    old = memory_at(olds, piece, KIND) + start
    out = tl.load(first_out + chunk)
    rate = (head >> 24).to(tl.int32)
    shift = rate >> 3
    table = slots + (rate & 7) * SLOTS
    at = tl.where((head & HAS_EXCEPTIONS) != 0, 1, 0)
    low_word = tl.load(words + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    high_word = tl.load(words + at + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    state = low_word | (high_word << 32)
    at += 2
    left = (head & EVENTS).to(tl.int32)
    slot = tl.full((), 0, tl.int64)
    if left > 0:
        state, at, gap = _pop_gap(state, table, shift, words, at, stop)
        slot += gap
    place = tl.arange(0, TILE)
    before = tl.full((), 0, tl.int64)
    count = tl.full((), 0, tl.int32)
    for begin in range(0, n, TILE):
        is_there = begin + place < n
        tile = tl.load(old + begin + place, mask=is_there, other=0).to(tl.uint32)
        classes = class_of(tile, base_key, SHIFT, MASK)
        weight = tl.where(is_there, 1 << log2_weight_of(classes, nibbles), 0)
        ends = tl.cumsum(weight, 0)
        total = tl.max(ends, 0)
        keyed = ((ends - weight) << 10) | place
        keyed = tl.where(is_there, keyed, 0x7FFFFFFF)
        flips = tl.zeros((TILE,), tl.int32)
        while (left > 0) & (slot < before + total):
            inside = (slot - before).to(tl.int32)
            found = tl.max(tl.where(keyed <= ((inside << 10) | 1023), keyed, 0), 0)
            hit = found & 1023
            offset = inside - (found >> 10)
            from_bits = tl.load(old + begin + hit)
            log2_weight = log2_weight_of(
                class_of(from_bits.to(tl.uint32), base_key, SHIFT, MASK), nibbles
            )
            by = log2_weight.to(tl.uint64)
            state, at = _refill(state, (tl.full((), 1, tl.uint64) << 32) >> by, words, at, stop)
            state = (state << by) | offset.to(tl.uint64)
            if HAS_EXPECTED:
                flips = tl.where(place == hit, 1, flips)
            else:
                if IS_STORED:
                    tl.store(positions + out + count, (start + begin + hit).to(tl.int32))
                    tl.store(bits + out + count, from_bits.to(bits.dtype.element_ty, bitcast=True))
                count += 1
            slot += (1 << log2_weight) - offset
            left -= 1
            if left > 0:
                state, at, gap = _pop_gap(state, table, shift, words, at, stop)
                slot += gap
        if HAS_EXPECTED:
            changed = (bit_of(expected, classes) ^ flips) & is_there.to(tl.int32)
            ranks = tl.cumsum(changed, 0)
            if IS_STORED:
                to = out + count + ranks - 1
                tl.store(positions + to, (start + begin + place).to(tl.int32), mask=changed != 0)
                tl.store(
                    bits + to,
                    tile.to(KIND).to(bits.dtype.element_ty, bitcast=True),
                    mask=changed != 0,
                )
            count += tl.max(ranks, 0)
        before += total
    tl.store(states + chunk, state.to(tl.int64, bitcast=True))
    tl.store(next_word + chunk, at)
    tl.store(n_changed + chunk, count)
    is_bad_end = (at > stop) | (high_word == 0)
    tl.store(trouble + chunk, tl.where(left > 0, 1, tl.where(is_bad_end, 2, 0)))


def pop_steps(
    chunks: CodedChunks,
    popped: Popped,
    payload: torch.Tensor,
    models: DeviceModels,
    dtype: DType,
    first_out: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    """Turn the old bits of every change into its new ones, in place."""
    _pop_steps_kernel[(triton.cdiv(len(chunks), LANES),)](
        chunks.piece, chunks.head, chunks.first_word, chunks.n_words, payload,
        models.base_keys, models.one_step, models.n_tokens, models.tokens, models.starts,
        models.frequencies, first_out, bits,
        popped.state, popped.next_word, popped.n_changed, popped.trouble, len(chunks),
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, ORDERED=dtype.ordered, LANES=LANES, num_warps=1,
    )  # fmt: skip


@triton.jit
def _refill_lanes(state, is_on, words, at, stop):
    """As ``_refill``, for a state that must be 2^32 at least."""
    word = tl.load(words + tl.minimum(at, stop - 1), mask=is_on, other=0)
    due = is_on & ((state >> 32) == 0)
    longer = (state << 32) | word.to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.where(due, longer, state), at + due.to(tl.int32)


@triton.jit
def _pop_bits(state, width, is_on, words, at, stop):
    """Up to 16 raw bits, as uint32; none where the width is 0."""
    on = is_on & (width > 0)
    by = tl.where(on, width, 0).to(tl.uint64)
    value = (state & ((tl.full((), 1, tl.uint64) << by) - 1)).to(tl.uint32)
    state, at = _refill_lanes(state >> by, on, words, at, stop)
    return state, at, value


@triton.jit
def _pop_steps_kernel(
    chunk_piece, heads, first_word, chunk_words, payload,
    base_keys, one_step_masks, n_tokens, tokens, starts,
    frequencies, first_out, bits,
    states, next_word, n_changed, trouble, n_chunks,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, ORDERED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane per chunk, change by change; then what the exceptions say instead."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = chunk < n_chunks
    piece = tl.load(chunk_piece + chunk, mask=is_chunk, other=0)
    head = tl.load(heads + chunk, mask=is_chunk, other=0)
    words = payload + tl.load(first_word + chunk, mask=is_chunk, other=0)
    stop = tl.load(chunk_words + chunk, mask=is_chunk, other=2)
    bad = tl.load(trouble + chunk, mask=is_chunk, other=1)
    count = tl.load(n_changed + chunk, mask=is_chunk, other=0)
    base_key = tl.load(base_keys + piece)
    one_step = tl.load(one_step_masks + piece)
    out = bits + tl.load(first_out + chunk, mask=is_chunk, other=0)
    state = tl.load(states + chunk, mask=is_chunk, other=0).to(tl.uint64, bitcast=True)
    at = tl.load(next_word + chunk, mask=is_chunk, other=0)

    is_odd = (head & HAS_EXCEPTIONS) != 0
    n_odd = tl.where(is_odd, tl.load(words, mask=is_chunk & is_odd, other=0), 0)
    bad = tl.where((bad == 0) & is_odd & ((n_odd < 1) | (n_odd > count)), 3, bad)
    n_signs = (count + 31) >> 5
    last_sign = stop - 2 * n_odd - 1
    bad = tl.where((bad == 0) & (last_sign + 1 - n_signs < at), 2, bad)
    count = tl.where(bad == 0, count, 0)
    number = tl.zeros((LANES,), tl.int32)
    sign_word = tl.zeros((LANES,), tl.uint32)
    while tl.max(count - number, 0) > 0:
        is_on = number < count
        is_new_word = is_on & ((number & 31) == 0)
        fresh = tl.load(words + last_sign - (number >> 5), mask=is_new_word, other=0)
        sign_word = tl.where(is_new_word, fresh.to(tl.uint32, bitcast=True), sign_word)
        is_negative = ((sign_word >> (number & 31).to(tl.uint32)) & 1) != 0
        old = tl.load(out + number, mask=is_on, other=0).to(KIND, bitcast=True).to(tl.uint32)
        classes = class_of(old, base_key, SHIFT, MASK)
        is_coded = is_on & (bit_of(one_step, classes) == 0)
        row = piece * N_CLASSES + classes
        entry = row.to(tl.int64) * TABLE_ROW
        n_entries = tl.load(n_tokens + row, mask=is_coded, other=1)
        is_symbol = is_coded & (n_entries > 1)
        slot = (state & (SLOTS - 1)).to(tl.int32)
        # The last entry that starts at or before the slot: at most 2^7 of them.
        symbol = tl.zeros((LANES,), tl.int32)
        for bit in tl.static_range(7):
            tried = symbol + (64 >> bit)
            is_inside = is_symbol & (tried < n_entries)
            begins = tl.load(starts + entry + tried, mask=is_inside, other=SLOTS)
            symbol = tl.where(begins <= slot, tried, symbol)
        begins = tl.load(starts + entry + symbol, mask=is_symbol, other=0)
        frequency = tl.load(frequencies + entry + symbol, mask=is_symbol, other=1).to(tl.uint64)
        popped = frequency * (state >> 12) + (slot - begins).to(tl.uint64)
        state = tl.where(is_symbol, popped, state)
        state, at = _refill_lanes(state, is_symbol, words, at, stop)
        token = tl.load(tokens + entry + symbol, mask=is_coded, other=0).to(tl.int32)
        n_raw = raw_bits_of(token)
        state, at, raw = _pop_bits(state, tl.minimum(n_raw, 16), is_coded, words, at, stop)
        if WIDTH == 32:
            state, at, high = _pop_bits(state, n_raw - 16, is_coded, words, at, stop)
            raw |= high << 16
        size = magnitude_of_token(token, raw) + 1
        moved = to_ordered(old, WIDTH, ORDERED) + tl.where(is_negative, 0 - size, size)
        moved &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH)
        new = from_ordered(moved, WIDTH, ORDERED)
        tl.store(out + number, new.to(KIND).to(bits.dtype.element_ty, bitcast=True), mask=is_on)
        number = tl.where(is_on, number + 1, number)

    is_ended = (at == last_sign + 1 - n_signs) & (state == (tl.full((), 1, tl.uint64) << 32))
    bad = tl.where((bad == 0) & ~is_ended, 2, bad)
    # Signs past the last change are zero.
    is_cut = (bad == 0) & ((count & 31) != 0)
    bad = tl.where(is_cut & ((sign_word >> (count & 31).to(tl.uint32)) != 0), 2, bad)
    n_odd = tl.where(bad == 0, n_odd, 0)
    number = tl.zeros((LANES,), tl.int32)
    previous = tl.full((LANES,), -1, tl.int32)
    while tl.max(n_odd - number, 0) > 0:
        is_on = number < n_odd
        pair = words + stop - 2 * n_odd + 2 * number
        ordinal = tl.load(pair, mask=is_on, other=0)
        told = tl.load(pair + 1, mask=is_on, other=0).to(tl.uint32, bitcast=True)
        is_fit = (ordinal > previous) & (ordinal < count)
        if WIDTH < 32:
            is_fit &= (told >> WIDTH) == 0
        bad = tl.where(is_on & ~is_fit, 3, bad)
        tl.store(
            out + ordinal,
            told.to(KIND).to(bits.dtype.element_ty, bitcast=True),
            mask=is_on & is_fit,
        )
        previous = tl.where(is_on, ordinal, previous)
        number = tl.where(is_on, number + 1, number)
    tl.store(trouble + chunk, bad, mask=is_chunk)
