"""Finished chunks, end to end: heads, sizes, and every word at its place in the payload."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightwire.kernels.contract import DENSE
from weightwire.kernels.reference import EXCEPTIONS
from weightwire.kernels.triton.arrange import EXCEPTION_ROOM
from weightwire.kernels.triton.cuts import Cuts
from weightwire.kernels.triton.gather import Gathered, chunk_segments, sign_word
from weightwire.kernels.triton.launch import TRITON_BITS, memory_at
from weightwire.kernels.triton.push import Stacks
from weightwire.model import DType

_BLOCK = 256
_LANES = 128
NO_EXCEPTION = tl.constexpr(0x7FFFFFFFFFFFFFFF)
HAS_EXCEPTIONS = tl.constexpr(EXCEPTIONS)


@dataclass(frozen=True)
class Rows:
    """A directory row per chunk."""

    told: torch.Tensor
    """int32 [4, chunk]: heads, sizes in words, changes, and 1 for chunks to be coded again.

    Those had too little room somewhere; they are left empty.
    """
    ends: torch.Tensor
    """int64: where each chunk ends in the payload, in words."""


def rows_of(cuts: Cuts, gathered: Gathered, stacks: Stacks, dtype: DType) -> Rows:
    """Nothing, coded, or dense, whichever is shortest."""
    n = cuts.n_chunks
    told = torch.empty((4, n), dtype=torch.int32, device=cuts.device)
    _rows_kernel[(triton.cdiv(n, _LANES),)](
        cuts.chunk_piece, cuts.chunk_number, cuts.sizes, cuts.chunk_log2, gathered.n_changed,
        gathered.n_events, gathered.rate, gathered.n_exceptions, gathered.is_crowded,
        gathered.stack_room, stacks.room_ends, stacks.n_words, told, n, len(stacks.words),
        N_BYTES=dtype.n_bytes, DENSE=DENSE, EXCEPTION_ROOM=EXCEPTION_ROOM, LANES=_LANES,
        num_warps=1,
    )  # fmt: skip
    return Rows(told, told[1].cumsum(0, dtype=torch.int64))


@triton.jit(do_not_specialize=["n_chunks", "n_room"])
def _rows_kernel(
    chunk_piece, chunk_number, sizes, chunk_log2s, chunk_changed,
    chunk_events, chunk_rate, chunk_exceptions, crowded,
    stack_rooms, room_ends, n_stacked, told, n_chunks, n_room,
    N_BYTES: tl.constexpr, DENSE: tl.constexpr, EXCEPTION_ROOM: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """A lane per chunk."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_on = chunk < n_chunks
    piece = tl.load(chunk_piece + chunk, mask=is_on, other=0)
    log2 = tl.load(chunk_log2s + piece)
    start = tl.load(chunk_number + chunk, mask=is_on, other=0).to(tl.int64) << log2
    n = tl.minimum(tl.load(sizes + piece) - start, tl.full((), 1, tl.int64) << log2).to(tl.int32)
    n_changed = tl.load(chunk_changed + chunk, mask=is_on, other=0)
    n_events = tl.load(chunk_events + chunk, mask=is_on, other=0)
    rate = tl.load(chunk_rate + chunk, mask=is_on, other=0)
    n_odd = tl.load(chunk_exceptions + chunk, mask=is_on, other=0)
    n_words = tl.load(n_stacked + chunk, mask=is_on, other=0)
    room = tl.load(stack_rooms + chunk, mask=is_on, other=0)
    room = tl.where(tl.load(room_ends + chunk, mask=is_on, other=0) <= n_room, room, 0)
    n_signs = (n_changed + 31) // 32
    coded = 2 + n_words + n_signs + tl.where(n_odd > 0, 2 * n_odd + 1, 0)
    dense = (n * N_BYTES + 3) // 4
    is_dense = coded >= dense
    is_over = (n_words > room) | (n_odd > EXCEPTION_ROOM)
    is_short = (n_changed > 0) & tl.where(is_dense, dense > n_signs + room, is_over)
    is_there = (n_changed > 0) & (is_short == 0)
    head = n_events | (rate << 24) | tl.where(n_odd > 0, HAS_EXCEPTIONS, 0)
    head = tl.where(is_there, tl.where(is_dense, DENSE, head), 0)
    size = tl.where(is_there, tl.where(is_dense, dense, coded), 0)
    is_crowded = tl.load(crowded + chunk, mask=is_on, other=0)
    tl.store(told + chunk, head, mask=is_on)
    tl.store(told + n_chunks + chunk, size, mask=is_on)
    tl.store(told + 2 * n_chunks + chunk, n_changed, mask=is_on)
    tl.store(told + 3 * n_chunks + chunk, is_short.to(tl.int32) | is_crowded, mask=is_on)


