"""The plain encoder on a GPU: what it writes decodes without the old bits.

The pass over both states is the compact encoder's, with all elements alike. A chunk then says its
changes as places and bits, as a bitmap and bits, or as all its bits, whichever is shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.errors import StopError
from weightwire.kernels.contract import N_CLASSES, ONE_STEP, PLAIN_CHUNK, ClassModel
from weightwire.kernels.reference import PLAIN_BITMAP, PLAIN_DENSE, PLAIN_SPARSE
from weightwire.kernels.triton.arrange import Chunks
from weightwire.kernels.triton.assemble import pairs_of
from weightwire.kernels.triton.collect import PLACE_MASK, TILE, Tiles
from weightwire.kernels.triton.launch import TRITON_BITS, memory_at
from weightwire.kernels.triton.models import arrays_of
from weightwire.kernels.triton.slabs import Coded, Slab, Work, in_slabs, split
from weightwire.kernels.triton.staging import to_host
from weightwire.model import DType

_ALL_ALIKE = ClassModel(0, (0,) * N_CLASSES, (False,) * N_CLASSES, (ONE_STEP,) * N_CLASSES)
_LANES = 256
SPARSE, BITMAP = tl.constexpr(PLAIN_SPARSE), tl.constexpr(PLAIN_BITMAP)


def encode_plain_all(
    olds: Sequence[torch.Tensor],
    news: Sequence[torch.Tensor],
    dtype: DType,
    rates: npt.NDArray[np.float64],
    *,
    budget_bytes: int,
    keep_changes: bool = False,
) -> list[Coded]:
    """Code every piece as the reference does.

    Args:
        rates: how much of each piece is likely to have changed.
        budget_bytes: what may be allocated meanwhile.
    """
    alike = replace(dtype, key_shift=0, key_mask=0)
    chunk_log2s = np.full(len(olds), PLAIN_CHUNK.bit_length() - 1, dtype=np.int64)
    models = arrays_of([_ALL_ALIKE] * len(olds))
    work = Work(olds, news, alike, models, chunk_log2s, rates)
    return in_slabs(work, budget_bytes, lambda slab: _encode(slab, keep_changes), _too_crowded)


def _encode(slab: Slab, keep_changes: bool) -> dict[int, Coded]:
    if not slab.n_tiles:
        return slab.nothing(1, keep_changes)
    tiles, chunks, crowded = slab.collect()
    heads, sizes = _rows(chunks, slab.work.dtype.n_bytes)
    host = to_host(torch.stack([heads, sizes, chunks.n_listed]))
    payload = _write(slab, tiles, chunks, heads, sizes, int(host[1].sum()))
    kept = None
    if keep_changes:
        kept = pairs_of(
            tiles, chunks, chunks.n_listed, slab.old, slab.new, slab.first_tile,
            int(host[2].sum()), slab.work.dtype,
        )  # fmt: skip
    directory = host[0].view(np.uint32).reshape(-1, 1)
    words = to_host(payload)
    return split(slab.chunk_counts, directory, host[1], host[2], words, kept, crowded)


def _rows(chunks: Chunks, n_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads, and sizes in words: of the ways to say it the shortest, the first of them if alike."""
    n, n_changed = chunks.n_elements.long(), chunks.n_listed.long()
    ways = torch.stack([n_changed * (2 + n_bytes), (n + 7) // 8 + n_changed * n_bytes, n * n_bytes])
    words = (ways + 3) // 4
    best = words.min(dim=0)
    modes = torch.where(words == best.values, torch.arange(3, device=n.device)[:, None], 3).amin(0)
    is_empty = n_changed == 0
    heads = (n_changed | modes << 24).masked_fill(is_empty, 0)
    return heads.int(), best.values.masked_fill(is_empty, 0).int()


def _write(
    slab: Slab, tiles: Tiles, chunks: Chunks, heads: torch.Tensor, sizes: torch.Tensor, n_words: int
) -> torch.Tensor:
    payload = torch.zeros(n_words, dtype=torch.int32, device=heads.device)
    wide = sizes.long()
    block = triton.next_power_of_2(tiles.room)
    n_bytes = slab.work.dtype.n_bytes
    if n_words:
        _write_kernel[(len(chunks),)](
            tiles.places, tiles.n_listed, tiles.room, heads, sizes, wide.cumsum(0) - wide,
            chunks.piece, chunks.first_tile, chunks.n_tiles, chunks.n_elements,
            slab.new.addresses, slab.first_tile, payload,
            KIND=TRITON_BITS[n_bytes], N_BYTES=n_bytes, DENSE=PLAIN_DENSE, BLOCK=block,
            LANES=max(_LANES, block), num_warps=1,
        )  # fmt: skip
    return payload


@triton.jit
def _store_bytes(at, values, N_BYTES: tl.constexpr, mask):
    """Values at any byte: they need not begin where a word does."""
    for part in tl.static_range(N_BYTES):
        tl.store(at + part, (values >> (8 * part)).to(tl.uint8), mask=mask)


@triton.jit
def _write_kernel(
    places, tile_listed, room, heads, sizes, first_word,
    chunk_piece, chunk_first_tile, chunk_tiles, chunk_elements,
    news, first_tile, payload,
    KIND: tl.constexpr, N_BYTES: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One chunk, a few tiles at a time; the payload is zero beforehand."""
    chunk = tl.program_id(0)
    head = tl.load(heads + chunk)
    size = tl.load(sizes + chunk)
    words = payload + tl.load(first_word + chunk)
    out = words.to(tl.pointer_type(tl.uint8))
    piece = tl.load(chunk_piece + chunk)
    first = tl.load(chunk_first_tile + chunk)
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    new_at = memory_at(news, piece, KIND) + (first - tl.load(first_tile + piece)) * TILE
    mode = head >> 24
    n_changed = head & 0xFFFFFF
    lane = tl.arange(0, LANES)
    if (size > 0) & (mode == DENSE):
        for begin in range(0, n, LANES):
            mask = begin + lane < n
            values = tl.load(new_at + begin + lane, mask=mask, other=0).to(tl.uint32)
            _store_bytes(out + (begin + lane) * N_BYTES, values, N_BYTES, mask)
    elif size > 0:
        values_at = out + tl.where(mode == SPARSE, 2 * n_changed, (n + 7) // 8)
        count = tl.load(chunk_tiles + chunk)
        within, rank_in_tile = lane // BLOCK, lane % BLOCK
        done = tl.full((), 0, tl.int32)
        for begin in range(0, count, LANES // BLOCK):
            number = begin + within
            n_here = tl.load(tile_listed + first + number, mask=number < count, other=0)
            is_on = rank_in_tile < n_here
            at = 2 * ((first + number) * room + rank_in_tile)
            packed = tl.load(places + at, mask=is_on, other=0).to(tl.int32)
            place = number * TILE + (packed & PLACE_MASK)
            ranks = tl.cumsum(is_on.to(tl.int32), 0)
            rank = done + ranks - 1
            values = tl.load(new_at + place, mask=is_on, other=0).to(tl.uint32)
            _store_bytes(values_at + rank * N_BYTES, values, N_BYTES, is_on)
            modes = tl.zeros((LANES,), tl.int32) + mode
            is_sparse = is_on & (modes == SPARSE)
            _store_bytes(out + rank * 2, place.to(tl.uint32), 2, is_sparse)
            bit = (tl.full((), 1, tl.uint32) << (place & 31).to(tl.uint32)).to(
                tl.int32, bitcast=True
            )
            is_bit = is_on & (modes == BITMAP)
            tl.atomic_or(words + (place >> 5), bit, mask=is_bit, sem="relaxed")
            done += tl.max(ranks, 0)


def _too_crowded(number: int) -> Coded:
    """With room for every element of every tile, nothing is crowded."""
    raise StopError(f"piece {number} changes more elements than it has")
