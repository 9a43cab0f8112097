"""Listed elements, in order and end to end, each with all that can be worked out for it by itself.

Where an event lies in its segment's weight space, which symbol codes a step, which sign it has: by all
lanes, a warp per segment. ``gather.py`` makes of it what the coder takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.collect import (
    GROUP,
    GROUP_SHIFT,
    START_MASK,
    TILE,
    TILE_GROUPS,
    Segments,
    count_bits,
)
from weightwire.kernels.triton.cuts import Cuts
from weightwire.kernels.triton.elements import (
    CLASS_SHIFT,
    COUNT_SHIFT,
    EXPECTED_SHIFT,
    LOG2_SHIFT,
    ONE_STEP_SHIFT,
    TABLE_ROW,
    WEIGHT_MASK,
    magnitude_of_step,
    raw_bits_of,
    step_between,
    token_of,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS, memory_at
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

EXCEPTION_ROOM = 64
"""Exceptions a chunk has room for; more come from data that no sample foretold."""

RAW_SHIFT = tl.constexpr(25)
"""Where a symbol's word holds its number of raw bits; its table's entry stands below."""

CHANGED_FLAG = tl.constexpr(1 << 30)
NEGATIVE_FLAG = tl.constexpr(-(1 << 31))
"""Beside a symbol until it is gathered: whether its element changed at all, and downwards."""

ODD_FLAG = tl.constexpr(1 << 31)

NO_EVENT = tl.constexpr(-1)
"""An expected element that changed; no event has such a log2 weight."""

_BLOCK = 64
"""Records that a warp takes at a time."""


@dataclass(frozen=True)
class Arranged:
    """Every listed element, chunk after chunk."""

    before: torch.Tensor
    """int64: the elements listed before every segment, and in all."""
    events: torch.Tensor
    """int32: start in the segment's weight space above four bits of log2 weight, or ``NO_EVENT``."""
    symbols: torch.Tensor
    """int64: raw bits above flags above the number of raw bits above a table's entry.

    An exception has no raw bits but the number of its room, and the highest bit set.
    """
    exceptions: torch.Tensor
    """int32 [chunk, room, 2]: bits, and room for an ordinal; in no order."""
    n_exceptions: torch.Tensor
    """int32, per chunk; also those without room."""


def arrange(
    cuts: Cuts, found: Segments, models: DeviceModels, dtype: DType, n_listed: int
) -> Arranged:
    """Work out every listed element; there is room for ``n_listed`` in all."""
    n, device = cuts.n_chunks, cuts.device
    before = torch.zeros(cuts.n_segments + 1, dtype=torch.int64, device=device)
    torch.cumsum(found.n_listed, 0, dtype=torch.int64, out=before[1:])
    arranged = Arranged(
        before,
        events=torch.empty(max(n_listed, 1), dtype=torch.int32, device=device),
        symbols=torch.empty(max(n_listed, 1), dtype=torch.int64, device=device),
        exceptions=torch.empty((n, EXCEPTION_ROOM, 2), dtype=torch.int32, device=device),
        n_exceptions=torch.zeros(n, dtype=torch.int32, device=device),
    )
    _arrange_kernel[(cuts.n_segments,)](
        found.records, found.marks, found.n_records, before, found.tile_weighed,
        cuts.olds, cuts.news, cuts.sizes, cuts.segment_piece, cuts.segment_number,
        cuts.segment_log2, cuts.chunk_log2, cuts.first_chunk, cuts.first_tile,
        cuts.first_record, cuts.room,
        models.elements, models.tables, models.entries,
        arranged.events, arranged.symbols, arranged.exceptions, arranged.n_exceptions, n_listed,
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, ORDERED=dtype.ordered, N_KEYS=models.n_keys,
        HAS_EXPECTED=models.has_expected, ALIGNMENT=cuts.alignment, BLOCK=_BLOCK,
        EXCEPTION_ROOM=EXCEPTION_ROOM, num_warps=1,
    )  # fmt: skip
    return arranged


@triton.jit
def load_records(records, all_marks, at, count):
    """Each record's group in its segment, its start in its tile's weight space, its marks."""
    is_on = at < count
    record = tl.load(records + at, mask=is_on, other=0)
    marks = tl.load(all_marks + at, mask=is_on, other=0)
    marks = marks.to(tl.uint16, bitcast=True).to(tl.int32)
    return record >> GROUP_SHIFT, record & START_MASK, marks & 0xFF, marks >> 8


@triton.jit
def lowest(marks):
    """The number of the lowest mark, and all marks below it; 8 where there is none."""
    below = (marks & -marks) - 1
    return count_bits(below & 0xFF), below & 0xFF


