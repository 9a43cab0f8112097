"""Listed elements, chunk by chunk and end to end, as the coder takes them.

Everything that can be worked out for each element by itself is worked out here, by all lanes: where
an event lies in its chunk's weight space, which symbol codes a step, which sign it has. What is left
for the coder is a chain of a few operations per element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from weightwire.kernels.gaps import HEADROOM_LOG2, MAX_RATE, RATE_BORDERS_Q16
from weightwire.kernels.triton.collect import (
    HIGH_SHIFT,
    PLACE_MASK,
    TILE,
    TILE_ELEMENTS,
    Tiles,
)
from weightwire.kernels.triton.elements import (
    CLASS_SHIFT,
    COUNT_SHIFT,
    EXPECTED_SHIFT,
    LOG2_SHIFT,
    ONE_STEP_SHIFT,
    TABLE_ROW,
    magnitude_of_step,
    raw_bits_of,
    step_between,
    token_of,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at, to_device
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

EXCEPTION_ROOM = 64
"""Exceptions a chunk has room for; more come from data that no sample foretold."""

RAW_SHIFT = tl.constexpr(25)
"""Where a symbol's word holds its number of raw bits; its table's entry stands below."""

_MAX_RATE = tl.constexpr(MAX_RATE)
_HEADROOM = tl.constexpr(HEADROOM_LOG2)
_BORDERS = np.array(
    [RATE_BORDERS_Q16[rate % 8] << (2 + rate // 8) for rate in range(MAX_RATE + 1)], dtype=np.int64
)
"""The mean gap, in 2^-16 slots per event, from which on each rate is chosen."""

_LANES = 256


@dataclass(frozen=True)
class Chunks:
    """The chunks of some pieces: where each begins, and what its tiles add up to."""

    piece: torch.Tensor
    first_tile: torch.Tensor
    n_tiles: torch.Tensor
    n_elements: torch.Tensor
    weight: torch.Tensor
    n_listed: torch.Tensor
    is_crowded: torch.Tensor
    """1 where a tile had too little room."""

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True)
class Arranged:
    """Every chunk's events and symbols, in its own stretch of as many as it has listed elements."""

    first: torch.Tensor
    """int64: where each chunk's stretch begins."""
    events: torch.Tensor
    """int32: start in weight space above four bits of log2 weight."""
    symbols: torch.Tensor
    """int64: raw bits above the number of raw bits above a table's entry."""
    signs: torch.Tensor
    """int32: a bit per change, first one lowest; a stretch begins at ``first_sign``."""
    first_sign: torch.Tensor
    exceptions: torch.Tensor
    """int64 [chunk, room]: ordinal above bits, in no order."""
    n_changed: torch.Tensor
    n_events: torch.Tensor
    n_symbols: torch.Tensor
    n_exceptions: torch.Tensor
    rate: torch.Tensor


def add_up(
    tiles: Tiles, piece: torch.Tensor, first_tile: torch.Tensor, n_elements: torch.Tensor
) -> Chunks:
    """Sum the tiles of every chunk."""
    n_tiles = torch.div(n_elements + (TILE_ELEMENTS - 1), TILE_ELEMENTS, rounding_mode="floor")
    weight, n_listed, is_crowded = (
        torch.empty(len(piece), dtype=torch.int32, device=piece.device) for _ in range(3)
    )
    chunks = Chunks(piece, first_tile, n_tiles.int(), n_elements, weight, n_listed, is_crowded)
    _add_up_kernel[(len(piece),)](
        tiles.weights, tiles.n_listed, chunks.first_tile, chunks.n_tiles,
        weight, n_listed, is_crowded, tiles.room, num_warps=1,
    )  # fmt: skip
    return chunks


@triton.jit
def _add_up_kernel(
    tile_weight, tile_listed, chunk_first_tile, chunk_tiles, weight, n_listed, is_crowded,
    room,
):  # fmt: skip
    """One chunk of at most 1024 tiles."""
    chunk = tl.program_id(0)
    first = tl.load(chunk_first_tile + chunk)
    count = tl.load(chunk_tiles + chunk)
    lane = tl.arange(0, 256)
    weights = tl.zeros((256,), tl.int32)
    listed = tl.zeros((256,), tl.int32)
    most = tl.zeros((256,), tl.int32)
    for begin in range(0, count, 256):
        mask = begin + lane < count
        here = tl.load(tile_listed + first + begin + lane, mask=mask, other=0)
        weights += tl.load(tile_weight + first + begin + lane, mask=mask, other=0)
        listed += here
        most = tl.maximum(most, here)
    tl.store(weight + chunk, tl.sum(weights, 0))
    tl.store(n_listed + chunk, tl.sum(listed, 0))
    tl.store(is_crowded + chunk, (tl.max(most, 0) > room).to(tl.int32))


