"""The stack coder on a GPU: a lane per chunk, each pushing its chunk's words backwards.

A chunk is a chain of dependent steps, and there are tens of thousands of chunks. Lanes walk their
chunks' listed elements from the last to the first, twice: step magnitudes and signs, then gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from weightwire.kernels.gaps import CONTINUE, HEADROOM_LOG2, MAX_RATE, RATE_BORDERS_Q16
from weightwire.kernels.triton.collect import (
    PLACE_BITS,
    PLACE_MASK,
    START_SHIFT,
    TILE_ELEMENTS,
    Tiles,
)
from weightwire.kernels.triton.elements import (
    N_CLASSES,
    TABLE_ROW,
    TILE,
    bit_of,
    log2_weight_of,
    magnitude_of_step,
    raw_bits_of,
    token_of,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, to_device
from weightwire.kernels.triton.models import DeviceModels, gap_starts
from weightwire.model import DType

LANES = 32
PROBABILITY_BITS = tl.constexpr(12)
CONTINUE_SYMBOL = tl.constexpr(CONTINUE)
_MAX_RATE = tl.constexpr(MAX_RATE)
_HEADROOM = tl.constexpr(HEADROOM_LOG2)
GAP_ROW = tl.constexpr(32)


@dataclass(frozen=True)
class Chunks:
    """The chunks of some pieces: where each begins, and what its tiles add up to."""

    piece: torch.Tensor
    first_tile: torch.Tensor
    n_tiles: torch.Tensor
    n_elements: torch.Tensor
    weight: torch.Tensor
    n_listed: torch.Tensor
    n_changed: torch.Tensor
    n_events: torch.Tensor
    rate: torch.Tensor


@dataclass(frozen=True)
class Stacks:
    """What was pushed for every chunk, in pieces that are yet to be joined."""

    words: torch.Tensor
    """int32: each chunk's own room, filled from its end to its start."""
    room_ends: torch.Tensor
    """int64: where each chunk's room ends in ``words``."""
    n_words: torch.Tensor
    state: torch.Tensor
    signs: torch.Tensor
    """int32: each chunk's sign words, last first."""
    first_sign: torch.Tensor
    exceptions: torch.Tensor
    """int32 [chunk, 2 * room]: pairs of ordinal and bits, filled from the end."""
    n_exceptions: torch.Tensor
    is_over: torch.Tensor
    """1 where a room was too small: nothing of the chunk counts."""