@triton.jit
def _group_weights(
    at, place, left, is_on, table, SHIFT: tl.constexpr, MASK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The weights of the eight elements of each group: one wide load where all are there."""
    number = tl.arange(0, GROUP)[None, :]
    is_whole = is_on & (place + GROUP <= left)
    begin = tl.multiple_of(at + place, ALIGNMENT)
    bits = tl.load(begin[:, None] + number, mask=is_whole[:, None], other=0)
    if tl.max((is_on & (is_whole == 0)).to(tl.int32), 0) > 0:
        is_there = (is_on & (is_whole == 0))[:, None] & (place[:, None] + number < left)
        bits |= tl.load(begin[:, None] + number, mask=is_there, other=0)
    return told_by_key(bits.to(tl.uint32), table, SHIFT, MASK) & WEIGHT_MASK


@triton.jit(do_not_specialize=["capacity"])
def _arrange_kernel(
    records, all_marks, n_records, before, tile_weighed,
    olds, news, sizes, segment_piece, segment_number,
    segment_log2s, chunk_log2s, first_chunks, first_tiles,
    first_records, rooms,
    elements, tables, entries,
    events, symbols, exceptions, n_exceptions, capacity,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, ORDERED: tl.constexpr, N_KEYS: tl.constexpr,
    HAS_EXPECTED: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
    EXCEPTION_ROOM: tl.constexpr,
):  # fmt: skip
    """One segment, a few records at a time; of each its first element, then its second, and so on."""
    segment = tl.program_id(0)
    piece = tl.load(segment_piece + segment)
    number = tl.load(segment_number + segment).to(tl.int64)
    count = tl.load(n_records + segment)
    out = tl.load(before + segment)
    end = tl.load(before + segment + 1)
    log2 = tl.load(segment_log2s + piece)
    chunk = tl.load(first_chunks + piece) + (number >> (tl.load(chunk_log2s + piece) - log2))
    room = tl.load(rooms + piece)
    room_at = tl.load(first_records + piece) + number * room
    begin = number << log2
    left = tl.minimum(tl.load(sizes + piece) - begin, tl.full((), 1, tl.int64) << log2).to(tl.int32)
    tiles = tile_weighed + tl.load(first_tiles + piece) + begin // TILE
    old_at = memory_at(olds, piece, KIND) + begin
    new_at = memory_at(news, piece, KIND) + begin
    table = elements + piece * N_KEYS
    # Of a crowded chunk nobody will ask: what fits is written, or nothing.
    count = tl.where((count <= room) & (end <= capacity), count, 0)
    for part in range(0, count, BLOCK):
        group, group_start, listed, _ = load_records(
            records + room_at, all_marks + room_at, part + tl.arange(0, BLOCK), count
        )
        is_record = listed != 0
        place = group * GROUP
        group_start += tl.load(tiles + (group // TILE_GROUPS), mask=is_record, other=0)
        weights = _group_weights(old_at, place, left, is_record, table, SHIFT, MASK, ALIGNMENT)
        counts = count_bits(listed)
        ranks = tl.cumsum(counts, 0) - counts
        marks = listed
        while tl.max(marks, 0) > 0:
            is_on = marks != 0
            within, below = lowest(marks)
            old = tl.load(old_at + place + within, mask=is_on, other=0).to(tl.uint32)
            new = tl.load(new_at + place + within, mask=is_on, other=0).to(tl.uint32)
            told = told_by_key(old, table, SHIFT, MASK)
            is_before = tl.arange(0, GROUP)[None, :] < within[:, None]
            start = group_start + tl.sum(tl.where(is_before, weights, 0), axis=1)
            to = out + ranks + count_bits(listed & below)
            is_changed = is_on & (old != new)
            event = (start << 4) | ((told >> LOG2_SHIFT) & 15)
            if HAS_EXPECTED:
                is_event = is_changed.to(tl.int32) != ((told >> EXPECTED_SHIFT) & 1)
                event = tl.where(is_event, event, NO_EVENT)
            tl.store(events + to, event, mask=is_on)

            step = step_between(old, new, WIDTH, ORDERED)
            magnitude = magnitude_of_step(tl.where(is_changed, step, 1))
            row = piece * 16 + ((told >> CLASS_SHIFT) & 15)
            about = tl.load(tables + row, mask=is_changed, other=0)
            n_tokens = (about >> COUNT_SHIFT) & 0xFF
            is_told = is_changed & (((about >> ONE_STEP_SHIFT) == 0) | (magnitude != 0))
            token = token_of(magnitude)
            symbol = token - (about & 0xFF)
            is_odd = is_told & ((symbol < 0) | (symbol >= n_tokens))
            token = tl.where(is_odd, about & 0xFF, token)
            symbol = tl.where(is_odd, 0, symbol)
            # A class of one token needs no symbol, and may need no bits either.
            is_symbol = is_told & (n_tokens > 1)
            entry = tl.load(entries + row * TABLE_ROW + symbol, mask=is_symbol, other=0)
            n_raw = tl.where(is_told, raw_bits_of(token), 0)
            mask = (tl.full((), 1, tl.uint32) << n_raw.to(tl.uint32)) - 1
            raw = tl.where(is_odd, 0, magnitude & mask)
            coded = entry | (n_raw << RAW_SHIFT)
            coded |= tl.where(is_changed, CHANGED_FLAG, 0)
            coded |= tl.where(is_changed & (step < 0), NEGATIVE_FLAG, 0)
            if tl.max(is_odd.to(tl.int32), 0) > 0:
                # A room of its own for each; their order is made when they are joined.
                counter = n_exceptions + chunk + tl.zeros((BLOCK,), tl.int32)
                one = tl.full((BLOCK,), 1, tl.int32)
                own = tl.atomic_add(counter, one, mask=is_odd, sem="relaxed")
                odd_at = exceptions + 2 * (chunk * EXCEPTION_ROOM + own)
                bits = new.to(tl.int32, bitcast=True)
                tl.store(odd_at, bits, mask=is_odd & (own < EXCEPTION_ROOM))
                raw = tl.where(is_odd, own.to(tl.uint32, bitcast=True) | ODD_FLAG, raw)
            full = (raw.to(tl.uint64) << 32) | coded.to(tl.uint32, bitcast=True).to(tl.uint64)
            tl.store(symbols + to, full.to(tl.int64, bitcast=True), mask=is_on)
            marks &= marks - 1
        out += tl.sum(counts, 0)
