"""The one pass over both states: which elements are coded, and where they stand in weight space.

Elements are *listed* if they changed or were expected to. They are written down in groups of eight:
a group with a listed element leaves a record. Sums are kept by group and row, so that an element
costs a table look-up, a comparison and an addition; no step, no class, no symbol is worked out here,
and nothing after this pass touches a group without a record.

A warp walks through one *segment*, tile by tile, and asks for the next tile before it deals with the
one it has. It needs nobody: its records have a room of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.cuts import TILE_ELEMENTS, Cuts
from weightwire.kernels.triton.elements import MARK_SHIFT, WEIGHT_MASK, told_by_key
from weightwire.kernels.triton.launch import TRITON_BITS, memory_at, register_limit
from weightwire.kernels.triton.memories import VECTOR_BYTES
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

TILE = tl.constexpr(TILE_ELEMENTS)
GROUP = tl.constexpr(8)
GROUP_ELEMENTS: int = GROUP.value
TILE_GROUPS = tl.constexpr(128)
ROW_GROUPS = tl.constexpr(32)
"""A row is what the lanes of a warp hold at once, a group each."""

START_MASK = tl.constexpr((1 << 18) - 1)
"""A record: where its group starts in its tile's weight space, below its number in the segment."""
GROUP_SHIFT = tl.constexpr(18)

# A group's sum: weights, a mark for every listed element, their number, a mark for every change.
LISTED_SHIFT = tl.constexpr(20)
CHANGED_SHIFT = tl.constexpr(24)
GROUP_WEIGHT_MASK = tl.constexpr((1 << 12) - 1)
MARK = tl.constexpr(1 << MARK_SHIFT.value)
MARK_AND_CHANGE = tl.constexpr(1 << MARK_SHIFT.value | 1 << CHANGED_SHIFT.value)
LISTED = tl.constexpr(1 << LISTED_SHIFT.value)
LISTED_AND_WEIGHT = tl.constexpr(LISTED.value | WEIGHT_MASK.value)

# A row's sum: weights up to 2^16, records up to 2^5, listed elements up to 2^8.
ROW_WEIGHT_MASK = tl.constexpr((1 << 17) - 1)
ROW_RECORDS_SHIFT = tl.constexpr(17)
ROW_RECORDS_MASK = tl.constexpr(63)
ROW_RECORD = tl.constexpr(1 << 17)
ROW_LISTED_SHIFT = tl.constexpr(23)

# A tile's sum: weights up to 2^18, records up to 2^7.
TILE_WEIGHT_MASK = tl.constexpr((1 << 19) - 1)
TILE_RECORDS_SHIFT = tl.constexpr(19)


_REGISTERS = 80
"""Fewer than it would take: warps that wait for memory leave room for more of them, and for coders."""


@dataclass(frozen=True)
class Segments:
    """What a pass over some pieces found, segment by segment."""

    records: torch.Tensor
    """int32, each segment's in its own room; see ``START_MASK``."""
    marks: torch.Tensor
    """int16, beside each record: a bit for every listed element, above them one for every change."""
    n_records: torch.Tensor
    """int32; more than there is room for means that not all are there."""
    weight: torch.Tensor
    """int32: the sum of the weights of all its elements."""
    n_listed: torch.Tensor
    tile_weighed: torch.Tensor
    """int32, per tile: the weight of its segment before it."""


def collect(cuts: Cuts, models: DeviceModels, dtype: DType) -> Segments:
    """Look at every element once."""

    def words(n: int) -> torch.Tensor:
        return torch.empty(max(n, 1), dtype=torch.int32, device=cuts.device)

    n = cuts.n_segments
    found = Segments(
        records=words(cuts.n_records),
        marks=torch.empty(max(cuts.n_records, 1), dtype=torch.int16, device=cuts.device),
        n_records=words(n),
        weight=words(n),
        n_listed=words(n),
        tile_weighed=words(cuts.n_tiles),
    )
    _collect_kernel[(n,)](
        cuts.olds, cuts.news, cuts.sizes, cuts.segment_piece, cuts.segment_number,
        cuts.segment_log2, cuts.first_record, cuts.room, cuts.first_tile,
        models.elements, found.records, found.marks, found.n_records, found.weight,
        found.n_listed, found.tile_weighed,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, HAS_EXPECTED=models.has_expected, ALIGNMENT=cuts.alignment,
        IS_PAIRED=dtype.n_bytes == 2 and cuts.alignment == VECTOR_BYTES, num_warps=1,
        **register_limit(_REGISTERS),
    )  # fmt: skip
    return found