_BORDERS = np.array(
    [RATE_BORDERS_Q16[rate % 8] << (2 + rate // 8) for rate in range(MAX_RATE + 1)], dtype=np.int64
)
"""The mean gap, in 2^-16 slots per event, from which on each rate is chosen."""

EXCEPTION_ROOM = 64
"""Exceptions a chunk has room for; more come from data that no sample foretold."""


def add_up(
    tiles: Tiles,
    piece: torch.Tensor,
    first_tile: torch.Tensor,
    n_elements: torch.Tensor,
    models: DeviceModels,
) -> Chunks:
    """Sum the tiles of every chunk and choose its rate."""
    n_chunks = len(piece)

    def words() -> torch.Tensor:
        return torch.empty(n_chunks, dtype=torch.int32, device=piece.device)

    n_tiles = torch.div(n_elements + (TILE_ELEMENTS - 1), TILE_ELEMENTS, rounding_mode="floor")
    found = Chunks(
        piece, first_tile, n_tiles.to(torch.int32), n_elements,
        words(), words(), words(), words(), words(),
    )  # fmt: skip
    borders = to_device(_BORDERS, piece.device)
    _add_up_kernel[(n_chunks,)](
        tiles.places, tiles.steps, tiles.weights, tiles.n_listed, tiles.n_changed,
        found.piece, found.first_tile, found.n_tiles, models.expected, models.nibbles, borders,
        found.weight, found.n_listed, found.n_changed, found.n_events, found.rate,
        HAS_EXPECTED=models.has_expected, ROOM=tiles.room, num_warps=1,
    )  # fmt: skip
    return found


@triton.jit
def _add_up_kernel(
    places, steps, tile_weight, tile_listed, tile_changed,
    chunk_piece, chunk_first_tile, chunk_tiles, expected_masks, nibbles, borders,
    weight, n_listed, n_changed, n_events, rate,
    HAS_EXPECTED: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One chunk of at most 1024 tiles."""
    chunk = tl.program_id(0)
    first = tl.load(chunk_first_tile + chunk).to(tl.int64)
    count = tl.load(chunk_tiles + chunk)
    piece = tl.load(chunk_piece + chunk)
    lane = tl.arange(0, 128)
    weights = tl.zeros((128,), tl.int32)
    listed = tl.zeros((128,), tl.int32)
    changed = tl.zeros((128,), tl.int32)
    events = tl.zeros((128,), tl.int32)
    for begin in range(0, count, 128):
        here = begin + lane
        mask = here < count
        weights += tl.load(tile_weight + first + here, mask=mask, other=0)
        listed += tl.load(tile_listed + first + here, mask=mask, other=0)
        changed += tl.load(tile_changed + first + here, mask=mask, other=0)
    if HAS_EXPECTED:
        expected = tl.load(expected_masks + piece)
        for number in range(count):
            tile = first + number
            n_here = tl.load(tile_listed + tile)
            for begin in range(0, n_here, 128):
                mask = begin + lane < n_here
                at = tile * ROOM + begin + lane
                step = tl.load(steps + at, mask=mask, other=0)
                classes = (tl.load(places + at, mask=mask, other=0) >> PLACE_BITS) & 15
                is_event = ((step != 0).to(tl.int32) ^ bit_of(expected, classes)) & mask.to(
                    tl.int32
                )
                events += is_event
    else:
        events = listed
    total_weight = tl.sum(weights, 0)
    total_events = tl.sum(events, 0)
    tl.store(weight + chunk, total_weight)
    tl.store(n_listed + chunk, tl.sum(listed, 0))
    tl.store(n_changed + chunk, tl.sum(changed, 0))
    tl.store(n_events + chunk, total_events)
    lanes = tl.arange(0, 16)
    heaviest = tl.max(log2_weight_of(lanes, tl.load(nibbles + piece)), 0)
    chosen = 8 * tl.maximum(heaviest - _HEADROOM, 0)
    weighed = total_weight.to(tl.int64) << 16
    border = tl.load(borders + tl.minimum(chosen + 1, _MAX_RATE))
    while (chosen < _MAX_RATE) & (weighed >= total_events.to(tl.int64) * border):
        chosen += 1
        border = tl.load(borders + tl.minimum(chosen + 1, _MAX_RATE))
    tl.store(rate + chunk, chosen)


def push(
    tiles: Tiles,
    chunks: Chunks,
    new: Bucket,
    models: DeviceModels,
    dtype: DType,
    rooms: torch.Tensor,
    n_room: int,
    n_signs: int,
    piece_first_tile: torch.Tensor,
) -> Stacks:
    """Code every chunk; ``rooms`` words are set aside for each, ``n_room`` in all."""
    n_chunks, device = len(rooms), rooms.device

    def words(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    signs = (chunks.n_changed.long() + 31) // 32
    stacks = Stacks(
        words=words(max(n_room, 1)),
        room_ends=rooms.long().cumsum(0),
        n_words=words(n_chunks),
        state=torch.empty(n_chunks, dtype=torch.int64, device=device),
        signs=words(max(n_signs, 1)),
        first_sign=signs.cumsum(0) - signs,
        exceptions=words(n_chunks, 2 * EXCEPTION_ROOM),
        n_exceptions=words(n_chunks),
        is_over=words(n_chunks),
    )
    _push_kernel[(triton.cdiv(n_chunks, LANES),)](
        tiles.places, tiles.steps, tiles.weights, tiles.n_listed, new.addresses, piece_first_tile,
        chunks.piece, chunks.first_tile, chunks.n_tiles, chunks.weight, chunks.n_listed,
        chunks.n_changed, chunks.rate, rooms,
        models.nibbles, models.expected, models.one_step, models.n_tokens, models.tokens,
        models.starts, models.frequencies, gap_starts(device),
        stacks.words, stacks.room_ends, stacks.n_words, stacks.state, stacks.signs,
        stacks.first_sign, stacks.exceptions, stacks.n_exceptions, stacks.is_over, n_chunks,
        KIND=TRITON_BITS[dtype.n_bytes], WIDE=dtype.n_bytes == 4, ROOM=tiles.room,
        LANES=LANES, EXCEPTION_ROOM=EXCEPTION_ROOM, num_warps=1,
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
def _push_symbol(state, start, frequency, is_on, words, top, bottom):
    """Code a symbol that owns the slots [start, start + frequency)."""
    wide = tl.where(is_on, frequency, 1).to(tl.uint64)
    state, top = _spill(state, wide << 52, is_on, words, top, bottom)
    quotient = state // wide
    pushed = (quotient << PROBABILITY_BITS) + (state - quotient * wide) + start.to(tl.uint64)
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
def _push_kernel(
    places, steps, tile_weight, tile_listed, news, piece_first_tile,
    chunk_piece, chunk_first_tile, chunk_tiles, chunk_weight, chunk_listed,
    chunk_changed, chunk_rate, rooms,
    all_nibbles, expected_masks, one_step_masks, n_tokens, tokens,
    starts, frequencies, gap_table,
    words, room_ends, n_words, states, signs,
    first_sign, exceptions, n_exceptions, is_over, n_chunks,
    KIND: tl.constexpr, WIDE: tl.constexpr, ROOM: tl.constexpr,
    LANES: tl.constexpr, EXCEPTION_ROOM: tl.constexpr,
):  # fmt: skip
    """A lane per chunk. ``left`` listed elements are yet to be met, ``rest`` of them in this tile."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_chunk = chunk < n_chunks
    piece = tl.load(chunk_piece + chunk, mask=is_chunk, other=0)
    first_tile = tl.load(chunk_first_tile + chunk, mask=is_chunk, other=0).to(tl.int64)
    end_tile = first_tile + tl.load(chunk_tiles + chunk, mask=is_chunk, other=0)
    n_changed = tl.load(chunk_changed + chunk, mask=is_chunk, other=0)
    n_listed = tl.where(n_changed > 0, tl.load(chunk_listed + chunk, mask=is_chunk, other=0), 0)
    nibbles = tl.load(all_nibbles + piece)
    expected = tl.load(expected_masks + piece)
    one_step = tl.load(one_step_masks + piece)
    top = tl.load(room_ends + chunk, mask=is_chunk, other=0)
    bottom = top - tl.load(rooms + chunk, mask=is_chunk, other=0)
    room_end = top
    state = tl.full((LANES,), 1, tl.uint64) << 32

    sign_at = tl.load(first_sign + chunk, mask=is_chunk, other=0)
    sign_word = tl.zeros((LANES,), tl.uint32)
    exception_at = tl.full((LANES,), 2 * EXCEPTION_ROOM, tl.int32)
    n_odd = tl.zeros((LANES,), tl.int32)
    ordinal = n_changed
    tile, left, rest = end_tile, n_listed, tl.zeros((LANES,), tl.int32)
    while tl.max(left, 0) > 0:
        is_next = (left > 0) & (rest == 0)
        tile = tl.where(is_next, tile - 1, tile)
        rest = tl.where(is_next, tl.load(tile_listed + tile, mask=is_next, other=0), rest)
        is_met = rest > 0
        rest = tl.where(is_met, rest - 1, rest)
        left = tl.where(is_met, left - 1, left)
        step = tl.load(steps + tile * ROOM + rest, mask=is_met, other=0)
        packed = tl.load(places + tile * ROOM + rest, mask=is_met, other=0)
        changed = is_met & (step != 0)
        classes = (packed >> PLACE_BITS) & 15
        magnitude = magnitude_of_step(tl.where(changed, step, 1))

        ordinal = tl.where(changed, ordinal - 1, ordinal)
        bit = (changed & (step < 0)).to(tl.uint32) << (ordinal & 31).to(tl.uint32)
        sign_word |= bit
        is_full = changed & ((ordinal & 31) == 0)
        tl.store(signs + sign_at, sign_word.to(tl.int32, bitcast=True), mask=is_full)
        sign_at = tl.where(is_full, sign_at + 1, sign_at)
        sign_word = tl.where(is_full, 0, sign_word)

        is_coded = changed & ((bit_of(one_step, classes) == 0) | (magnitude != 0))
        row = piece * N_CLASSES + classes
        count = tl.load(n_tokens + row, mask=is_coded, other=1)
        first_token = tl.load(tokens + row.to(tl.int64) * TABLE_ROW, mask=is_coded, other=0).to(
            tl.int32
        )
        token = token_of(magnitude)
        symbol = token - first_token
        is_odd = is_coded & ((symbol < 0) | (symbol >= count))
        # What no table can say is coded as the first symbol, and the bits are told at the end.
        has_room = is_odd & (exception_at > 0)
        number = (tile - tl.load(piece_first_tile + piece)) * TILE + (packed & PLACE_MASK)
        pointer = tl.load(news + piece).to(tl.pointer_type(KIND))
        bits = tl.load(pointer + number, mask=is_odd, other=0).to(tl.uint32)
        row_of_odd = exceptions + chunk * (2 * EXCEPTION_ROOM) + exception_at
        tl.store(row_of_odd - 2, ordinal, mask=has_room)
        tl.store(row_of_odd - 1, bits.to(tl.int32, bitcast=True), mask=has_room)
        exception_at = tl.where(has_room, exception_at - 2, exception_at)
        n_odd = tl.where(is_odd, n_odd + 1, n_odd)
        token = tl.where(is_odd, first_token, token)
        symbol = tl.where(is_odd, 0, symbol)

        n_raw = raw_bits_of(token)
        mask = (tl.full((), 1, tl.uint32) << n_raw.to(tl.uint32)) - 1
        raw = tl.where(is_odd, 0, magnitude & mask)
        if WIDE:
            state, top = _push_bits(state, raw >> 16, n_raw - 16, is_coded, words, top, bottom)
        state, top = _push_bits(state, raw, tl.minimum(n_raw, 16), is_coded, words, top, bottom)
        is_symbol = is_coded & (count > 1)
        entry = row.to(tl.int64) * TABLE_ROW + symbol
        frequency = tl.load(frequencies + entry, mask=is_symbol, other=1)
        start = tl.load(starts + entry, mask=is_symbol, other=0)
        state, top = _push_symbol(state, start, frequency, is_symbol, words, top, bottom)

    rate = tl.load(chunk_rate + chunk, mask=is_chunk, other=0)
    shift = rate >> 3
    table = gap_table + (rate & 7) * GAP_ROW
    go_on_start = tl.load(table + CONTINUE_SYMBOL)
    go_on = tl.load(table + CONTINUE_SYMBOL + 1) - go_on_start
    tile, left = end_tile, n_listed
    rest = tl.zeros((LANES,), tl.int32)
    before = tl.load(chunk_weight + chunk, mask=is_chunk, other=0)
    is_held = tl.zeros((LANES,), tl.int1)
    held_start = tl.zeros((LANES,), tl.int32)
    held_weight = tl.zeros((LANES,), tl.int32)
    while tl.max(left + is_held.to(tl.int32), 0) > 0:
        is_over_now = left == 0
        is_next = (left > 0) & (rest == 0)
        tile = tl.where(is_next, tile - 1, tile)
        rest = tl.where(is_next, tl.load(tile_listed + tile, mask=is_next, other=0), rest)
        before -= tl.load(tile_weight + tile, mask=is_next, other=0)
        is_met = rest > 0
        rest = tl.where(is_met, rest - 1, rest)
        left = tl.where(is_met, left - 1, left)
        step = tl.load(steps + tile * ROOM + rest, mask=is_met, other=0)
        packed = tl.load(places + tile * ROOM + rest, mask=is_met, other=0)
        classes = (packed >> PLACE_BITS) & 15
        is_event = is_met & (((step != 0).to(tl.int32) ^ bit_of(expected, classes)) != 0)
        unsigned = packed.to(tl.uint32, bitcast=True)
        start = before + (unsigned >> (START_SHIFT)).to(tl.int32)
        log2_weight = log2_weight_of(classes, nibbles)
        # An event is coded once the end of the one before it is known.
        is_due = is_held & (is_event | is_over_now)
        previous_end = tl.where(is_event, start + (1 << log2_weight), 0)
        borrowed = (state & ((tl.full((), 1, tl.uint64) << held_weight.to(tl.uint64)) - 1)).to(
            tl.int32
        )
        state = tl.where(is_due, state >> held_weight.to(tl.uint64), state)
        gap = tl.where(is_due, held_start + borrowed - previous_end, 0)
        quotient = gap >> shift
        n_again = quotient // CONTINUE_SYMBOL
        symbol = quotient - n_again * CONTINUE_SYMBOL
        symbol_start = tl.load(table + symbol)
        frequency = tl.load(table + symbol + 1) - symbol_start
        frequency = tl.where(is_due, frequency, 1).to(tl.uint64)
        bound = frequency << (52 - shift).to(tl.uint64)
        state, top = _spill(state, bound, is_due, words, top, bottom)
        low = (gap & ((1 << shift) - 1)).to(tl.uint64)
        longer = (state << shift.to(tl.uint64)) | low
        parts = longer // frequency
        pushed = (
            (parts << PROBABILITY_BITS) + (longer - parts * frequency) + symbol_start.to(tl.uint64)
        )
        state = tl.where(is_due, pushed, state)
        while tl.max(n_again, 0) > 0:
            state, top = _push_symbol(state, go_on_start, go_on, n_again > 0, words, top, bottom)
            n_again = tl.maximum(n_again - 1, 0)
        is_held = is_event | (is_held & ~is_due)
        held_start = tl.where(is_event, start, held_start)
        held_weight = tl.where(is_event, log2_weight, held_weight)

    tl.store(states + chunk, state.to(tl.int64, bitcast=True), mask=is_chunk)
    tl.store(n_words + chunk, (room_end - top).to(tl.int32), mask=is_chunk)
    tl.store(n_exceptions + chunk, n_odd, mask=is_chunk)
    over = (top < bottom) | (n_odd > EXCEPTION_ROOM)
    tl.store(is_over + chunk, over.to(tl.int32), mask=is_chunk)
