"""The plain encoder on a GPU: what it writes decodes without the old bits.

The pass over both states is the compact encoder's, with all elements alike. A chunk then says its
changes as places and bits, as a bitmap and bits, or as all its bits, whichever is shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.errors import StopError
from weightwire.kernels.contract import ALL_ALIKE, PLAIN_CHUNK, Streams
from weightwire.kernels.model_batch import repeated
from weightwire.kernels.reference import PLAIN_BITMAP, PLAIN_DENSE, PLAIN_SPARSE
from weightwire.kernels.triton.arrange import load_records, lowest
from weightwire.kernels.triton.collect import GROUP, Segments, collect, count_bits
from weightwire.kernels.triton.cuts import MAX_SEGMENT_LOG2, Cuts
from weightwire.kernels.triton.launch import TRITON_BITS, memory_at
from weightwire.kernels.triton.memories import Memories
from weightwire.kernels.triton.slabs import (
    Launched,
    Slab,
    Work,
    in_slabs,
    launched,
    nothing,
    split,
)
from weightwire.model import DType

_BLOCK = 64
_DENSE_BLOCK = 512
_CHUNK_LOG2 = MAX_SEGMENT_LOG2
"""A chunk is a segment."""
SPARSE, BITMAP = tl.constexpr(PLAIN_SPARSE), tl.constexpr(PLAIN_BITMAP)


def encode_plain_all(
    memories: Memories,
    dtype: DType,
    rates: npt.NDArray[np.float64],
    *,
    budget_bytes: int,
) -> Iterator[Streams]:
    """Code every piece as the reference does.

    Args:
        rates: how much of each piece is likely to have changed.
        budget_bytes: what may be allocated meanwhile.
    """
    alike = replace(dtype, key_shift=0, key_mask=0)
    models = repeated(ALL_ALIKE, _CHUNK_LOG2, len(memories.sizes))
    work = Work(memories, alike, models, rates)
    return in_slabs([work], budget_bytes, _launch, _finish, _too_crowded)


def _launch(slab: Slab) -> tuple[Slab, Launched]:
    cuts, dtype = slab.cuts, slab.dtype
    if not cuts.n_chunks:
        return slab, nothing(slab)
    found = collect(cuts, slab.models, dtype)
    before = found.n_listed.cumsum(0, dtype=torch.int64)
    piece = cuts.segment_piece.long()
    is_crowded = (found.n_records > cuts.room[piece]) | (before > slab.n_listed)
    n_changed = found.n_listed.long().masked_fill(is_crowded, 0)
    start = cuts.segment_number.long() << _CHUNK_LOG2
    n_elements = (cuts.sizes[piece] - start).clamp(max=PLAIN_CHUNK)
    heads, sizes = _rows(n_elements, n_changed, dtype.n_bytes)
    payload = _write(slab, found, heads, sizes)
    told = torch.stack([heads, sizes, n_changed.int(), is_crowded.int()])
    return slab, launched(told, payload)


def _finish(begun: tuple[Slab, Launched]) -> dict[int, Streams]:
    slab, coding = begun
    (heads, sizes, n_changed, is_crowded), words = coding.wait()
    directory = heads.view(np.uint32).reshape(-1, 1)
    return split(slab.cuts.chunk_counts, directory, sizes, n_changed, words, is_crowded)


def _rows(
    n: torch.Tensor, n_changed: torch.Tensor, n_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads, and sizes in words: of the ways to say it the shortest, the first of them if alike."""
    ways = torch.stack([n_changed * (2 + n_bytes), (n + 7) // 8 + n_changed * n_bytes, n * n_bytes])
    words = (ways + 3) // 4
    best = words.min(dim=0)
    modes = torch.where(words == best.values, torch.arange(3, device=n.device)[:, None], 3).amin(0)
    is_empty = n_changed == 0
    heads = (n_changed | modes << 24).masked_fill(is_empty, 0)
    return heads.int(), best.values.masked_fill(is_empty, 0).int()


def _write(slab: Slab, found: Segments, heads: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    cuts: Cuts = slab.cuts
    n_bytes = slab.dtype.n_bytes
    # At least one of the three ways is no longer than places and bits.
    n_words = -(-slab.n_listed * (2 + n_bytes) // 4) + cuts.n_chunks
    payload = torch.zeros(n_words, dtype=torch.int32, device=cuts.device)
    wide = sizes.long()
    _write_kernel[(cuts.n_segments,)](
        found.records, found.marks, found.n_records, cuts.segment_piece, cuts.segment_number,
        cuts.first_record, cuts.room, cuts.news, cuts.sizes, heads, wide.cumsum(0) - wide, payload,
        KIND=TRITON_BITS[n_bytes], N_BYTES=n_bytes, DENSE=PLAIN_DENSE, CHUNK=PLAIN_CHUNK,
        BLOCK=_BLOCK, DENSE_BLOCK=_DENSE_BLOCK, num_warps=1,
    )  # fmt: skip
    return payload


@triton.jit
def _store_bytes(at, values, N_BYTES: tl.constexpr, mask):
    """Values at any byte: they need not begin where a word does."""
    for part in tl.static_range(N_BYTES):
        tl.store(at + part, (values >> (8 * part)).to(tl.uint8), mask=mask)


@triton.jit
def _write_kernel(
    records, all_marks, n_records, segment_piece, segment_number,
    first_records, rooms, news, sizes, heads, first_word, payload,
    KIND: tl.constexpr, N_BYTES: tl.constexpr, DENSE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, DENSE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk, a few records at a time; the payload is zero beforehand."""
    chunk = tl.program_id(0)
    head = tl.load(heads + chunk)
    n_changed = head & 0xFFFFFF
    if n_changed > 0:
        piece = tl.load(segment_piece + chunk)
        number = tl.load(segment_number + chunk).to(tl.int64)
        n = tl.minimum(tl.load(sizes + piece) - number * CHUNK, CHUNK).to(tl.int32)
        words = payload + tl.load(first_word + chunk)
        out = words.to(tl.pointer_type(tl.uint8))
        new_at = memory_at(news, piece, KIND) + number * CHUNK
        mode = head >> 24
        if mode == DENSE:
            for part in range(0, n, DENSE_BLOCK):
                at = part + tl.arange(0, DENSE_BLOCK)
                values = tl.load(new_at + at, mask=at < n, other=0).to(tl.uint32)
                _store_bytes(out + at * N_BYTES, values, N_BYTES, at < n)
        else:
            room_at = tl.load(first_records + piece) + number * tl.load(rooms + piece)
            count = tl.load(n_records + chunk)
            values_at = out + tl.where(mode == SPARSE, 2 * n_changed, (n + 7) // 8)
            modes = tl.zeros((BLOCK,), tl.int32) + mode
            done = tl.full((), 0, tl.int32)
            for part in range(0, count, BLOCK):
                group, _, listed, _ = load_records(
                    records + room_at, all_marks + room_at, part + tl.arange(0, BLOCK), count
                )
                counts = count_bits(listed)
                before = done + tl.cumsum(counts, 0) - counts
                marks = listed
                while tl.max(marks, 0) > 0:
                    is_on = marks != 0
                    within, below = lowest(marks)
                    rank = before + count_bits(listed & below)
                    place = group * GROUP + within
                    values = tl.load(new_at + place, mask=is_on, other=0).to(tl.uint32)
                    _store_bytes(values_at + rank * N_BYTES, values, N_BYTES, is_on)
                    is_sparse = is_on & (modes == SPARSE)
                    _store_bytes(out + rank * 2, place.to(tl.uint32), 2, is_sparse)
                    bit = tl.full((), 1, tl.uint32) << (place & 31).to(tl.uint32)
                    tl.atomic_or(
                        words + (place >> 5), bit.to(tl.int32, bitcast=True),
                        mask=is_on & (modes == BITMAP), sem="relaxed",
                    )  # fmt: skip
                    marks &= marks - 1
                done += tl.sum(counts, 0)


def _too_crowded(work: Work, number: int) -> Streams:
    """With room for every element, nothing is crowded."""
    del work
    raise StopError(f"piece {number} changes more elements than it has")
