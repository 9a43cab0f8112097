"""Step magnitudes off the stack coder, a lane per chunk: old bits become new ones.

What a lane does next hangs on its state alone. All else is looked up ahead: the old bits two elements
before their turn, what the model says of them one before, and the words that the state may ask for
at the start of a round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.elements import (
    CLASS_SHIFT,
    COUNT_SHIFT,
    ENTRY_MASK,
    FREQUENCY_SHIFT,
    ONE_STEP_SHIFT,
    TABLE_ROW,
    from_ordered,
    magnitude_of_token,
    raw_bits_of,
    to_ordered,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS
from weightwire.kernels.triton.models import DeviceModels
from weightwire.kernels.triton.pop import EVENTS, HAS_EXCEPTIONS, LANES, SLOTS, Popped
from weightwire.kernels.triton.weight_index import CodedChunks, Expected
from weightwire.model import DType

NOWHERE = tl.constexpr(0x7FFFFFFF)
"""Past every place: a list that has come to its end."""


def pop_steps(
    chunks: CodedChunks,
    popped: Popped,
    payload: torch.Tensor,
    models: DeviceModels,
    most_tokens: int,
    dtype: DType,
    expected: Expected,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    """Merge events with what was expected, and turn old bits into new ones, in place.

    An element that is both was expected to change and does not: it stands there twice, as it is.
    No class of the models has more than ``most_tokens`` tokens.
    """
    _pop_steps_kernel[(triton.cdiv(len(chunks), LANES),)](
        chunks.piece, chunks.start, chunks.head, chunks.first_word, chunks.n_words, payload,
        models.elements, models.tables, models.tokens, models.entries,
        expected.counts, expected.first, expected.low, expected.high, expected.bits,
        first_out, positions, bits, popped.state, popped.next_word, popped.told, len(chunks),
        max(most_tokens - 1, 0).bit_length(),
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, ORDERED=dtype.ordered, N_KEYS=models.n_keys,
        HAS_EXPECTED=models.has_expected, LANES=LANES, num_warps=LANES // 32,
    )  # fmt: skip


@triton.jit
def _refill(state, is_on, word):
    """Take a word where the state fell below 2^32; also says where."""
    is_due = is_on & ((state >> 32) == 0)
    longer = (state << 32) | word.to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.where(is_due, longer, state), is_due


@triton.jit
def _pop_bits(state, width, is_on, word):
    """Up to 16 raw bits, as uint32; none where the width is 0."""
    is_on = is_on & (width > 0)
    by = tl.where(is_on, width, 0).to(tl.uint64)
    value = (state & ((tl.full((), 1, tl.uint64) << by) - 1)).to(tl.uint32)
    state, is_due = _refill(state >> by, is_on, word)
    return state, is_due, value


@triton.jit
def _row_of(bits, piece, table, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The step table of the class that an element with these old bits is in."""
    return piece * 16 + ((told_by_key(bits, table, SHIFT, MASK) >> CLASS_SHIFT) & 15)


@triton.jit
def _find_symbol(entries, n_here, slot, n_halvings):
    """The last entry that starts at or before the slot; a row has room for all that are tried."""
    symbol = tl.zeros_like(slot)
    for number in range(n_halvings):
        tried = symbol + (1 << (n_halvings - 1 - number))
        begins = tl.load(entries + tried) & ENTRY_MASK
        symbol = tl.where((tried < n_here) & (begins <= slot), tried, symbol)
    return symbol


