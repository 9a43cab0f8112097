"""The one pass over both states: what changed, and where it stands in weight space.

Every tile writes down its *listed* elements, those that changed or were expected to, as two words
each, and its sums. Nothing after this pass touches an element that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.elements import (
    LISTED_SHIFT,
    TILE,
    WEIGHT_MASK,
    bit_of,
    class_of,
    log2_weight_of,
    step_between,
)
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at
from weightwire.kernels.triton.models import DeviceModels
from weightwire.model import DType

TILE_ELEMENTS: int = TILE.value

PLACE_BITS = tl.constexpr(10)
PLACE_MASK = tl.constexpr(1023)
START_SHIFT = tl.constexpr(14)


@dataclass(frozen=True)
class Tiles:
    """What a pass over some pieces found, tile by tile."""

    room: int
    """Listed elements that a tile has room for; tiles that need more are marked by their count."""
    places: torch.Tensor
    """int32 [tile, room]: place in the tile, class, and start in the tile's weight space."""
    steps: torch.Tensor
    """int32 [tile, room]: steps from old to new; 0 for one that was expected to change and did not."""
    weights: torch.Tensor
    """int32: the sum of the weights of all its elements."""
    n_listed: torch.Tensor
    n_changed: torch.Tensor


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
    tiles = _room_for(n_tiles, room, old.device)
    _collect_kernel[(old.n_spans,)](
        old.addresses, new.addresses, old.sizes, old.span_memory, old.span_number, first_tile,
        models.base_keys, models.nibbles, models.expected,
        tiles.places, tiles.steps, tiles.weights, tiles.n_listed, tiles.n_changed,
        KIND=TRITON_BITS[dtype.n_bytes], WIDTH=8 * dtype.n_bytes, SHIFT=dtype.key_shift,
        MASK=dtype.key_mask, ORDERED=dtype.ordered, HAS_EXPECTED=models.has_expected, ROOM=room,
        num_warps=1 if dtype.n_bytes < 4 else 2,
    )  # fmt: skip
    return tiles


def _room_for(n_tiles: int, room: int, device: torch.device) -> Tiles:
    def words(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Tiles(
        room,
        words(n_tiles, room),
        words(n_tiles, room),
        words(n_tiles),
        words(n_tiles),
        words(n_tiles),
    )


@triton.jit
def _collect_kernel(
    olds, news, sizes, span_memory, span_number, first_tile,
    base_keys, nibbles, expected_masks,
    places, steps, weights, n_listed, n_changed,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    ORDERED: tl.constexpr, HAS_EXPECTED: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One tile. A listed element's rank and start are sums over the elements before it in the tile."""
    span = tl.program_id(0)
    piece = tl.load(span_memory + span)
    number = tl.load(span_number + span)
    tile = (tl.load(first_tile + piece) + number).to(tl.int64)
    place = tl.arange(0, TILE)
    at = number.to(tl.int64) * TILE + place
    is_there = at < tl.load(sizes + piece)
    old = tl.load(memory_at(olds, piece, KIND) + at, mask=is_there, other=0).to(tl.uint32)
    new = tl.load(memory_at(news, piece, KIND) + at, mask=is_there, other=0).to(tl.uint32)
    classes = class_of(old, tl.load(base_keys + piece), SHIFT, MASK)
    weight = tl.where(is_there, 1 << log2_weight_of(classes, tl.load(nibbles + piece)), 0)
    changed = old != new
    listed = changed
    if HAS_EXPECTED:
        is_expected = bit_of(tl.load(expected_masks + piece), classes) != 0
        listed = changed | (is_expected & is_there)
    running = tl.cumsum(weight + (listed.to(tl.int32) << LISTED_SHIFT), 0)
    total = tl.max(running, 0)
    start = (running & WEIGHT_MASK) - weight
    rank = (running >> LISTED_SHIFT) - 1
    has_room = listed & (rank < ROOM)
    packed = place | (classes << PLACE_BITS) | (start << (START_SHIFT))
    tl.store(places + tile * ROOM + rank, packed, mask=has_room)
    step = step_between(old, new, WIDTH, ORDERED)
    tl.store(steps + tile * ROOM + rank, step, mask=has_room)
    tl.store(weights + tile, total & WEIGHT_MASK)
    tl.store(n_listed + tile, total >> LISTED_SHIFT)
    if HAS_EXPECTED:
        tl.store(n_changed + tile, tl.sum(changed.to(tl.int32), 0))
    else:
        tl.store(n_changed + tile, total >> LISTED_SHIFT)