def room_for_payload(n_chunks: int, n_listed: int, n_stacked: int) -> int:
    """Words that chunks which are not short have at most: state, stack, signs and exceptions."""
    return n_stacked + n_listed // 32 + n_chunks * (1 + 2 + 1 + 2 * EXCEPTION_ROOM)


def join(
    cuts: Cuts, gathered: Gathered, stacks: Stacks, rows: Rows, n_words: int, dtype: DType
) -> torch.Tensor:
    """The payload of all chunks, int32, in memory for ``n_words``."""
    payload = torch.empty(max(n_words, 1), dtype=torch.int32, device=cuts.device)
    _join_kernel[(cuts.n_chunks,)](
        cuts.chunk_piece, cuts.chunk_number, cuts.sizes, cuts.chunk_log2, cuts.segment_log2,
        cuts.first_segment, stacks.words, stacks.room_ends, stacks.n_words, stacks.state,
        gathered.signs, gathered.first, gathered.exceptions, gathered.n_exceptions,
        rows.told, rows.ends, cuts.news, payload, cuts.n_chunks,
        KIND=TRITON_BITS[dtype.n_bytes], PER_WORD=4 // dtype.n_bytes, WIDTH=8 * dtype.n_bytes,
        DENSE=DENSE, EXCEPTION_ROOM=EXCEPTION_ROOM, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    return payload


@triton.jit(do_not_specialize=["n_chunks"])
def _join_kernel(
    chunk_piece, chunk_number, sizes, chunk_log2s, segment_log2s,
    first_segments, words, room_ends, n_stacked, states,
    signs, firsts, exceptions, n_exceptions,
    told, ends, news, payload, n_chunks,
    KIND: tl.constexpr, PER_WORD: tl.constexpr, WIDTH: tl.constexpr,
    DENSE: tl.constexpr, EXCEPTION_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk: count of exceptions, state, stack, signs, exceptions; or all its new bits."""
    chunk = tl.program_id(0).to(tl.int64)
    size = tl.load(told + n_chunks + chunk)
    out = payload + tl.load(ends + chunk) - size
    lane = tl.arange(0, BLOCK)
    if tl.load(told + chunk) == DENSE:
        piece, n, _, _ = chunk_segments(
            chunk, chunk_piece, chunk_number, sizes, chunk_log2s, segment_log2s, first_segments
        )
        start = tl.load(chunk_number + chunk).to(tl.int64) << tl.load(chunk_log2s + piece)
        new = memory_at(news, piece, KIND) + start
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
        n_signs = (tl.load(told + 2 * n_chunks + chunk) + 31) // 32
        last_sign = signs + sign_word(tl.load(firsts + chunk), chunk) + n_signs - 1
        for begin in range(0, n_signs, BLOCK):
            mask = begin + lane < n_signs
            sign = tl.load(last_sign - begin - lane, mask=mask, other=0)
            tl.store(out + begin + lane, sign, mask=mask)
        out += n_signs
        if n_odd > 0:
            number = tl.arange(0, EXCEPTION_ROOM)
            is_on = number < n_odd
            odd_at = (exceptions + 2 * chunk * EXCEPTION_ROOM).to(
                tl.pointer_type(tl.int64)
            ) + number
            odd = tl.sort(tl.load(odd_at, mask=is_on, other=NO_EXCEPTION))
            tl.store(out + 2 * number, (odd >> 32).to(tl.int32), mask=is_on)
            bits = (odd & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
            tl.store(out + 2 * number + 1, bits, mask=is_on)
