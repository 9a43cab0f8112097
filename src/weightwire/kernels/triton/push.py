"""The stack coder on a GPU: a lane per chunk, each pushing its chunk's words backwards.

A chunk is a chain of dependent steps, and there are tens of thousands of chunks. What the next step
needs is loaded while this one is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.gaps import CONTINUE
from weightwire.kernels.triton.arrange import RAW_SHIFT
from weightwire.kernels.triton.elements import ENTRY_MASK, FREQUENCY_SHIFT
from weightwire.kernels.triton.gather import Gathered
from weightwire.kernels.triton.models import gap_entries, reciprocals
from weightwire.model import DType

LANES = 8
"""Few, so that many warps take turns."""
PROBABILITY_BITS = tl.constexpr(12)
CONTINUE_SYMBOL = tl.constexpr(CONTINUE)
GAP_ROW = tl.constexpr(32)
SYMBOL_MASK = tl.constexpr((1 << 25) - 1)
"""The entry in a symbol's word; 0 where only raw bits are pushed."""


@dataclass(frozen=True)
class Stacks:
    """The words pushed for every chunk, and the coder's last state."""

    words: torch.Tensor
    """int32: each chunk's own room, filled from its end to its start."""
    room_ends: torch.Tensor
    """int64: where each chunk's room ends in ``words``."""
    n_words: torch.Tensor
    """More than there is room for means that the chunk's words are not all there."""
    state: torch.Tensor


def push(gathered: Gathered, dtype: DType, n_room: int) -> Stacks:
    """Code every chunk, in ``n_room`` words for all stacks."""
    n_chunks, device = len(gathered.first), gathered.first.device
    stacks = Stacks(
        words=torch.empty(max(n_room, 1), dtype=torch.int32, device=device),
        room_ends=gathered.stack_room.cumsum(0, dtype=torch.int64),
        n_words=torch.empty(n_chunks, dtype=torch.int32, device=device),
        state=torch.empty(n_chunks, dtype=torch.int64, device=device),
    )
    _push_kernel[(triton.cdiv(n_chunks, LANES),)](
        gathered.first, gathered.events, gathered.symbols, gathered.n_changed, gathered.n_events,
        gathered.n_symbols, gathered.rate, gathered.stack_room, gap_entries(device),
        reciprocals(device), stacks.words, stacks.room_ends, stacks.n_words, stacks.state,
        n_chunks, n_room, WIDE=dtype.n_bytes == 4, LANES=LANES, num_warps=1,
    )  # fmt: skip
    return stacks


@triton.jit
def _spill(state, bound, is_on, words, top, bottom):
    """Move the state's low word to the stack where the state has reached its bound."""
    due = is_on & (state >= bound)
    low = (state & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.store(words + top - 1, low, mask=due & (top > bottom))
    return tl.where(due, state >> 32, state), tl.where(due, top - 1, top)


@triton.jit
def _divided(state, frequency, reciprocal):
    """Quotient and remainder; the reciprocal's quotient may be one short."""
    quotient = tl.umulhi(state, reciprocal)
    rest = state - quotient * frequency
    is_short = rest >= frequency
    return tl.where(is_short, quotient + 1, quotient), tl.where(is_short, rest - frequency, rest)


@triton.jit
def _push_symbol(state, entry, reciprocal, is_on, words, top, bottom):
    """Code the symbol of an entry: the sum of frequencies before it, and its frequency."""
    frequency = (entry >> FREQUENCY_SHIFT).to(tl.uint64)
    state, top = _spill(state, frequency << 52, is_on, words, top, bottom)
    quotient, rest = _divided(state, frequency, reciprocal)
    pushed = (quotient << PROBABILITY_BITS) + rest + (entry & ENTRY_MASK).to(tl.uint64)
    return tl.where(is_on, pushed, state), top


@triton.jit
def _push_bits(state, value, width, is_on, words, top, bottom):
    """Code up to 16 raw bits; none where the width is 0."""
    on = is_on & (width > 0)
    by = tl.where(on, width, 1).to(tl.uint64)
    one = tl.full((), 1, tl.uint64)
    state, top = _spill(state, one << (64 - by), on, words, top, bottom)
    low = value.to(tl.uint64) & ((one << by) - 1)
    return tl.where(on, (state << by) | low, state), top


@triton.jit
def _reciprocal_of(entry, reciprocals, is_on):
    at = (entry >> FREQUENCY_SHIFT).to(tl.int32)
    return tl.load(reciprocals + at, mask=is_on, other=1).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["n_chunks", "n_room"])
