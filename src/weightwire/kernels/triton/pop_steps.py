"""Old bits become new ones: what one step changes at once, the rest as the coder says.

Most changes are of classes that only ever take single steps: the coder has nothing for them. Signs
and exceptions are told by a change's number, so a warp applies them to a chunk's changes side by
side, and lists those with a step to be read. Only these go through the coder, a lane per chunk. What
it does next hangs on its state alone; all else is looked up ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.elements import (
    COUNT_SHIFT,
    ENTRY_MASK,
    FREQUENCY_SHIFT,
    ONE_STEP_SHIFT,
    TABLE_ROW,
    from_ordered,
    magnitude_of_token,
    raw_bits_of,
    to_ordered,
)
from weightwire.kernels.triton.launch import TRITON_BITS
from weightwire.kernels.triton.merge import class_of
from weightwire.kernels.triton.models import DeviceModels
from weightwire.kernels.triton.pop import EVENTS, HAS_EXCEPTIONS, LANES, SLOTS, Popped
from weightwire.kernels.triton.weight_index import CodedChunks
from weightwire.model import DType

_BLOCK = 128
"""Changes that are applied at a time."""

# What the list says of a change: its place among what the chunk has listed, and
PLACE_MASK = tl.constexpr((1 << 21) - 1)
NEGATIVE_SHIFT = tl.constexpr(21)
LISTED_CLASS_SHIFT = tl.constexpr(22)
ODD_SHIFT = tl.constexpr(26)
"""Set for an exception: its step is read, but leads nowhere."""


def pop_steps(
    chunks: CodedChunks,
    popped: Popped,
    payload: torch.Tensor,
    models: DeviceModels,
    most_tokens: int,
    dtype: DType,
    n_expected: torch.Tensor,
    n_coded: torch.Tensor,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    """Turn old bits into new ones, in place; of each chunk's changes ``n_coded`` are coded.

    No class of the models has more than ``most_tokens`` tokens.
    """
    ends = n_coded.cumsum(0, dtype=torch.int64)
    first_coded = ends - n_coded
    coded = torch.empty(int(ends[-1]), dtype=torch.int32, device=bits.device)
    kinds = {
        "KIND": TRITON_BITS[dtype.n_bytes], "WIDTH": 8 * dtype.n_bytes, "ORDERED": dtype.ordered,
    }  # fmt: skip
    _apply_kernel[(len(chunks),)](
        chunks.piece, chunks.head, chunks.first_word, chunks.n_words, payload,
        models.elements, models.tables, n_expected, first_coded, coded,
        first_out, positions, bits, popped.told,
        SHIFT=dtype.key_shift, MASK=dtype.key_mask, N_KEYS=models.n_keys,
        HAS_EXPECTED=models.has_expected, BLOCK=_BLOCK, num_warps=1, **kinds,
    )  # fmt: skip
    _pop_steps_kernel[(triton.cdiv(len(chunks), LANES),)](
        chunks.piece, chunks.head, chunks.first_word, chunks.n_words, payload,
        models.tables, models.tokens, models.entries, n_coded, first_coded, coded,
        first_out, bits, popped.state, popped.next_word, popped.told, len(chunks),
        max(most_tokens - 1, 0).bit_length(),
        LANES=LANES, num_warps=LANES // 32, **kinds,
    )  # fmt: skip


@triton.jit
def _moved(old, size, is_negative, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """Old bits, so many steps up or down."""
    moved = to_ordered(old, WIDTH, ORDERED) + tl.where(is_negative, 0 - size, size)
    moved &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH)
    return from_ordered(moved, WIDTH, ORDERED)


@triton.jit
def _n_odd(words, head, stop):
    """How many exceptions a chunk says it has, and whether there is room for them."""
    is_odd = (head & HAS_EXCEPTIONS) != 0
    count = tl.load(words, mask=is_odd, other=0)
    return count, ~is_odd | ((count >= 1) & (count <= ((stop - 3) >> 1)))


@triton.jit
def _is_change(positions, i, n, is_on):
    """An element that stands there twice is no change."""
    here = tl.load(positions + i, mask=is_on, other=0)
    is_later = is_on & (i > 0)
    is_earlier = is_on & (i + 1 < n)
    is_twice = is_later & (tl.load(positions + i - 1, mask=is_later, other=0) == here)
    is_twice |= is_earlier & (tl.load(positions + i + 1, mask=is_earlier, other=0) == here)
    return is_on & ~is_twice


@triton.jit
def _apply_kernel(
    chunk_piece, heads, first_word, chunk_words, payload,
    elements, tables, n_expected, first_coded, coded,
    first_out, positions, bits, told,
    KIND: tl.constexpr, WIDTH: tl.constexpr, ORDERED: tl.constexpr,
    SHIFT: tl.constexpr, MASK: tl.constexpr, N_KEYS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk: all its changes but those that it lists."""
    chunk = tl.program_id(0)
    bad = tl.load(told + chunk)
    piece = tl.load(chunk_piece + chunk)
    head = tl.load(heads + chunk)
    words = payload + tl.load(first_word + chunk)
    stop = tl.load(chunk_words + chunk)
    n_odd, has_room = _n_odd(words, head, stop)
    bad = tl.where((bad == 0) & ~has_room, 3, bad)
    n_odd = tl.where(bad == 0, n_odd, 0)
    n = tl.where(bad == 0, (head & EVENTS) + tl.load(n_expected + chunk), 0)
    odd = words + stop - 2 * n_odd
    last_sign = stop - 2 * n_odd - 1
    table = elements + piece * N_KEYS
    steps = tables + piece * 16
    out = tl.load(first_out + chunk)
    listed = coded + tl.load(first_coded + chunk)
    next_odd = tl.load(odd, mask=n_odd > 0, other=-1)
    last_odd = tl.full((), -1, tl.int32)
    n_met = tl.full((), 0, tl.int32)
    widest = tl.full((), 0, tl.uint32)
    n_changes = tl.full((), 0, tl.int32)
    for begin in range(0, n, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        is_change = i < n
        if HAS_EXPECTED:
            is_change = _is_change(positions + out, i, n, is_change)
        here = tl.load(bits + out + i, mask=is_change, other=0)
        old = here.to(KIND, bitcast=True).to(tl.uint32)
        own_class = class_of(old, table, SHIFT, MASK)
        is_coded = is_change & ((tl.load(steps + own_class) >> ONE_STEP_SHIFT) == 0)
        # Two counts in one sum: neither has more than the block.
        counts = tl.cumsum(is_change.to(tl.int32) | is_coded.to(tl.int32) << 16, 0)
        ordinal = n_changes + (counts & 0xFFFF) - 1
        sign_at = tl.maximum(last_sign - (ordinal >> 5), 0)
        signs = tl.load(words + sign_at, mask=is_change, other=0)
        is_negative = ((signs >> (ordinal & 31)) & 1) != 0
        new = _moved(old, tl.full((), 1, tl.uint32), is_negative, WIDTH, ORDERED)
        total = tl.max(counts, 0)
        n_changes += total & 0xFFFF
        is_odd = is_change & (i < 0)
        while (n_met < n_odd) & (next_odd > last_odd) & (next_odd < n_changes):
            told_bits = tl.load(odd + 2 * n_met + 1).to(tl.uint32, bitcast=True)
            widest |= told_bits
            is_this = is_change & (ordinal == next_odd)
            new = tl.where(is_this, told_bits, new)
            is_odd |= is_this
            n_met += 1
            last_odd = next_odd
            next_odd = tl.load(odd + 2 * n_met, mask=n_met < n_odd, other=-1)
        entry = i | is_negative.to(tl.int32) << NEGATIVE_SHIFT
        entry |= own_class << LISTED_CLASS_SHIFT | is_odd.to(tl.int32) << ODD_SHIFT
        tl.store(listed + (counts >> 16) - 1, entry, mask=is_coded)
        listed += total >> 16
        new = new.to(KIND).to(bits.dtype.element_ty, bitcast=True)
        tl.store(bits + out + i, new, mask=is_change & (~is_coded | is_odd))

    # Signs past the last change are zero.
    is_cut = (bad == 0) & ((n_changes & 31) != 0)
    last_signs = tl.load(words + tl.maximum(last_sign - (n_changes >> 5), 0), mask=is_cut, other=0)
    is_dirty = (last_signs.to(tl.uint32, bitcast=True) >> (n_changes & 31).to(tl.uint32)) != 0
    bad = tl.where(is_cut & is_dirty, 2, bad)
    # All exceptions were met, so they are in order and in range.
    is_too_wide = widest > (tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH))
    bad = tl.where((bad == 0) & ((n_met != n_odd) | is_too_wide), 3, bad)
    tl.store(told + chunk, bad)


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
    state, at, words, stop, row, about, is_on, entries, tokens, n_halvings, WIDTH: tl.constexpr
):
    """How many steps a listed change takes, as uint32."""
    word = tl.load(words + tl.minimum(at, stop - 1))
    next_word = tl.load(words + tl.minimum(at + 1, stop - 1))
    entry_at = row.to(tl.int64) * TABLE_ROW
    n_here = (about >> COUNT_SHIFT) & 0xFF
    is_symbol = is_on & (n_here > 1)
    slot = (state & (SLOTS - 1)).to(tl.int32)
    symbol = _find_symbol(entries + entry_at, n_here, slot, n_halvings)
    token = tl.load(tokens + entry_at + symbol).to(tl.int32)
    entry = tl.load(entries + entry_at + symbol)
    popped = (entry >> FREQUENCY_SHIFT).to(tl.uint64) * (state >> 12)
    popped += (slot - (entry & ENTRY_MASK)).to(tl.uint64)
    state, is_due = _refill(tl.where(is_symbol, popped, state), is_symbol, word)
    at += is_due.to(tl.int32)
    n_raw = raw_bits_of(token)
    word = tl.where(is_due, next_word, word)
    state, is_due, raw = _pop_bits(state, tl.minimum(n_raw, 16), is_on, word)
    at += is_due.to(tl.int32)
    if WIDTH == 32:
        word = tl.load(words + tl.minimum(at, stop - 1))
        state, is_due, high = _pop_bits(state, n_raw - 16, is_on, word)
        at += is_due.to(tl.int32)
        raw |= high << 16
    return state, at, magnitude_of_token(token, raw) + 1