def arrange(
    tiles: Tiles,
    chunks: Chunks,
    old: Bucket,
    new: Bucket,
    first_tile: torch.Tensor,
    models: DeviceModels,
    dtype: DType,
    n_listed: int,
) -> Arranged:
    """Put every chunk's ``n_listed`` elements in all in the coder's order."""
    n, device = len(chunks), old.device

    def words() -> torch.Tensor:
        return torch.empty(n, dtype=torch.int32, device=device)

    listed = chunks.n_listed.long()
    n_signs = (listed + 31) // 32
    found = Arranged(
        first=listed.cumsum(0) - listed,
        events=torch.empty(max(n_listed, 1), dtype=torch.int32, device=device),
        symbols=torch.empty(max(n_listed, 1), dtype=torch.int64, device=device),
        signs=torch.zeros(n_listed // 32 + n, dtype=torch.int32, device=device),
        first_sign=n_signs.cumsum(0) - n_signs,
        exceptions=torch.empty((n, EXCEPTION_ROOM), dtype=torch.int64, device=device),
        n_changed=words(), n_events=words(), n_symbols=words(), n_exceptions=words(), rate=words(),
    )  # fmt: skip
    weights = tiles.weights.long()
    block = triton.next_power_of_2(tiles.room)
    _arrange_kernel[(n,)](
        tiles.places, tiles.n_listed, tiles.room, weights.cumsum(0) - weights,
        old.addresses, new.addresses, first_tile, chunks.piece, chunks.first_tile, chunks.n_tiles,
        chunks.weight,
        models.elements, models.tables, models.entries, models.heaviest,
        to_device(_BORDERS, device),
        found.first, found.events, found.symbols, found.signs, found.first_sign,
        found.exceptions, found.n_changed, found.n_events, found.n_symbols,
        found.n_exceptions, found.rate,
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, ORDERED=dtype.ordered, N_KEYS=models.n_keys,
        BLOCK=block, LANES=max(_LANES, block), EXCEPTION_ROOM=EXCEPTION_ROOM, num_warps=1,
    )  # fmt: skip
    return found


@triton.jit
def _arrange_kernel(
    places, tile_listed, room, tile_before, olds, news,
    first_tile, chunk_piece, chunk_first_tile, chunk_tiles, chunk_weight,
    elements, tables, entries, heaviest,
    borders,
    firsts, events, symbols, signs, first_sign,
    exceptions, chunk_changed, chunk_events, chunk_symbols,
    chunk_exceptions, chunk_rate,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, ORDERED: tl.constexpr, N_KEYS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, EXCEPTION_ROOM: tl.constexpr,
):  # fmt: skip
    """One chunk, a few tiles at a time; ranks are sums over the elements before."""
    chunk = tl.program_id(0)
    piece = tl.load(chunk_piece + chunk)
    first = tl.load(chunk_first_tile + chunk)
    count = tl.load(chunk_tiles + chunk)
    begin_at = (first - tl.load(first_tile + piece)) * TILE
    old_at = memory_at(olds, piece, KIND) + begin_at
    new_at = memory_at(news, piece, KIND) + begin_at
    table = elements + piece * N_KEYS
    before = tl.load(tile_before + first)
    out = tl.load(firsts + chunk)
    sign_out = signs + tl.load(first_sign + chunk)
    lane = tl.arange(0, LANES)
    within, rank_in_tile = lane // BLOCK, lane % BLOCK
    n_changed = tl.full((), 0, tl.int32)
    n_events = tl.full((), 0, tl.int32)
    n_symbols = tl.full((), 0, tl.int32)
    n_odd = tl.full((), 0, tl.int32)
    for begin in range(0, count, LANES // BLOCK):
        number = begin + within
        is_tile = number < count
        n_here = tl.load(tile_listed + first + number, mask=is_tile, other=0)
        is_on = rank_in_tile < n_here
        at = 2 * ((first + number) * room + rank_in_tile)
        packed = tl.load(places + at, mask=is_on, other=0).to(tl.int32)
        low = tl.load(places + at + 1, mask=is_on, other=0).to(tl.uint16, bitcast=True).to(tl.int32)
        tile_start = tl.load(tile_before + first + number, mask=is_on, other=0) - before
        place = number * TILE + (packed & PLACE_MASK)
        start = tile_start.to(tl.int32) + (((packed >> HIGH_SHIFT) << 16) | low)
        old = tl.load(old_at + place, mask=is_on, other=0).to(tl.uint32)
        new = tl.load(new_at + place, mask=is_on, other=0).to(tl.uint32)
        told = told_by_key(old, table, SHIFT, MASK)
        changed = is_on & (old != new)
        step = step_between(old, new, WIDTH, ORDERED)
        magnitude = magnitude_of_step(tl.where(changed, step, 1))
        row = piece * 16 + ((told >> CLASS_SHIFT) & 15)
        about = tl.load(tables + row, mask=changed, other=0)
        is_told = changed & (((about >> ONE_STEP_SHIFT) == 0) | (magnitude != 0))
        token = token_of(magnitude)
        symbol = token - (about & 0xFF)
        is_odd = is_told & ((symbol < 0) | (symbol >= ((about >> COUNT_SHIFT) & 0xFF)))
        token = tl.where(is_odd, about & 0xFF, token)
        symbol = tl.where(is_odd, 0, symbol)
        entry = tl.load(entries + row.to(tl.int64) * TABLE_ROW + symbol, mask=is_told, other=0)
        n_raw = raw_bits_of(token)
        mask = (tl.full((), 1, tl.uint32) << n_raw.to(tl.uint32)) - 1
        raw = tl.where(is_odd, 0, magnitude & mask)
        # A class of one token needs no symbol, and may need no bits either.
        is_alone = ((about >> COUNT_SHIFT) & 0xFF) == 1
        is_symbol = is_told & ((is_alone == 0) | (n_raw > 0))
        is_event = is_on & ((changed.to(tl.int32) ^ ((told >> EXPECTED_SHIFT) & 1)) != 0)

        both = tl.cumsum(changed.to(tl.int32) | (is_symbol.to(tl.int32) << 16), 0)
        event_rank = tl.cumsum(is_event.to(tl.int32), 0)
        word = (start << 4) | ((told >> LOG2_SHIFT) & 15)
        tl.store(events + out + n_events + event_rank - 1, word, mask=is_event)
        coded = tl.where(is_alone, 0, entry).to(tl.uint32, bitcast=True)
        coded |= n_raw.to(tl.uint32) << RAW_SHIFT
        full = (raw.to(tl.uint64) << 32) | coded.to(tl.uint64)
        symbol_at = symbols + out + n_symbols + (both >> 16) - 1
        tl.store(symbol_at, full.to(tl.int64, bitcast=True), mask=is_symbol)
        ordinal = n_changed + (both & 0xFFFF) - 1
        bit = tl.full((), 1, tl.uint32) << (ordinal & 31).to(tl.uint32)
        is_negative = changed & (step < 0)
        tl.atomic_or(
            sign_out + (ordinal >> 5),
            bit.to(tl.int32, bitcast=True),
            mask=is_negative,
            sem="relaxed",
        )
        if tl.max(is_odd.to(tl.int32), 0) > 0:
            odd_rank = tl.cumsum(is_odd.to(tl.int32), 0)
            odd_at = n_odd + odd_rank - 1
            told_odd = (ordinal.to(tl.int64) << 32) | new.to(tl.int64)
            has_room = is_odd & (odd_at < EXCEPTION_ROOM)
            tl.store(exceptions + chunk * EXCEPTION_ROOM + odd_at, told_odd, mask=has_room)
            n_odd += tl.max(odd_rank, 0)
        last = tl.max(both, 0)
        n_symbols += last >> 16
        n_changed += tl.max(both & 0xFFFF, 0)
        n_events += tl.max(event_rank, 0)
    tl.store(chunk_changed + chunk, n_changed)
    tl.store(chunk_events + chunk, n_events)
    tl.store(chunk_symbols + chunk, n_symbols)
    tl.store(chunk_exceptions + chunk, n_odd)
    chosen = 8 * tl.maximum(tl.load(heaviest + piece) - _HEADROOM, 0)
    weighed = tl.load(chunk_weight + chunk).to(tl.int64) << 16
    border = tl.load(borders + tl.minimum(chosen + 1, _MAX_RATE))
    while (chosen < _MAX_RATE) & (weighed >= n_events.to(tl.int64) * border):
        chosen += 1
        border = tl.load(borders + tl.minimum(chosen + 1, _MAX_RATE))
    tl.store(chunk_rate + chunk, chosen)