@triton.jit
def count_bits(byte):
    """How many bits of eight are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@triton.jit
def _counted(told, is_changed, number, HAS_EXPECTED: tl.constexpr):
    """What an element with this number adds to its group's sum."""
    if HAS_EXPECTED:
        told &= (tl.full((), MARK, tl.int32) << number) | LISTED_AND_WEIGHT
    else:
        told &= WEIGHT_MASK
    mark = (tl.full((), MARK_AND_CHANGE, tl.int32) << number) | LISTED
    return told | tl.where(is_changed, mark, 0)


@triton.jit
def _sum_pairs(
    old, new, table, SHIFT: tl.constexpr, MASK: tl.constexpr, HAS_EXPECTED: tl.constexpr
):  # fmt: skip
    """The groups of a whole tile, whose elements came two to a word."""
    number = 2 * (tl.arange(0, TILE // 2) % (GROUP // 2))
    differs = old ^ new
    low = told_by_key(old, table, SHIFT, MASK)
    high = told_by_key(old, table, SHIFT + 16, MASK)
    lower = _counted(low, (differs & 0xFFFF) != 0, number, HAS_EXPECTED)
    upper = _counted(high, differs > 0xFFFF, number + 1, HAS_EXPECTED)
    # Not before: what is looked up would be brought into another order, through shared memory.
    groups = tl.reshape(lower + upper, (TILE // (ROW_GROUPS * GROUP), ROW_GROUPS, GROUP // 2))
    return tl.sum(groups, axis=2)


@triton.jit
def _sum_elements(
    old, new, left, table, SHIFT: tl.constexpr, MASK: tl.constexpr, HAS_EXPECTED: tl.constexpr
):  # fmt: skip
    """The groups of a tile, whose elements came one by one; those past the end count nothing."""
    place = tl.arange(0, TILE)
    told = told_by_key(old.to(tl.uint32), table, SHIFT, MASK)
    counted = _counted(told, old != new, place % GROUP, HAS_EXPECTED)
    counted = tl.where(place < left, counted, 0)
    groups = tl.reshape(counted, (TILE // (ROW_GROUPS * GROUP), ROW_GROUPS, GROUP))
    return tl.sum(groups, axis=2)


@triton.jit
def _list_tile(sums, tile, records, all_marks, tile_weighed, first_tile, room, weighed, done):
    """Write down a tile's records; gives the segment's sums after it, and each row's listed."""
    ROWS: tl.constexpr = TILE // (ROW_GROUPS * GROUP)
    sums = sums.to(tl.uint32, bitcast=True)
    listed_here = (sums >> LISTED_SHIFT) & 15
    has_record = listed_here != 0
    in_row = (sums & GROUP_WEIGHT_MASK) | (listed_here << ROW_LISTED_SHIFT)
    in_row = tl.where(has_record, in_row | ROW_RECORD, in_row)
    before_group = tl.cumsum(in_row, axis=1) - in_row
    row = tl.sum(in_row, axis=1)
    row_records = (row >> ROW_RECORDS_SHIFT) & ROW_RECORDS_MASK
    in_tile = (row & ROW_WEIGHT_MASK) | (row_records << TILE_RECORDS_SHIFT)
    total = tl.sum(in_tile, axis=0)
    # By every lane for itself: lanes that share it would have to wait for each other.
    rows = tl.broadcast_to(in_tile[:, None], (ROWS, ROW_GROUPS))
    before_row = tl.cumsum(rows, axis=0) - rows

    start = (before_group & ROW_WEIGHT_MASK) + (before_row & TILE_WEIGHT_MASK)
    rank = (before_group >> ROW_RECORDS_SHIFT) & ROW_RECORDS_MASK
    rank = done + (rank + (before_row >> TILE_RECORDS_SHIFT)).to(tl.int32)
    number = tl.arange(0, ROWS)[:, None] * ROW_GROUPS + tl.arange(0, ROW_GROUPS)[None, :]
    number += tile * TILE_GROUPS
    record = start | (number.to(tl.uint32) << GROUP_SHIFT)
    marks = ((sums >> MARK_SHIFT) & 0xFF) | ((sums >> CHANGED_SHIFT) << 8)
    # As a line: of a square, the compiler would turn rows into columns first, through shared memory.
    rank = tl.reshape(rank, (TILE_GROUPS,))
    is_on = tl.reshape(has_record, (TILE_GROUPS,)) & (rank < room)
    record = tl.reshape(record, (TILE_GROUPS,))
    marks = tl.reshape(marks, (TILE_GROUPS,))
    tl.store(records + rank, record.to(tl.int32, bitcast=True), mask=is_on)
    tl.store(all_marks + rank, marks.to(tl.uint16).to(tl.int16, bitcast=True), mask=is_on)
    tl.store(tile_weighed + first_tile + tile, weighed)
    weighed += (total & TILE_WEIGHT_MASK).to(tl.int32)
    done += (total >> TILE_RECORDS_SHIFT).to(tl.int32)
    return weighed, done, (row >> ROW_LISTED_SHIFT).to(tl.int32)


@triton.jit
def _collect_kernel(
    olds, news, sizes, segment_piece, segment_number,
    segment_log2, first_record, rooms, first_tiles,
    elements, records, all_marks, n_records, weights,
    n_listed, tile_weighed,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    N_KEYS: tl.constexpr, HAS_EXPECTED: tl.constexpr, ALIGNMENT: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):  # fmt: skip
    """One segment; whole tiles are read without masks, in the widest loads there are."""
    ROWS: tl.constexpr = TILE // (ROW_GROUPS * GROUP)
    segment = tl.program_id(0)
    piece = tl.load(segment_piece + segment)
    number = tl.load(segment_number + segment).to(tl.int64)
    log2 = tl.load(segment_log2 + piece)
    begin = number << log2
    table = elements + piece * N_KEYS
    left = tl.minimum(tl.load(sizes + piece) - begin, tl.full((), 1, tl.int64) << log2).to(tl.int32)
    room = tl.load(rooms + piece)
    room_at = tl.load(first_record + piece) + number * room
    records += room_at
    all_marks += room_at
    first_tile = tl.load(first_tiles + piece) + (begin // TILE)
    # Said of the sums, since the compiler does not follow alignment through a cast of an address.
    old_at = tl.multiple_of(memory_at(olds, piece, KIND) + begin, ALIGNMENT)
    new_at = tl.multiple_of(memory_at(news, piece, KIND) + begin, ALIGNMENT)
    weighed = tl.full((), 0, tl.int32)
    done = tl.full((), 0, tl.int32)
    listed = tl.zeros((ROWS,), tl.int32)
    n_whole = left // TILE
    if IS_PAIRED:
        word = tl.arange(0, TILE // 2)
        old_words = old_at.to(tl.pointer_type(tl.uint32))
        new_words = new_at.to(tl.pointer_type(tl.uint32))
        next_old = tl.load(old_words + word, mask=word < n_whole * TILE, other=0)
        next_new = tl.load(new_words + word, mask=word < n_whole * TILE, other=0)
        for tile in range(n_whole):
            old, new = next_old, next_new
            # The last one asks for itself again: what lies after it may not be there.
            then = tl.minimum(tile + 1, n_whole - 1) * (TILE // 2)
            next_old = tl.load(tl.multiple_of(old_words + then, 16) + word)
            next_new = tl.load(tl.multiple_of(new_words + then, 16) + word)
            sums = _sum_pairs(old, new, table, SHIFT, MASK, HAS_EXPECTED)
            weighed, done, of_rows = _list_tile(
                sums, tile, records, all_marks, tile_weighed, first_tile, room, weighed, done
            )
            listed += of_rows
    else:
        for tile in range(n_whole):
            place = tile * TILE + tl.arange(0, TILE)
            old = tl.load(old_at + place)
            new = tl.load(new_at + place)
            sums = _sum_elements(old, new, TILE, table, SHIFT, MASK, HAS_EXPECTED)
            weighed, done, of_rows = _list_tile(
                sums, tile, records, all_marks, tile_weighed, first_tile, room, weighed, done
            )
            listed += of_rows
    if n_whole * TILE < left:
        tail = n_whole * TILE + tl.arange(0, TILE)
        old_tail = tl.load(old_at + tail, mask=tail < left, other=0)
        new_tail = tl.load(new_at + tail, mask=tail < left, other=0)
        sums = _sum_elements(
            old_tail, new_tail, left - n_whole * TILE, table, SHIFT, MASK, HAS_EXPECTED
        )
        weighed, done, of_rows = _list_tile(
            sums, n_whole, records, all_marks, tile_weighed, first_tile, room, weighed, done
        )
        listed += of_rows
    tl.store(n_records + segment, done)
    tl.store(weights + segment, weighed)
    tl.store(n_listed + segment, tl.sum(listed, axis=0))
