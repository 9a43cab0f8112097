"""Finished chunks, end to end: heads, sizes, and every word at its place in the payload."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import DENSE
from weightwire.kernels.reference import EXCEPTIONS
from weightwire.kernels.triton.collect import PLACE_MASK, Tiles
from weightwire.kernels.triton.elements import TILE
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at
from weightwire.kernels.triton.push import EXCEPTION_ROOM, Chunks, Stacks
from weightwire.model import DType

_BLOCK = 256


@dataclass(frozen=True)
class Rows:
    """A directory row per chunk."""

    heads: torch.Tensor
    sizes: torch.Tensor
    """int32, in words."""
    ends: torch.Tensor
    """int64: where each chunk ends in the payload, in words."""


def rows_of(chunks: Chunks, stacks: Stacks, n_bytes: int) -> Rows:
    """Nothing, coded, or dense, whichever is shortest."""
    has_odd = (stacks.n_exceptions > 0).int()
    n_signs = (chunks.n_changed + 31) // 32
    coded = 2 + stacks.n_words + n_signs + 2 * stacks.n_exceptions + has_odd
    dense = (chunks.n_elements.int() * n_bytes + 3) // 4
    is_dense = coded >= dense
    is_empty = chunks.n_changed == 0
    heads = chunks.n_events | (chunks.rate << 24) | (has_odd * EXCEPTIONS)
    heads = torch.where(is_dense, DENSE, heads).masked_fill(is_empty, 0)
    sizes = torch.where(is_dense, dense, coded).masked_fill(is_empty, 0)
    return Rows(heads.int(), sizes.int(), sizes.long().cumsum(0))


def join(
    chunks: Chunks,
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
        _join_kernel[(len(rows.sizes),)](
            stacks.words, stacks.room_ends, stacks.n_words, stacks.state, stacks.signs,
            stacks.first_sign, stacks.exceptions, stacks.n_exceptions,
            rows.heads, rows.sizes, rows.ends, chunks.piece, chunks.first_tile, chunks.n_elements,
            chunks.n_changed, new.addresses, first_tile, payload,
            KIND=TRITON_BITS[dtype.n_bytes], PER_WORD=4 // dtype.n_bytes, WIDTH=8 * dtype.n_bytes,
            DENSE=DENSE, EXCEPTION_WORDS=2 * EXCEPTION_ROOM, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    return payload


@triton.jit
def _join_kernel(
    words, room_ends, n_stacked, states, signs,
    first_sign, exceptions, n_exceptions,
    heads, sizes, ends, chunk_piece, chunk_first_tile, chunk_elements,
    chunk_changed, news, first_tile, payload,
    KIND: tl.constexpr, PER_WORD: tl.constexpr, WIDTH: tl.constexpr,
    DENSE: tl.constexpr, EXCEPTION_WORDS: tl.constexpr, BLOCK: tl.constexpr,
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
        new = memory_at(news, piece, KIND) + tile.to(tl.int64) * TILE
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
        sign = signs + tl.load(first_sign + chunk)
        for begin in range(0, n_signs, BLOCK):
            mask = begin + lane < n_signs
            tl.store(
                out + begin + lane, tl.load(sign + begin + lane, mask=mask, other=0), mask=mask
            )
        out += n_signs
        odd = exceptions + (chunk + 1) * EXCEPTION_WORDS - 2 * n_odd
        for begin in range(0, 2 * n_odd, BLOCK):
            mask = begin + lane < 2 * n_odd
            tl.store(out + begin + lane, tl.load(odd + begin + lane, mask=mask, other=0), mask=mask)


def pairs_of(
    tiles: Tiles,
    new: Bucket,
    first_tile: torch.Tensor,
    ends: torch.Tensor,
    n_changed: int,
    dtype: DType,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in their pieces (uint32 in int32) and new bits of all changes, in order.

    ``ends``: int64, how many changes there are up to the end of every tile.
    """
    device = ends.device
    positions = torch.empty(n_changed, dtype=torch.int32, device=device)
    bits = torch.empty(n_changed, dtype=new.memories[0].dtype, device=device)
    if n_changed:
        _pairs_kernel[(new.n_spans,)](
            tiles.places, tiles.steps, tiles.n_listed, tiles.n_changed, ends,
            new.addresses, new.span_memory, new.span_number, first_tile, positions, bits,
            KIND=TRITON_BITS[dtype.n_bytes], ROOM=tiles.room,
            BLOCK=triton.next_power_of_2(tiles.room), num_warps=1,
        )  # fmt: skip
    return positions, bits


@triton.jit
def _pairs_kernel(
    places, steps, n_listed, n_changed, ends,
    news, span_memory, span_number, first_tile, positions, bits,
    KIND: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile: its changes go where the tiles before it end."""
    span = tl.program_id(0)
    piece = tl.load(span_memory + span)
    number = tl.load(span_number + span)
    tile = (tl.load(first_tile + piece) + number).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    is_listed = lane < tl.load(n_listed + tile)
    step = tl.load(steps + tile * ROOM + lane, mask=is_listed, other=0)
    place = tl.load(places + tile * ROOM + lane, mask=is_listed, other=0) & PLACE_MASK
    changed = step != 0
    rank = tl.cumsum(changed.to(tl.int32), 0) - 1
    out = tl.load(ends + tile) - tl.load(n_changed + tile) + rank
    position = number.to(tl.int64) * TILE + place
    new = tl.load(memory_at(news, piece, KIND) + position, mask=changed, other=0)
    tl.store(positions + out, position.to(tl.int32), mask=changed)
    tl.store(bits + out, new.to(bits.dtype.element_ty, bitcast=True), mask=changed)
