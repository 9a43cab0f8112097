"""The stack coder's reader on a GPU: mirrors ``push.py``, and trusts nothing it reads.

Gaps first, a program per chunk: the place of an event must be found among the weights of the
elements before the next gap can be read, and all lanes search together. Then step magnitudes, a
lane per chunk. A stream that no encoder wrote ends in a mark, never in a wild access: words are read
inside the chunk, elements inside the tile, and every loop moves forward.
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
    CLASS_SHIFT,
    COUNT_SHIFT,
    ENTRY_MASK,
    EXPECTED_SHIFT,
    FREQUENCY_SHIFT,
    LOG2_SHIFT,
    ONE_STEP_SHIFT,
    SUMMED_MASK,
    TABLE_ROW,
    WEIGHT_MASK,
    WEIGHT_SUM_MASK,
    from_ordered,
    magnitude_of_token,
    raw_bits_of,
    to_ordered,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, alignment_of, memory_at
from weightwire.kernels.triton.models import DeviceModels, gap_slots
from weightwire.model import DType

LANES = 32
CONTINUE_SYMBOL = tl.constexpr(CONTINUE)
HAS_EXCEPTIONS = tl.constexpr(EXCEPTIONS)
EVENTS = tl.constexpr(EVENT_MASK)
SLOTS = tl.constexpr(PROBABILITY_SUM)

GAP_REGISTERS = 64
"""As few as leave enough programs on a processor to wait for memory in turns."""

WINDOW = tl.constexpr(256)
"""Elements that an event is sought among."""
PLACE_BITS = tl.constexpr(8)
LAST_PLACE = tl.constexpr(255)

NOWHERE = tl.constexpr(0x7FFFFFFF)
"""Past every place: a list that has come to its end."""

TROUBLES = (
    "",
    "a position lies past the end of its chunk",
    "stream does not end where it must",
    "an exception is out of order or out of range",
)
"""What a chunk's mark means."""


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


def room_for_expected(counts: torch.Tensor, n: int, like: torch.Tensor) -> Expected:
    """Room for ``n`` elements in all."""
    low, high, bits = (
        torch.empty(max(n, 1), dtype=kind, device=counts.device)
        for kind in (torch.int16, torch.int16, like.dtype)
    )
    wide = counts.long()
    return Expected(counts, wide.cumsum(0) - wide, low, high, bits)


def count_expected(
    old: Bucket, chunks: CodedChunks, models: DeviceModels, dtype: DType
) -> torch.Tensor:
    """How many elements of each chunk are expected to change."""
    counts = torch.empty(len(chunks), dtype=torch.int32, device=old.device)
    _count_expected_kernel[(len(chunks),)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, models.elements, counts,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, SPAN=4096, ALIGNMENT=alignment_of(old.memories), num_warps=4,
    )  # fmt: skip
    return counts


