"""What the coder takes of every chunk: events and symbols without gaps, signs, and its rate.

A warp per chunk goes through its listed elements in order; what it keeps moves forward in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from weightwire.kernels.gaps import HEADROOM_LOG2, MAX_RATE, RATE_BORDERS_Q16
from weightwire.kernels.triton.arrange import (
    CHANGED_FLAG,
    EXCEPTION_ROOM,
    NO_EVENT,
    Arranged,
)
from weightwire.kernels.triton.collect import Segments
from weightwire.kernels.triton.cuts import Cuts
from weightwire.kernels.triton.elements import floor_log2
from weightwire.kernels.triton.launch import kept_on
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

MIN_STACK_ROOM = 64
"""Words set aside for every chunk's stack, however little it lists."""

ROOM_MASK = tl.constexpr((1 << 31) - 1)

ONLY_SYMBOL = tl.constexpr(~(3 << 30))
"""A symbol's word without its flags."""

_MAX_RATE = tl.constexpr(MAX_RATE)
_HEADROOM = tl.constexpr(HEADROOM_LOG2)
_BORDERS = np.array(
    [RATE_BORDERS_Q16[rate % 8] << (2 + rate // 8) for rate in range(MAX_RATE + 1)], dtype=np.int64
)
"""The mean gap, in 2^-16 slots per event, from which on each rate is chosen."""

_BLOCK = 128
_NUMBERS = ("n_changed", "n_events", "n_symbols", "rate", "stack_room", "is_crowded")


@dataclass(frozen=True)
class Gathered:
    """Every chunk, as the coder takes it; a crowded one counts as unchanged."""

    first: torch.Tensor
    """int64: where its events and symbols begin."""
    events: torch.Tensor
    """int32: start in the chunk's weight space above four bits of log2 weight."""
    symbols: torch.Tensor
    """int64: raw bits above the number of raw bits above a table's entry."""
    signs: torch.Tensor
    """int32: a bit per change, first one lowest; see ``sign_word``."""
    exceptions: torch.Tensor
    """int32 [chunk, room, 2]: bits and ordinal, in no order."""
    n_exceptions: torch.Tensor
    n_changed: torch.Tensor
    """int32, as those below."""
    n_events: torch.Tensor
    n_symbols: torch.Tensor
    rate: torch.Tensor
    stack_room: torch.Tensor
    """Words that its stack will hardly exceed."""
    is_crowded: torch.Tensor
    """1 where there was too little room: it is to be coded again."""


def gather(
    cuts: Cuts,
    found: Segments,
    arranged: Arranged,
    models: DeviceModels,
    dtype: DType,
    n_listed: int,
    step_bits: int,
) -> Gathered:
    """Bring together what was worked out; there was room for ``n_listed`` elements.

    ``step_bits``: what an element may take on a stack beyond the logarithm of its gap.
    """
    n, device = cuts.n_chunks, cuts.device
    # Rows begin at multiples of 16 bytes, however many chunks there are.
    stride = -(-n // 4) * 4
    numbers = torch.empty((len(_NUMBERS), stride), dtype=torch.int32, device=device)
    gathered = Gathered(
        torch.empty(n, dtype=torch.int64, device=device),
        arranged.events,
        arranged.symbols,
        torch.zeros(n_listed // 32 + n + 1, dtype=torch.int32, device=device),
        arranged.exceptions,
        arranged.n_exceptions,
        *numbers[:, :n],
    )
    _gather_kernel[(n,)](
        cuts.chunk_piece, cuts.chunk_number, cuts.sizes, cuts.chunk_log2, cuts.segment_log2,
        cuts.first_segment, cuts.room, found.n_records, found.weight, arranged.before, models.heaviest,
        _borders(device), gathered.first, gathered.events, gathered.symbols,
        gathered.signs, gathered.exceptions, numbers, stride, n_listed, step_bits,
        N_BYTES=dtype.n_bytes, EXCEPTION_ROOM=EXCEPTION_ROOM, STACK_ROOM=MIN_STACK_ROOM,
        BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    return gathered


@cache
def _borders(device: torch.device) -> torch.Tensor:
    return kept_on(device, _BORDERS)


@triton.jit
def sign_word(first, chunk):
    """Where a chunk's signs begin: no earlier than those before it can end."""
    return (first >> 5) + chunk


@triton.jit
def chunk_segments(
    chunk, chunk_piece, chunk_number, sizes, chunk_log2s, segment_log2s, first_segments
):  # fmt: skip
    """A chunk's piece, its elements, its first segment, and how many segments it has."""
    piece = tl.load(chunk_piece + chunk)
    log2 = tl.load(chunk_log2s + piece)
    segment_log2 = tl.load(segment_log2s + piece)
    start = tl.load(chunk_number + chunk).to(tl.int64) << log2
    n = tl.minimum(tl.load(sizes + piece) - start, tl.full((), 1, tl.int64) << log2).to(tl.int32)
    segment = tl.load(first_segments + piece) + (start >> segment_log2)
    return piece, n, segment, ((n - 1) >> segment_log2) + 1


@triton.jit(do_not_specialize=["stride", "capacity"], do_not_specialize_on_alignment=["heaviest"])
def _gather_kernel(
    chunk_piece, chunk_number, sizes, chunk_log2s, segment_log2s, first_segments,
    rooms, n_records, segment_weight, before, heaviest,
    borders, firsts, events, symbols,
    signs, exceptions, numbers, stride, capacity, step_bits,
    N_BYTES: tl.constexpr, EXCEPTION_ROOM: tl.constexpr, STACK_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk. Nothing is written beyond what has been read."""
    chunk = tl.program_id(0).to(tl.int64)
    piece, n, segment, n_segments = chunk_segments(
        chunk, chunk_piece, chunk_number, sizes, chunk_log2s, segment_log2s, first_segments
    )
    room = tl.load(rooms + piece)
    first = tl.load(before + segment)
    is_crowded = (tl.load(before + segment + n_segments) > capacity).to(tl.int32)
    for k in range(n_segments):
        is_crowded |= (tl.load(n_records + segment + k) > room).to(tl.int32)
    n_listed = (tl.load(before + segment + n_segments) - first).to(tl.int32)
    sign_out = signs + sign_word(first, chunk)
    weighed = tl.full((), 0, tl.int32)
    n_changed = tl.full((), 0, tl.int32)
    n_events = tl.full((), 0, tl.int32)
    n_symbols = tl.full((), 0, tl.int32)
    for k in range(tl.where(is_crowded != 0, 0, n_segments)):
        begin = tl.load(before + segment + k)
        count = (tl.load(before + segment + k + 1) - begin).to(tl.int32)
        for part in range(0, count, BLOCK):
            at = part + tl.arange(0, BLOCK)
            is_on = at < count
            event = tl.load(events + begin + at, mask=is_on, other=NO_EVENT)
            symbol = tl.load(symbols + begin + at, mask=is_on, other=0)
            flags = symbol.to(tl.int32)
            is_odd = symbol < 0
            odd = (symbol >> 32).to(tl.int32) & ROOM_MASK
            symbol = tl.where(is_odd, symbol & 0xFFFFFFFF, symbol) & ONLY_SYMBOL
            is_event = event != NO_EVENT
            is_symbol = symbol != 0
            is_changed = (flags & CHANGED_FLAG) != 0
            both = is_event.to(tl.int32) | (is_symbol.to(tl.int32) << 16)
            ranks = tl.cumsum(both, 0)
            changes = tl.cumsum(is_changed.to(tl.int32), 0)
            tl.store(
                events + first + n_events + (ranks & 0xFFFF) - 1, event + (weighed << 4),
                mask=is_event,
            )  # fmt: skip
            tl.store(symbols + first + n_symbols + (ranks >> 16) - 1, symbol, mask=is_symbol)
            ordinal = n_changed + changes - 1
            bit = (tl.full((), 1, tl.uint32) << (ordinal & 31).to(tl.uint32)).to(
                tl.int32, bitcast=True
            )
            tl.atomic_or(
                sign_out + (ordinal >> 5), bit, mask=is_changed & (flags < 0), sem="relaxed"
            )
            if tl.max(is_odd.to(tl.int32), 0) > 0:
                odd_at = exceptions + 2 * (chunk * EXCEPTION_ROOM + odd) + 1
                tl.store(odd_at, ordinal, mask=is_odd & (odd < EXCEPTION_ROOM))
            total = tl.sum(both, 0)
            n_events += total & 0xFFFF
            n_symbols += total >> 16
            n_changed += tl.sum(is_changed.to(tl.int32), 0)
        weighed += tl.load(segment_weight + segment + k)

    rate = 8 * tl.maximum(tl.load(heaviest + piece) - _HEADROOM, 0)
    border = tl.load(borders + tl.minimum(rate + 1, _MAX_RATE))
    while (rate < _MAX_RATE) & ((weighed.to(tl.int64) << 16) >= n_events.to(tl.int64) * border):
        rate += 1
        border = tl.load(borders + tl.minimum(rate + 1, _MAX_RATE))
    gap_log2 = floor_log2((n // tl.maximum(n_listed, 1)).to(tl.uint32) | 1) + 1
    likely = n_listed.to(tl.int64) * (gap_log2 + step_bits) // 32
    dense = (n * N_BYTES + 3) // 4
    stack_room = tl.minimum(likely, dense.to(tl.int64)).to(tl.int32) + STACK_ROOM
    tl.store(firsts + chunk, first)
    tl.store(numbers + chunk, n_changed)
    tl.store(numbers + stride + chunk, n_events)
    tl.store(numbers + 2 * stride + chunk, n_symbols)
    tl.store(numbers + 3 * stride + chunk, rate)
    tl.store(numbers + 4 * stride + chunk, tl.where(is_crowded != 0, 0, stack_room))
    tl.store(numbers + 5 * stride + chunk, is_crowded)
