"""Finished chunks, end to end: heads, sizes, and every word at its place in the payload."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import DENSE
from weightwire.kernels.reference import EXCEPTIONS
from weightwire.kernels.triton.arrange import EXCEPTION_ROOM, Arranged, Chunks
from weightwire.kernels.triton.collect import PLACE_MASK, TILE, Tiles
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at
from weightwire.kernels.triton.push import Stacks
from weightwire.model import DType

_BLOCK = 256
NO_EXCEPTION = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Rows:
    """A directory row per chunk."""

    heads: torch.Tensor
    sizes: torch.Tensor
    """int32, in words."""
    ends: torch.Tensor
    """int64: where each chunk ends in the payload, in words."""
    is_short: torch.Tensor
    """Chunks for which a room was too small: what is there of them is not whole."""


def rows_of(chunks: Chunks, arranged: Arranged, stacks: Stacks, n_bytes: int) -> Rows:
    """Nothing, coded, or dense, whichever is shortest."""
    has_odd = (arranged.n_exceptions > 0).int()
    n_signs = (arranged.n_changed + 31) // 32
    coded = 2 + stacks.n_words + n_signs + 2 * arranged.n_exceptions + has_odd
    dense = (chunks.n_elements.int() * n_bytes + 3) // 4
    is_dense = coded >= dense
    is_empty = arranged.n_changed == 0
    heads = arranged.n_events | (arranged.rate << 24) | (has_odd * EXCEPTIONS)
    heads = torch.where(is_dense, DENSE, heads).masked_fill(is_empty, 0)
    sizes = torch.where(is_dense, dense, coded).masked_fill(is_empty, 0)
    is_over = (stacks.n_words > stacks.rooms) | (arranged.n_exceptions > EXCEPTION_ROOM)
    return Rows(heads.int(), sizes.int(), sizes.long().cumsum(0), is_over & ~is_dense & ~is_empty)


def join(
    chunks: Chunks,
    arranged: Arranged,
    stacks: Stacks,
    rows: Rows,
    new: Bucket,
    first_tile: torch.Tensor,
    n_words: int,
    dtype: DType,
) -> torch.Tensor:
    """The payload of all chunks, int32."""
    payload = torch.empty(n_words, dtype=torch.int32, device=rows.ends.device)
    if n_words:
        _join_kernel[(len(chunks),)](
            stacks.words, stacks.room_ends, stacks.n_words, stacks.state, arranged.signs,
            arranged.first_sign, arranged.exceptions, arranged.n_exceptions,
            rows.heads, rows.sizes, rows.ends, chunks.piece, chunks.first_tile, chunks.n_elements,
            arranged.n_changed, new.addresses, first_tile, payload,
            KIND=TRITON_BITS[dtype.n_bytes], PER_WORD=4 // dtype.n_bytes, WIDTH=8 * dtype.n_bytes,
            DENSE=DENSE, EXCEPTION_ROOM=EXCEPTION_ROOM, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    return payload


@triton.jit
def _join_kernel(
    words, room_ends, n_stacked, states, signs,
    first_sign, exceptions, n_exceptions,
    heads, sizes, ends, chunk_piece, chunk_first_tile, chunk_elements,
    chunk_changed, news, first_tile, payload,
    KIND: tl.constexpr, PER_WORD: tl.constexpr, WIDTH: tl.constexpr,
    DENSE: tl.constexpr, EXCEPTION_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk: count of exceptions, state, stack, signs, exceptions; or all its new bits."""
    chunk = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + chunk)
    out = payload + tl.load(ends + chunk) - size
    lane = tl.arange(0, BLOCK)
    if tl.load(heads + chunk) == DENSE:
        piece = tl.load(chunk_piece + chunk)
        n = tl.load(chunk_elements + chunk).to(tl.int32)
        tile = tl.load(chunk_first_tile + chunk) - tl.load(first_tile + piece)
        new = memory_at(news, piece, KIND) + tile * TILE
        for begin in range(0, size, BLOCK):
            word = tl.zeros((BLOCK,), tl.uint32)
            for part in tl.static_range(PER_WORD):
                at = (begin + lane) * PER_WORD + part
                bits = tl.load(new + at, mask=at < n, other=0).to(tl.uint32)
                word |= bits << (part * WIDTH)
            tl.store(out + begin + lane, word.to(tl.int32, bitcast=True), mask=begin + lane < size)
    elif size > 0:
        n_odd = tl.load(n_exceptions + chunk)
        if n_odd > 0:
            tl.store(out, n_odd)
            out += 1
        state = tl.load(states + chunk)
        tl.store(out, (state & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True))
        tl.store(out + 1, (state >> 32).to(tl.int32))
        out += 2
        count = tl.load(n_stacked + chunk)
        stack = words + tl.load(room_ends + chunk) - count
        for begin in range(0, count, BLOCK):
            mask = begin + lane < count
            tl.store(
                out + begin + lane, tl.load(stack + begin + lane, mask=mask, other=0), mask=mask
            )
        out += count
        n_signs = (tl.load(chunk_changed + chunk) + 31) // 32
        last_sign = signs + tl.load(first_sign + chunk) + n_signs - 1
        for begin in range(0, n_signs, BLOCK):
            mask = begin + lane < n_signs
            sign = tl.load(last_sign - begin - lane, mask=mask, other=0)
            tl.store(out + begin + lane, sign, mask=mask)
        out += n_signs
        if n_odd > 0:
            number = tl.arange(0, EXCEPTION_ROOM)
            is_on = number < n_odd
            odd = tl.load(
                exceptions + chunk * EXCEPTION_ROOM + number, mask=is_on, other=NO_EXCEPTION
            )
            odd = tl.sort(odd)
            tl.store(out + 2 * number, (odd >> 32).to(tl.int32), mask=is_on)
            bits = (odd & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
            tl.store(out + 2 * number + 1, bits, mask=is_on)


def pairs_of(
    tiles: Tiles,
    chunks: Chunks,
    counts: torch.Tensor,
    old: Bucket,
    new: Bucket,
    first_tile: torch.Tensor,
    n_changed: int,
    dtype: DType,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in their pieces (uint32 in int32) and new bits of all changes, in order.

    ``counts``: how many changes each chunk has; ``n_changed`` in all.
    """
    device = old.device
    positions = torch.empty(n_changed, dtype=torch.int32, device=device)
    bits = torch.empty(n_changed, dtype=new.memories[0].dtype, device=device)
    wide = counts.long()
    block = triton.next_power_of_2(tiles.room)
    if n_changed:
        _pairs_kernel[(len(chunks),)](
            tiles.places, tiles.n_listed, tiles.room, wide.cumsum(0) - wide, chunks.piece,
            chunks.first_tile, chunks.n_tiles, old.addresses, new.addresses, first_tile,
            positions, bits, KIND=TRITON_BITS[dtype.n_bytes], BLOCK=block,
            LANES=max(_BLOCK, block), num_warps=1,
        )  # fmt: skip
    return positions, bits


@triton.jit
def _pairs_kernel(
    places, tile_listed, room, firsts, chunk_piece, chunk_first_tile, chunk_tiles,
    olds, news, first_tile, positions, bits,
    KIND: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One chunk, a few tiles at a time, as it was arranged."""
    chunk = tl.program_id(0)
    piece = tl.load(chunk_piece + chunk)
    first = tl.load(chunk_first_tile + chunk)
    count = tl.load(chunk_tiles + chunk)
    begin_at = (first - tl.load(first_tile + piece)) * TILE
    old_at = memory_at(olds, piece, KIND)
    new_at = memory_at(news, piece, KIND)
    out = tl.load(firsts + chunk)
    lane = tl.arange(0, LANES)
    within, rank_in_tile = lane // BLOCK, lane % BLOCK
    for begin in range(0, count, LANES // BLOCK):
        number = begin + within
        n_here = tl.load(tile_listed + first + number, mask=number < count, other=0)
        is_on = rank_in_tile < n_here
        at = 2 * ((first + number) * room + rank_in_tile)
        packed = tl.load(places + at, mask=is_on, other=0).to(tl.int32)
        position = begin_at + number * TILE + (packed & PLACE_MASK)
        new = tl.load(new_at + position, mask=is_on, other=0)
        changed = is_on & (new != tl.load(old_at + position, mask=is_on, other=0))
        ranks = tl.cumsum(changed.to(tl.int32), 0)
        tl.store(positions + out + ranks - 1, position.to(tl.int32), mask=changed)
        tl.store(bits + out + ranks - 1, new.to(bits.dtype.element_ty, bitcast=True), mask=changed)
        out += tl.max(ranks, 0)