def _push_kernel(
    firsts, events, symbols, chunk_changed, chunk_events,
    chunk_symbols, chunk_rate, rooms, gap_table, reciprocals,
    words, room_ends, n_words, states,
    n_chunks, n_room,
    WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane per chunk, from its last symbol to its first, then from its last event to its first."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = chunk < n_chunks
    is_chunk &= tl.load(chunk_changed + chunk, mask=is_chunk, other=0) > 0
    first = tl.load(firsts + chunk, mask=is_chunk, other=0)
    room_end = tl.load(room_ends + chunk, mask=is_chunk, other=0)
    bottom = room_end - tl.load(rooms + chunk, mask=is_chunk, other=0)
    # Rooms do not add up to more than there is, but for rounding.
    bottom = tl.where(room_end <= n_room, bottom, room_end)
    top = room_end
    state = tl.full((LANES,), 1, tl.uint64) << 32

    left = tl.load(chunk_symbols + chunk, mask=is_chunk, other=0)
    symbol = tl.load(symbols + first + left - 1, mask=left > 0, other=0).to(tl.uint64, bitcast=True)
    entry = (symbol & SYMBOL_MASK).to(tl.uint32)
    reciprocal = _reciprocal_of(entry, reciprocals, entry != 0)
    following = tl.load(symbols + first + left - 2, mask=left > 1, other=0).to(
        tl.uint64, bitcast=True
    )
    while tl.max(left, 0) > 0:
        is_on = left > 0
        third = tl.load(symbols + first + left - 3, mask=left > 2, other=0)
        next_entry = (following & SYMBOL_MASK).to(tl.uint32)
        next_reciprocal = _reciprocal_of(next_entry, reciprocals, next_entry != 0)
        n_raw = ((symbol >> RAW_SHIFT) & 31).to(tl.int32)
        raw = (symbol >> 32).to(tl.uint32)
        if WIDE:
            state, top = _push_bits(state, raw >> 16, n_raw - 16, is_on, words, top, bottom)
        state, top = _push_bits(state, raw, tl.minimum(n_raw, 16), is_on, words, top, bottom)
        state, top = _push_symbol(
            state, entry, reciprocal, is_on & (entry != 0), words, top, bottom
        )
        left = tl.maximum(left - 1, 0)
        symbol, entry, reciprocal = following, next_entry, next_reciprocal
        following = third.to(tl.uint64, bitcast=True)

    rate = tl.load(chunk_rate + chunk, mask=is_chunk, other=0)
    shift = (rate >> 3).to(tl.uint32)
    wide_shift = shift.to(tl.uint64)
    table = gap_table + (rate & 7) * GAP_ROW
    go_on = tl.load(table + CONTINUE_SYMBOL).to(tl.uint32, bitcast=True)
    go_on_reciprocal = _reciprocal_of(go_on, reciprocals, is_chunk)
    left = tl.load(chunk_events + chunk, mask=is_chunk, other=0)
    event = tl.load(events + first + left - 1, mask=left > 0, other=0).to(tl.uint32, bitcast=True)
    # Before the first event lies one that ends where the chunk begins.
    previous = tl.load(events + first + left - 2, mask=left > 1, other=0).to(
        tl.uint32, bitcast=True
    )
    while tl.max(left, 0) > 0:
        is_on = left > 0
        third_event = tl.load(events + first + left - 3, mask=left > 2, other=0)
        previous_end = (previous >> 4) + (tl.full((), 1, tl.uint32) << (previous & 15))
        previous_end = tl.where(left > 1, previous_end, 0)
        log2_weight = (event & 15).to(tl.uint64)
        borrowed = state & ((tl.full((), 1, tl.uint64) << log2_weight) - 1)
        state = tl.where(is_on, state >> log2_weight, state)
        gap = (event >> 4) + borrowed.to(tl.uint32) - previous_end
        gap = tl.where(is_on, gap, 0)
        quotient = gap >> shift
        n_again = quotient // CONTINUE_SYMBOL
        at = (quotient - n_again * CONTINUE_SYMBOL).to(tl.int32)
        entry = tl.load(table + at).to(tl.uint32, bitcast=True)
        reciprocal = _reciprocal_of(entry, reciprocals, is_on)
        frequency = (entry >> FREQUENCY_SHIFT).to(tl.uint64)
        state, top = _spill(state, frequency << (52 - wide_shift), is_on, words, top, bottom)
        low = gap & ((tl.full((), 1, tl.uint32) << shift) - 1)
        longer = (state << wide_shift) | low.to(tl.uint64)
        parts, rest = _divided(longer, frequency, reciprocal)
        pushed = (parts << PROBABILITY_BITS) + rest + (entry & ENTRY_MASK).to(tl.uint64)
        state = tl.where(is_on, pushed, state)
        n_again = n_again.to(tl.int32)
        while tl.max(n_again, 0) > 0:
            state, top = _push_symbol(
                state, go_on, go_on_reciprocal, n_again > 0, words, top, bottom
            )
            n_again = tl.maximum(n_again - 1, 0)
        left = tl.maximum(left - 1, 0)
        event, previous = previous, third_event.to(tl.uint32, bitcast=True)

    is_lane = chunk < n_chunks
    tl.store(states + chunk, state.to(tl.int64, bitcast=True), mask=is_lane)
    tl.store(n_words + chunk, (room_end - top).to(tl.int32), mask=is_lane)