@triton.jit
def _count_expected_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, elements, counts,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, N_KEYS: tl.constexpr,
    SPAN: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One chunk."""
    chunk = tl.program_id(0)
    piece = tl.load(chunk_piece + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    old = memory_at(olds, piece, KIND) + tl.load(chunk_start + chunk)
    table = elements + piece * N_KEYS
    place = tl.arange(0, SPAN)
    found = tl.zeros((SPAN,), tl.int32)
    n_whole = n // SPAN
    for number in range(n_whole):
        here = tl.multiple_of(old + number * SPAN, ALIGNMENT)
        told = told_by_key(tl.load(here + place).to(tl.uint32), table, SHIFT, MASK)
        found += (told >> EXPECTED_SHIFT) & 1
    rest = n_whole * SPAN + place
    bits = tl.load(old + rest, mask=rest < n, other=0).to(tl.uint32)
    told = told_by_key(bits, table, SHIFT, MASK)
    found += tl.where(rest < n, (told >> EXPECTED_SHIFT) & 1, 0)
    tl.store(counts + chunk, tl.sum(found, 0))


def pop_gaps(
    old: Bucket,
    chunks: CodedChunks,
    payload: torch.Tensor,
    models: DeviceModels,
    dtype: DType,
    expected: Expected,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
) -> Popped:
    """List every event and every element that is expected to change.

    A chunk has room for both from ``first_out`` on; its events stand at the end of that, with places
    in the chunk and with *old* bits, for ``pop_steps`` to merge with what was expected.
    """
    n, device = len(chunks), payload.device
    popped = Popped(
        torch.empty(n, dtype=torch.int64, device=device),
        *(torch.empty(n, dtype=torch.int32, device=device) for _ in range(3)),
    )
    _pop_gaps_kernel[(n,)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.head,
        chunks.first_word, chunks.n_words, payload, models.elements, gap_slots(device),
        expected.counts, expected.first, expected.low, expected.high, expected.bits,
        first_out, positions, bits, popped.state, popped.next_word, popped.trouble,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, HAS_EXPECTED=models.has_expected,
        ALIGNMENT=alignment_of(old.memories), num_warps=1, maxnreg=GAP_REGISTERS,
    )  # fmt: skip
    return popped


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
def _take_event(
    keyed, here, table, slots, shift, words, state, at, stop, slot, before, left,
    SHIFT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The element of this tile that the next event falls on; then on to the event after it."""
    inside = (slot - before).to(tl.int32)
    found = tl.max(tl.where(keyed <= ((inside << PLACE_BITS) | LAST_PLACE), keyed, 0), 0)
    hit = found & LAST_PLACE
    offset = inside - (found >> PLACE_BITS)
    bits = tl.load(here + hit)
    log2_weight = (told_by_key(bits.to(tl.uint32), table, SHIFT, MASK) >> LOG2_SHIFT) & 15
    by = log2_weight.to(tl.uint64)
    state, at = _refill(state, (tl.full((), 1, tl.uint64) << 32) >> by, words, at, stop)
    state = (state << by) | offset.to(tl.uint64)
    slot += (1 << log2_weight) - offset
    left -= 1
    if left > 0:
        state, at, gap = _pop_gap(state, slots, shift, words, at, stop)
        slot += gap
    return state, at, slot, left, hit, bits


