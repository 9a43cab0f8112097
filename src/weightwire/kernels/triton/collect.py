"""The one pass over both states: which elements are coded, and where they stand in weight space.

Every tile writes down its *listed* elements, those that changed or were expected to, and its sums.
Nothing after this pass touches an element that is not listed. It is bound by memory only as long as
it does next to nothing per element: no step, no class, no symbol is worked out here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.elements import (
    EXPECTED_SHIFT,
    SUMMED_MASK,
    WEIGHT_MASK,
    WEIGHT_SUM_MASK,
    told_by_key,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, alignment_of, memory_at
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

TILE = tl.constexpr(1024)
"""Elements that are looked at together; every chunk is a whole number of tiles."""

TILE_ELEMENTS: int = TILE.value

LISTED = tl.constexpr(1 << EXPECTED_SHIFT.value)
"""A running sum holds weights below this bit, at most 2^18 in a tile, and counts from it on."""

PLACE_MASK = tl.constexpr(1023)
HIGH_SHIFT = tl.constexpr(10)
HIGH_MASK = tl.constexpr(3 << 10)
"""A place shares its sixteen bits with the two highest of a start's eighteen."""


@dataclass(frozen=True)
class Tiles:
    """What a pass over some pieces found, tile by tile."""

    room: int
    """Listed elements that a tile has room for; tiles that need more are marked by their count."""
    places: torch.Tensor
    """int16 [tile, room, 2]: place in the tile and the high bits of where it starts in the tile's
    weight space; the low bits of that."""
    weights: torch.Tensor
    """int32: the sum of the weights of all its elements."""
    n_listed: torch.Tensor


def collect(
    old: Bucket,
    new: Bucket,
    first_tile: torch.Tensor,
    n_tiles: int,
    models: DeviceModels,
    dtype: DType,
    room: int,
) -> Tiles:
    """Look at every element once. Buckets are cut into spans of one tile."""
    halves = {"dtype": torch.int16, "device": old.device}
    words = {"dtype": torch.int32, "device": old.device}
    tiles = Tiles(
        room,
        torch.empty((n_tiles, room, 2), **halves),
        torch.empty(n_tiles, **words),
        torch.empty(n_tiles, **words),
    )
    _collect_kernel[(old.n_spans,)](
        old.addresses, new.addresses, old.sizes, old.span_memory, old.span_number, first_tile,
        models.elements, tiles.places, tiles.weights, tiles.n_listed, room,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, HAS_EXPECTED=models.has_expected,
        ALIGNMENT=alignment_of(old.memories, new.memories),
        num_warps=2 if dtype.n_bytes == 2 else 4,
    )  # fmt: skip
    return tiles


@triton.jit
def _list_tile(
    old, new, is_there, table, places, weights, n_listed, tile, room,
    SHIFT: tl.constexpr, MASK: tl.constexpr, HAS_EXPECTED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """A listed element's rank and start are sums over the elements before it in the tile."""
    told = told_by_key(old.to(tl.uint32), table, SHIFT, MASK)
    summed = told & (SUMMED_MASK if HAS_EXPECTED else WEIGHT_MASK)
    summed = tl.where(old != new, summed | LISTED, summed)
    if not IS_WHOLE:
        summed = tl.where(is_there, summed, 0)
    running = tl.cumsum(summed, 0)
    total = tl.max(running, 0)
    start = running - summed
    rank = start >> EXPECTED_SHIFT
    has_room = (summed >= LISTED) & (rank < room)
    slots = places + 2 * tile * room
    packed = tl.arange(0, TILE) | ((start >> (16 - HIGH_SHIFT)) & HIGH_MASK)
    # Said to lie together, which they do not: to store them the compiler would bring all values into
    # another order first, at several times the cost of everything else here. Each has a mask of its
    # own, so each is stored by itself all the same.
    place_at = tl.max_contiguous(tl.multiple_of(slots + 2 * rank, 16), 8)
    start_at = tl.max_contiguous(tl.multiple_of(slots + (2 * rank + 1), 16), 8)
    tl.store(place_at, packed.to(tl.int16), mask=has_room)
    tl.store(start_at, start.to(tl.uint16).to(tl.int16, bitcast=True), mask=has_room)
    tl.store(weights + tile, total & WEIGHT_SUM_MASK)
    tl.store(n_listed + tile, total >> EXPECTED_SHIFT)


@triton.jit
def _collect_kernel(
    olds, news, sizes, span_memory, span_number, first_tile,
    elements, places, weights, n_listed, room,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    N_KEYS: tl.constexpr, HAS_EXPECTED: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One tile; whole ones are read without masks, in the widest loads there are."""
    span = tl.program_id(0)
    piece = tl.load(span_memory + span)
    number = tl.load(span_number + span)
    tile = (tl.load(first_tile + piece) + number).to(tl.int64)
    table = elements + piece * N_KEYS
    begin = number.to(tl.int64) * TILE
    # Said of the sums, since the compiler does not follow alignment through a cast of an address.
    old_at = tl.multiple_of(memory_at(olds, piece, KIND) + begin, ALIGNMENT)
    new_at = tl.multiple_of(memory_at(news, piece, KIND) + begin, ALIGNMENT)
    place = tl.arange(0, TILE)
    left = tl.load(sizes + piece) - begin
    if left >= TILE:
        old, new = tl.load(old_at + place), tl.load(new_at + place)
        _list_tile(
            old, new, place < TILE, table, places, weights, n_listed, tile, room,
            SHIFT, MASK, HAS_EXPECTED, True,
        )  # fmt: skip
    else:
        is_there = place < left
        old = tl.load(old_at + place, mask=is_there, other=0)
        new = tl.load(new_at + place, mask=is_there, other=0)
        _list_tile(
            old, new, is_there, table, places, weights, n_listed, tile, room,
            SHIFT, MASK, HAS_EXPECTED, False,
        )  # fmt: skip