@triton.jit
def _pop_step(
    state, at, words, stop, row, about, is_change, entries, tokens, n_halvings,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """How many steps a changed element takes, as uint32."""
    word = tl.load(words + tl.minimum(at, stop - 1))
    next_word = tl.load(words + tl.minimum(at + 1, stop - 1))
    is_coded = is_change & ((about >> ONE_STEP_SHIFT) == 0)
    entry_at = row.to(tl.int64) * TABLE_ROW
    n_here = (about >> COUNT_SHIFT) & 0xFF
    is_symbol = is_coded & (n_here > 1)
    slot = (state & (SLOTS - 1)).to(tl.int32)
    symbol = _find_symbol(entries + entry_at, n_here, slot, n_halvings)
    token = tl.where(is_coded, tl.load(tokens + entry_at + symbol).to(tl.int32), 0)
    entry = tl.load(entries + entry_at + symbol)
    popped = (entry >> FREQUENCY_SHIFT).to(tl.uint64) * (state >> 12)
    popped += (slot - (entry & ENTRY_MASK)).to(tl.uint64)
    state, is_due = _refill(tl.where(is_symbol, popped, state), is_symbol, word)
    at += is_due.to(tl.int32)
    n_raw = raw_bits_of(token)
    word = tl.where(is_due, next_word, word)
    state, is_due, raw = _pop_bits(state, tl.minimum(n_raw, 16), is_coded, word)
    at += is_due.to(tl.int32)
    if WIDTH == 32:
        word = tl.load(words + tl.minimum(at, stop - 1))
        state, is_due, high = _pop_bits(state, n_raw - 16, is_coded, word)
        at += is_due.to(tl.int32)
        raw |= high << 16
    return state, at, magnitude_of_token(token, raw) + 1


@triton.jit
def _moved(old, size, is_negative, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """Old bits, so many steps up or down."""
    moved = to_ordered(old, WIDTH, ORDERED) + tl.where(is_negative, 0 - size, size)
    moved &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH)
    return from_ordered(moved, WIDTH, ORDERED)


@triton.jit
def _sign(words, last_sign, ordinal, is_change, sign_word):
    """Whether the change of this number is downwards; signs stand at the end, last word first."""
    is_new_word = is_change & ((ordinal & 31) == 0)
    sign_at = tl.maximum(last_sign - (ordinal >> 5), 0)
    fresh = tl.load(words + sign_at, mask=is_new_word, other=0)
    sign_word = tl.where(is_new_word, fresh.to(tl.uint32, bitcast=True), sign_word)
    return ((sign_word >> (ordinal & 31).to(tl.uint32)) & 1) != 0, sign_word


@triton.jit
def _except(odd, n_odd, n_met, next_odd, ordinal, is_change, new, is_too_wide, WIDTH: tl.constexpr):
    """The bits of a change that is an exception, instead of those that its step leads to."""
    is_odd_here = is_change & (ordinal == next_odd)
    told = tl.load(odd + 2 * n_met + 1, mask=is_odd_here, other=0).to(tl.uint32, bitcast=True)
    if WIDTH < 32:
        is_too_wide |= is_odd_here & ((told >> WIDTH) != 0)
    n_met += is_odd_here.to(tl.int32)
    after = tl.load(odd + 2 * n_met, mask=is_odd_here & (n_met < n_odd), other=-1)
    next_odd = tl.where(is_odd_here, after, next_odd)
    return tl.where(is_odd_here, told, new), n_met, next_odd, is_too_wide


@triton.jit
def _load_expected(low, high, bits, at, is_on):
    """A place in the chunk, or nowhere, and the bits there."""
    lower = tl.load(low + at, mask=is_on, other=0).to(tl.uint16, bitcast=True).to(tl.int32)
    upper = tl.load(high + at, mask=is_on, other=0).to(tl.int32)
    place = tl.where(is_on, (upper << 16) | lower, NOWHERE)
    return place, tl.load(bits + at, mask=is_on, other=0)


@triton.jit
def _load_event(positions, bits, at, is_on, start):
    """The same of an event."""
    place = tl.load(positions + at, mask=is_on, other=0) - start
    return tl.where(is_on, place, NOWHERE), tl.load(bits + at, mask=is_on, other=0)


@triton.jit
def _pop_steps_kernel(
    chunk_piece, chunk_start, heads, first_word, chunk_words, payload,
    elements, tables, tokens, entries,
    n_expected, first_expected, expected_low, expected_high, expected_bits,
    first_out, positions, bits,
    states, next_word, told, n_chunks, n_halvings,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, ORDERED: tl.constexpr, N_KEYS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Element by element. What is written is never past what is yet to be read."""
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = number < n_chunks
    # Lanes without a chunk have the last one's, and nothing to do.
    chunk = tl.minimum(number, n_chunks - 1)
    piece = tl.load(chunk_piece + chunk)
    head = tl.load(heads + chunk)
    words = payload + tl.load(first_word + chunk)
    stop = tl.load(chunk_words + chunk)
    bad = tl.where(is_chunk, tl.load(told + chunk), 1)
    table = elements + piece * N_KEYS
    state = tl.load(states + chunk).to(tl.uint64, bitcast=True)
    at = tl.load(next_word + chunk)
    is_odd = (head & HAS_EXCEPTIONS) != 0
    n_odd = tl.where(is_odd, tl.load(words, mask=is_odd, other=0), 0)
    bad = tl.where((bad == 0) & is_odd & ((n_odd < 1) | (n_odd > ((stop - 3) >> 1))), 3, bad)
    n_odd = tl.where(bad == 0, n_odd, 0)
    last_sign = stop - 2 * n_odd - 1
    odd = words + stop - 2 * n_odd
    next_odd = tl.load(odd, mask=n_odd > 0, other=-1)
    n_met = tl.zeros_like(stop)
    is_too_wide = tl.zeros_like(is_chunk)
    ordinal = tl.zeros_like(stop)
    sign_word = tl.zeros_like(stop).to(tl.uint32)
    is_sound = bad == 0
    n_events = tl.where(is_sound, head & EVENTS, 0)
    out = tl.load(first_out + chunk)

    n_known = tl.zeros_like(stop)
    if HAS_EXPECTED:
        n_known = tl.where(is_sound, tl.load(n_expected + chunk), 0)
    if tl.max(n_known, 0) == 0:
        # Every event is a change, and stands where it belongs: only its bits are to be replaced.
        here = tl.load(bits + out, mask=n_events > 0, other=0)
        coming = tl.load(bits + out + 1, mask=n_events > 1, other=0)
        row = _row_of(here.to(KIND, bitcast=True).to(tl.uint32), piece, table, SHIFT, MASK)
        about = tl.load(tables + row)
        for turn in range(tl.max(n_events, 0)):
            is_change = turn < n_events
            later = tl.load(bits + out + 2, mask=turn + 2 < n_events, other=0)
            next_bits = coming.to(KIND, bitcast=True).to(tl.uint32)
            next_row = _row_of(next_bits, piece, table, SHIFT, MASK)
            next_about = tl.load(tables + next_row)
            is_negative, sign_word = _sign(words, last_sign, ordinal, is_change, sign_word)
            state, at, size = _pop_step(
                state, at, words, stop, row, about, is_change, entries, tokens, n_halvings, WIDTH
            )
            old = here.to(KIND, bitcast=True).to(tl.uint32)
            new = _moved(old, size, is_negative, WIDTH, ORDERED)
            new, n_met, next_odd, is_too_wide = _except(
                odd, n_odd, n_met, next_odd, ordinal, is_change, new, is_too_wide, WIDTH
            )
            new = new.to(KIND).to(bits.dtype.element_ty, bitcast=True)
            tl.store(bits + out, new, mask=is_change)
            out += 1
            ordinal += is_change.to(tl.int32)
            here, coming, row, about = coming, later, next_row, next_about
    else:
        start = tl.load(chunk_start + chunk).to(tl.int32)
        event_at = out + tl.load(n_expected + chunk)
        events_end = event_at + n_events
        known_at = tl.load(first_expected + chunk)
        known_end = known_at + n_known
        event, event_bits = _load_event(positions, bits, event_at, event_at < events_end, start)
        next_event, next_event_bits = _load_event(
            positions, bits, event_at + 1, event_at + 1 < events_end, start
        )
        known, known_bits = _load_expected(
            expected_low, expected_high, expected_bits, known_at, known_at < known_end
        )
        next_known, next_known_bits = _load_expected(
            expected_low, expected_high, expected_bits, known_at + 1, known_at + 1 < known_end
        )
        for _ in range(tl.max(n_events + n_known, 0)):
            place = tl.minimum(event, known)
            is_on = place < NOWHERE
            is_event = is_on & (event == place)
            is_known = is_on & (known == place)
            is_change = is_event ^ is_known
            here = tl.where(is_event, event_bits, known_bits)
            event_at += is_event.to(tl.int32)
            event = tl.where(is_event, next_event, event)
            event_bits = tl.where(is_event, next_event_bits, event_bits)
            third, third_bits = _load_event(
                positions, bits, event_at + 1, is_event & (event_at + 1 < events_end), start
            )
            next_event = tl.where(is_event, third, next_event)
            next_event_bits = tl.where(is_event, third_bits, next_event_bits)
            known_at += is_known.to(tl.int32)
            known = tl.where(is_known, next_known, known)
            known_bits = tl.where(is_known, next_known_bits, known_bits)
            later, later_bits = _load_expected(
                expected_low, expected_high, expected_bits, known_at + 1,
                is_known & (known_at + 1 < known_end),
            )  # fmt: skip
            next_known = tl.where(is_known, later, next_known)
            next_known_bits = tl.where(is_known, later_bits, next_known_bits)

            old = here.to(KIND, bitcast=True).to(tl.uint32)
            row = _row_of(old, piece, table, SHIFT, MASK)
            is_negative, sign_word = _sign(words, last_sign, ordinal, is_change, sign_word)
            state, at, size = _pop_step(
                state, at, words, stop, row, tl.load(tables + row), is_change, entries, tokens,
                n_halvings, WIDTH,
            )  # fmt: skip
            new = _moved(old, size, is_negative, WIDTH, ORDERED)
            new, n_met, next_odd, is_too_wide = _except(
                odd, n_odd, n_met, next_odd, ordinal, is_change, new, is_too_wide, WIDTH
            )
            new = tl.where(is_change, new, old).to(KIND).to(bits.dtype.element_ty, bitcast=True)
            tl.store(positions + out, start + place, mask=is_on)
            tl.store(bits + out, new, mask=is_on)
            is_both = is_event & is_known
            tl.store(positions + out + 1, start + place, mask=is_both)
            tl.store(bits + out + 1, new, mask=is_both)
            out += is_event.to(tl.int32) + is_known.to(tl.int32)
            ordinal += is_change.to(tl.int32)

    is_end = (at == last_sign + 1 - ((ordinal + 31) >> 5)) & (
        state == (tl.full((), 1, tl.uint64) << 32)
    )
    bad = tl.where((bad == 0) & ~is_end, 2, bad)
    # Signs past the last change are zero.
    is_cut = (bad == 0) & ((ordinal & 31) != 0)
    bad = tl.where(is_cut & ((sign_word >> (ordinal & 31).to(tl.uint32)) != 0), 2, bad)
    # All exceptions were met, so they are in order and in range.
    bad = tl.where((bad == 0) & ((n_met != n_odd) | is_too_wide), 3, bad)
    tl.store(told + chunk, bad, mask=is_chunk)
    tl.store(told + n_chunks + chunk, ordinal, mask=is_chunk)