@triton.jit
def _pop_gaps_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, heads,
    first_word, chunk_words, payload, elements, all_slots,
    n_expected, first_expected, expected_low, expected_high, expected_bits,
    first_out, positions, bits, states, next_word, trouble,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    N_KEYS: tl.constexpr, HAS_EXPECTED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One chunk, tile by tile. ``slot`` is the next event's place in the chunk's weight space."""
    chunk = tl.program_id(0)
    piece = tl.load(chunk_piece + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    head = tl.load(heads + chunk).to(tl.uint32, bitcast=True)
    words = payload + tl.load(first_word + chunk)
    stop = tl.load(chunk_words + chunk)
    table = elements + piece * N_KEYS
    old = memory_at(olds, piece, KIND) + tl.load(chunk_start + chunk)
    out = tl.load(first_out + chunk) + tl.load(n_expected + chunk)
    expected_out = tl.load(first_expected + chunk)
    rate = (head >> 24).to(tl.int32)
    shift = rate >> 3
    slots = all_slots + (rate & 7) * SLOTS
    at = tl.where((head & HAS_EXCEPTIONS) != 0, 1, 0)
    low_word = tl.load(words + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    high_word = tl.load(words + at + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    state = low_word | (high_word << 32)
    at += 2
    left = (head & EVENTS).to(tl.int32)
    slot = tl.full((), 0, tl.int64)
    if left > 0:
        state, at, gap = _pop_gap(state, slots, shift, words, at, stop)
        slot += gap
    place = tl.arange(0, WINDOW)
    before = tl.full((), 0, tl.int64)
    coming = tl.load(old + place, mask=place < n, other=0)
    for begin in range(0, n, WINDOW):
        tile = coming
        here = old + begin
        after = begin + WINDOW
        if after + WINDOW <= n:
            coming = tl.load(tl.multiple_of(old + after, ALIGNMENT) + place)
        else:
            coming = tl.load(old + after + place, mask=after + place < n, other=0)
        is_there = begin + place < n
        told = told_by_key(tile.to(tl.uint32), table, SHIFT, MASK)
        summed = told & (SUMMED_MASK if HAS_EXPECTED else WEIGHT_MASK)
        summed = tl.where(is_there, summed, 0)
        running = tl.cumsum(summed, 0)
        totals = tl.max(running, 0)
        starts = running - summed
        total = totals & WEIGHT_SUM_MASK
        if HAS_EXPECTED:  # noqa: SIM102 (one is known when this is compiled, the other is not)
            if (totals >> EXPECTED_SHIFT) > 0:
                to = expected_out + (starts >> EXPECTED_SHIFT)
                # Said to lie together for the layout's sake; each has a mask of its own.
                low_at = tl.max_contiguous(tl.multiple_of(expected_low + to, 16), 8)
                high_at = tl.max_contiguous(tl.multiple_of(expected_high + to, 16), 8)
                bits_at = tl.max_contiguous(tl.multiple_of(expected_bits + to, 16), 8)
                low = ((begin + place) & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
                high = ((begin + place) >> 16).to(tl.int16)
                same = tile.to(bits.dtype.element_ty, bitcast=True)
                is_expected = (summed >> EXPECTED_SHIFT) != 0
                tl.store(low_at, low, mask=is_expected)
                tl.store(high_at, high, mask=is_expected)
                tl.store(bits_at, same, mask=is_expected)
                expected_out += totals >> EXPECTED_SHIFT
        keyed = ((starts & WEIGHT_SUM_MASK) << PLACE_BITS) | place
        keyed = tl.where(is_there, keyed, NOWHERE)
        while (left > 0) & (slot < before + total):
            state, at, slot, left, hit, from_bits = _take_event(
                keyed, here, table, slots, shift, words, state, at, stop, slot, before, left,
                SHIFT, MASK,
            )  # fmt: skip
            tl.store(positions + out, begin + hit)
            tl.store(bits + out, from_bits.to(bits.dtype.element_ty, bitcast=True))
            out += 1
        before += total
    tl.store(states + chunk, state.to(tl.int64, bitcast=True))
    tl.store(next_word + chunk, at)
    is_bad_end = (at > stop) | (high_word == 0)
    tl.store(trouble + chunk, tl.where(left > 0, 1, tl.where(is_bad_end, 2, 0)))


def pop_steps(
    chunks: CodedChunks,
    popped: Popped,
    payload: torch.Tensor,
    models: DeviceModels,
    dtype: DType,
    expected: Expected,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    """Merge events with what was expected, and turn old bits into new ones, in place.

    An element that is both was expected to change and does not: it stands there twice, as it is.
    """
    _pop_steps_kernel[(triton.cdiv(len(chunks), LANES),)](
        chunks.piece, chunks.start, chunks.head, chunks.first_word, chunks.n_words, payload,
        models.elements, models.tables, models.tokens, models.entries,
        expected.counts, expected.first, expected.low, expected.high, expected.bits,
        first_out, positions, bits,
        popped.state, popped.next_word, popped.n_changed, popped.trouble, len(chunks),
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, ORDERED=dtype.ordered, N_KEYS=models.n_keys,
        HAS_EXPECTED=models.has_expected, LANES=LANES, num_warps=1,
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
def _load_expected(low, high, bits, at, is_on):
    """A place in the chunk, or nowhere, and the bits there."""
    lower = tl.load(low + at, mask=is_on, other=0).to(tl.uint16, bitcast=True).to(tl.int32)
    upper = tl.load(high + at, mask=is_on, other=0).to(tl.int32)
    place = tl.where(is_on, (upper << 16) | lower, NOWHERE)
    return place, tl.load(bits + at, mask=is_on, other=0)


@triton.jit
def _pop_steps_kernel(
    chunk_piece, chunk_start, heads, first_word, chunk_words, payload,
    elements, tables, tokens, entries,
    n_expected, first_expected, expected_low, expected_high, expected_bits,
    first_out, positions, bits,
    states, next_word, n_changed, trouble, n_chunks,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, ORDERED: tl.constexpr, N_KEYS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane per chunk, element by element. What is written is never past what is yet to be read."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = chunk < n_chunks
    piece = tl.load(chunk_piece + chunk, mask=is_chunk, other=0)
    start = tl.load(chunk_start + chunk, mask=is_chunk, other=0).to(tl.int32)
    head = tl.load(heads + chunk, mask=is_chunk, other=0)
    words = payload + tl.load(first_word + chunk, mask=is_chunk, other=0)
    stop = tl.load(chunk_words + chunk, mask=is_chunk, other=2)
    bad = tl.load(trouble + chunk, mask=is_chunk, other=1)
    table = elements + piece * N_KEYS
    state = tl.load(states + chunk, mask=is_chunk, other=0).to(tl.uint64, bitcast=True)
    at = tl.load(next_word + chunk, mask=is_chunk, other=0)
    is_odd = (head & HAS_EXCEPTIONS) != 0
    n_odd = tl.where(is_odd, tl.load(words, mask=is_chunk & is_odd, other=0), 0)
    bad = tl.where((bad == 0) & is_odd & ((n_odd < 1) | (n_odd > ((stop - 3) >> 1))), 3, bad)
    n_odd = tl.where(bad == 0, n_odd, 0)
    last_sign = stop - 2 * n_odd - 1
    n_met = tl.zeros((LANES,), tl.int32)
    is_too_wide = tl.zeros((LANES,), tl.int1)
    odd = words + stop - 2 * n_odd
    next_odd = tl.load(odd, mask=n_odd > 0, other=-1)

    n_events = tl.where(bad == 0, head & EVENTS, 0)
    n_known = tl.load(n_expected + chunk, mask=is_chunk, other=0)
    out = tl.load(first_out + chunk, mask=is_chunk, other=0)
    event_at = out + n_known
    events_end = event_at + n_events
    known_at = tl.load(first_expected + chunk, mask=is_chunk, other=0)
    known_end = known_at + tl.where(bad == 0, n_known, 0)
    event = tl.load(positions + event_at, mask=event_at < events_end, other=NOWHERE)
    event_bits = tl.load(bits + event_at, mask=event_at < events_end, other=0)
    is_more = event_at + 1 < events_end
    next_event = tl.load(positions + event_at + 1, mask=is_more, other=NOWHERE)
    next_event_bits = tl.load(bits + event_at + 1, mask=is_more, other=0)
    known, known_bits = _load_expected(
        expected_low, expected_high, expected_bits, known_at, known_at < known_end
    )
    next_known, next_known_bits = _load_expected(
        expected_low, expected_high, expected_bits, known_at + 1, known_at + 1 < known_end
    )
    ordinal = tl.zeros((LANES,), tl.int32)
    sign_word = tl.zeros((LANES,), tl.uint32)
    while tl.min(tl.minimum(event, known), 0) < NOWHERE:
        place = tl.minimum(event, known)
        is_on = place < NOWHERE
        is_event = is_on & (event == place)
        is_known = is_on & (known == place)
        is_change = is_event ^ is_known
        old = tl.where(is_event, event_bits, known_bits).to(KIND, bitcast=True).to(tl.uint32)
        # The lists go on while this element's step is read.
        event_at = tl.where(is_event, event_at + 1, event_at)
        is_more = is_event & (event_at + 1 < events_end)
        event = tl.where(is_event, next_event, event)
        event_bits = tl.where(is_event, next_event_bits, event_bits)
        third = tl.load(positions + event_at + 1, mask=is_more, other=NOWHERE)
        third_bits = tl.load(bits + event_at + 1, mask=is_more, other=0)
        next_event = tl.where(is_event, third, next_event)
        next_event_bits = tl.where(is_event, third_bits, next_event_bits)
        if HAS_EXPECTED:
            known_at = tl.where(is_known, known_at + 1, known_at)
            known = tl.where(is_known, next_known, known)
            known_bits = tl.where(is_known, next_known_bits, known_bits)
            later, later_bits = _load_expected(
                expected_low, expected_high, expected_bits, known_at + 1,
                is_known & (known_at + 1 < known_end),
            )  # fmt: skip
            next_known = tl.where(is_known, later, next_known)
            next_known_bits = tl.where(is_known, later_bits, next_known_bits)

        is_new_word = is_change & ((ordinal & 31) == 0)
        sign_at = tl.maximum(last_sign - (ordinal >> 5), 0)
        fresh = tl.load(words + sign_at, mask=is_new_word, other=0)
        sign_word = tl.where(is_new_word, fresh.to(tl.uint32, bitcast=True), sign_word)
        is_negative = ((sign_word >> (ordinal & 31).to(tl.uint32)) & 1) != 0
        row = piece * 16 + ((told_by_key(old, table, SHIFT, MASK) >> CLASS_SHIFT) & 15)
        about = tl.load(tables + row)
        is_coded = is_change & ((about >> ONE_STEP_SHIFT) == 0)
        entry_at = row.to(tl.int64) * TABLE_ROW
        n_here = (about >> COUNT_SHIFT) & 0xFF
        is_symbol = is_coded & (n_here > 1)
        slot = (state & (SLOTS - 1)).to(tl.int32)
        # The last entry that starts at or before the slot.
        symbol = tl.zeros((LANES,), tl.int32)
        half = tl.where(is_symbol, 64, 0)
        half = tl.where(n_here <= 16, half >> 3, half)
        while tl.max(half, 0) > 0:
            tried = symbol + half
            is_inside = (half > 0) & (tried < n_here)
            begins = tl.load(entries + entry_at + tried, mask=is_inside, other=0) & ENTRY_MASK
            symbol = tl.where(is_inside & (begins <= slot), tried, symbol)
            half = half >> 1
        entry = tl.load(entries + entry_at + symbol, mask=is_symbol, other=0)
        frequency = (entry >> FREQUENCY_SHIFT).to(tl.uint64)
        popped = frequency * (state >> 12) + (slot - (entry & ENTRY_MASK)).to(tl.uint64)
        state = tl.where(is_symbol, popped, state)
        state, at = _refill_lanes(state, is_symbol, words, at, stop)
        token = tl.load(tokens + entry_at + symbol, mask=is_coded, other=0).to(tl.int32)
        n_raw = raw_bits_of(token)
        state, at, raw = _pop_bits(state, tl.minimum(n_raw, 16), is_coded, words, at, stop)
        if WIDTH == 32:
            state, at, high = _pop_bits(state, n_raw - 16, is_coded, words, at, stop)
            raw |= high << 16
        size = magnitude_of_token(token, raw) + 1
        moved = to_ordered(old, WIDTH, ORDERED) + tl.where(is_negative, 0 - size, size)
        moved &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH)
        new = from_ordered(moved, WIDTH, ORDERED)
        is_odd_here = is_change & (ordinal == next_odd)
        told = tl.load(odd + 2 * n_met + 1, mask=is_odd_here, other=0).to(tl.uint32, bitcast=True)
        if WIDTH < 32:
            is_too_wide |= is_odd_here & ((told >> WIDTH) != 0)
        new = tl.where(is_odd_here, told, new)
        n_met = tl.where(is_odd_here, n_met + 1, n_met)
        after = tl.load(odd + 2 * n_met, mask=is_odd_here & (n_met < n_odd), other=-1)
        next_odd = tl.where(is_odd_here, after, next_odd)
        new = tl.where(is_change, new, old).to(KIND).to(bits.dtype.element_ty, bitcast=True)
        tl.store(positions + out, start + place, mask=is_on)
        tl.store(bits + out, new, mask=is_on)
        if HAS_EXPECTED:
            is_both = is_event & is_known
            tl.store(positions + out + 1, start + place, mask=is_both)
            tl.store(bits + out + 1, new, mask=is_both)
        out += is_event.to(tl.int32) + is_known.to(tl.int32)
        ordinal = tl.where(is_change, ordinal + 1, ordinal)

    is_ended = (at == last_sign + 1 - ((ordinal + 31) >> 5)) & (
        state == (tl.full((), 1, tl.uint64) << 32)
    )
    bad = tl.where((bad == 0) & ~is_ended, 2, bad)
    # Signs past the last change are zero.
    is_cut = (bad == 0) & ((ordinal & 31) != 0)
    bad = tl.where(is_cut & ((sign_word >> (ordinal & 31).to(tl.uint32)) != 0), 2, bad)
    # All exceptions were met, so they are in order and in range.
    bad = tl.where((bad == 0) & ((n_met != n_odd) | is_too_wide), 3, bad)
    tl.store(n_changed + chunk, ordinal, mask=is_chunk)
    tl.store(trouble + chunk, bad, mask=is_chunk)