@triton.jit
def _look_up(entry, is_on, first_row, tables, bits):
    """The step table of a listed change, what is said of that, and the change's old bits."""
    row = first_row + ((entry >> LISTED_CLASS_SHIFT) & 15)
    return row, tl.load(tables + row), tl.load(bits + (entry & PLACE_MASK), mask=is_on, other=0)


@triton.jit(do_not_specialize=["n_chunks", "n_halvings"])
def _pop_steps_kernel(
    chunk_piece, heads, first_word, chunk_words, payload,
    tables, tokens, entries, n_coded, first_coded, coded,
    first_out, bits, states, next_word, told, n_chunks, n_halvings,
    KIND: tl.constexpr, WIDTH: tl.constexpr, ORDERED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane per chunk: one listed change after the other."""
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = number < n_chunks
    # Lanes without a chunk have the last one's, and nothing to do.
    chunk = tl.minimum(number, n_chunks - 1)
    words = payload + tl.load(first_word + chunk)
    stop = tl.load(chunk_words + chunk)
    bad = tl.where(is_chunk, tl.load(told + chunk), 1)
    n = tl.where(bad == 0, tl.load(n_coded + chunk), 0)
    listed = coded + tl.load(first_coded + chunk)
    here_bits = bits + tl.load(first_out + chunk)
    first_row = tl.load(chunk_piece + chunk) * 16
    state = tl.load(states + chunk).to(tl.uint64, bitcast=True)
    at = tl.load(next_word + chunk)
    entry = tl.load(listed, mask=n > 0, other=0)
    coming = tl.load(listed + 1, mask=n > 1, other=0)
    row, about, here = _look_up(entry, n > 0, first_row, tables, here_bits)
    for turn in range(tl.max(n, 0)):
        is_on = turn < n
        later = tl.load(listed + turn + 2, mask=turn + 2 < n, other=0)
        next_row, next_about, next_here = _look_up(
            coming, turn + 1 < n, first_row, tables, here_bits
        )
        state, at, size = _pop_step(
            state, at, words, stop, row, about, is_on, entries, tokens, n_halvings, WIDTH
        )
        old = here.to(KIND, bitcast=True).to(tl.uint32)
        is_negative = ((entry >> NEGATIVE_SHIFT) & 1) != 0
        new = _moved(old, size, is_negative, WIDTH, ORDERED).to(KIND)
        is_kept = is_on & ((entry >> ODD_SHIFT) == 0)
        new = new.to(bits.dtype.element_ty, bitcast=True)
        tl.store(here_bits + (entry & PLACE_MASK), new, mask=is_kept)
        entry, coming = coming, later
        row, about, here = next_row, next_about, next_here

    n_odd, _ = _n_odd(words, tl.load(heads + chunk), stop)
    n_signs = (tl.load(told + n_chunks + chunk) + 31) >> 5
    is_end = (at == stop - 2 * n_odd - n_signs) & (state == (tl.full((), 1, tl.uint64) << 32))
    tl.store(told + chunk, tl.where((bad == 0) & ~is_end, 2, bad), mask=is_chunk)
