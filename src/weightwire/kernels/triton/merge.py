"""Events and what was expected, merged in place, a warp per chunk.

An event that was expected is none: the element stays as it is, and stands there twice. Everything
else is a change. Where each goes is known by searching the other list for it, so that nothing has to
be read in order. On the way the changes are counted that the coder has steps for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.elements import CLASS_SHIFT, ONE_STEP_SHIFT, told_by_key
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at
from weightwire.kernels.triton.models import DeviceModels
from weightwire.kernels.triton.pop import EVENTS, Popped
from weightwire.kernels.triton.weight_index import CodedChunks, Expected
from weightwire.model import DType

_BLOCK = 256
"""Elements that are looked for at a time."""


def merge_expected(
    old: Bucket,
    chunks: CodedChunks,
    popped: Popped,
    models: DeviceModels,
    dtype: DType,
    expected: Expected,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
) -> torch.Tensor:
    """Put positions in order, and old bits beside them; gives int32: how many changes are coded.

    Events stand at the end of a chunk's room. The number of changes is told with what was popped.
    """
    n_coded = torch.empty(len(chunks), dtype=torch.int32, device=positions.device)
    _merge_kernel[(len(chunks),)](
        old.addresses, chunks.piece, chunks.start, chunks.head, models.elements, models.tables,
        expected.counts, expected.first, expected.places,
        first_out, positions, bits, popped.told, n_coded,
        KIND=TRITON_BITS[dtype.n_bytes], SHIFT=dtype.key_shift, MASK=dtype.key_mask,
        N_KEYS=models.n_keys, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    return n_coded


@triton.jit
def _count_below(values, n, start, bound):
    """How many of ``n`` values, which ascend, are less than this, told from ``start`` on."""
    low = tl.zeros_like(bound)
    high = low + n
    left = n
    while left > 0:
        middle = (low + high) >> 1
        is_open = middle < high
        is_less = is_open & (tl.load(values + middle, mask=is_open, other=0) - start < bound)
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)
        left = left >> 1
    return low


@triton.jit
def class_of(bits, table, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The class that elements with these old bits are in."""
    return (told_by_key(bits, table, SHIFT, MASK) >> CLASS_SHIFT) & 15


@triton.jit
def _is_coded(same, is_change, table, steps, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """1 for changes that the coder has a step for."""
    about = tl.load(steps + class_of(same.to(tl.uint32), table, SHIFT, MASK))
    return (is_change & ((about >> ONE_STEP_SHIFT) == 0)).to(tl.int32)


@triton.jit
def _merge_kernel(
    olds, chunk_piece, chunk_start, heads, elements, tables,
    n_expected, first_expected, places,
    first_out, positions, bits, told, coded_counts,
    KIND: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, N_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk: some expected elements at a time, and the events before the last of them.

    Events move to the front, never past one that is yet to be read. An expected element's place is
    before the events that come after it, and those before it have moved.
    """
    chunk = tl.program_id(0)
    piece = tl.load(chunk_piece + chunk)
    first = tl.load(chunk_start + chunk)
    start = first.to(tl.int32)
    old = memory_at(olds, piece, KIND) + first
    is_sound = tl.load(told + chunk) == 0
    n_events = tl.where(is_sound, tl.load(heads + chunk) & EVENTS, 0)
    n_known = tl.where(is_sound, tl.load(n_expected + chunk), 0)
    out = tl.load(first_out + chunk)
    table = elements + piece * N_KEYS
    steps = tables + piece * 16
    known = places + tl.load(first_expected + chunk)
    events = positions + out + n_known
    number = tl.arange(0, BLOCK)
    n_coded = tl.zeros((BLOCK,), tl.int32)
    n_both = tl.zeros((BLOCK,), tl.int32)
    n_moved = tl.full((), 0, tl.int32)
    for begin in range(0, n_known + 1, BLOCK):
        is_known = begin + number < n_known
        place = tl.load(known + begin + number, mask=is_known, other=0)
        rank = _count_below(events + n_moved, n_events - n_moved, start, place + 1) + n_moved
        is_after = is_known & (rank > n_moved)
        before = tl.load(events + rank - 1, mask=is_after, other=0)
        is_both = is_after & (before - start == place)
        n_both += is_both.to(tl.int32)
        is_last = begin + BLOCK > n_known
        end = tl.where(is_last, n_events, tl.max(rank, 0))
        for event in range(n_moved, end, BLOCK):
            is_on = event + number < end
            position = tl.load(events + event + number, mask=is_on, other=0)
            same = tl.load(old + (position - start), mask=is_on, other=0)
            event_rank = _count_below(known, n_known, 0, position - start)
            is_inside = is_on & (event_rank < n_known)
            at_rank = tl.load(known + event_rank, mask=is_inside, other=-1)
            to = out + event + number + event_rank
            # All lanes have read what others are about to write on.
            tl.debug_barrier()
            tl.store(positions + to, position, mask=is_on)
            tl.store(bits + to, same.to(bits.dtype.element_ty, bitcast=True), mask=is_on)
            is_change = is_on & (at_rank != position - start)
            n_coded += _is_coded(same, is_change, table, steps, SHIFT, MASK)
        n_moved = end
        same = tl.load(old + place, mask=is_known, other=0)
        to = out + begin + number + rank
        tl.debug_barrier()
        tl.store(positions + to, start + place, mask=is_known)
        tl.store(bits + to, same.to(bits.dtype.element_ty, bitcast=True), mask=is_known)
        n_coded += _is_coded(same, is_known & ~is_both, table, steps, SHIFT, MASK)
    tl.store(coded_counts + chunk, tl.sum(n_coded, 0))
    n_changes = n_events + n_known - 2 * tl.sum(n_both, 0)
    tl.store(told + tl.num_programs(0) + chunk, n_changes)
