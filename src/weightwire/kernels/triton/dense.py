"""Chunks that say all their new bits: what differs is found by looking."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, memory_at
from weightwire.kernels.triton.weight_index import CodedChunks
from weightwire.model import DType

TILE = tl.constexpr(1024)
"""Elements that are looked at together."""


def count_dense(
    old: Bucket, chunks: CodedChunks, payload: torch.Tensor, dtype: DType
) -> torch.Tensor:
    """How many elements each dense chunk changes."""
    counts = torch.empty(len(chunks), dtype=torch.int32, device=payload.device)
    nowhere = torch.zeros(len(chunks), dtype=torch.int64, device=payload.device)
    _launch(old, chunks, payload, dtype, (nowhere, counts, payload, counts), is_stored=False)
    return counts


def list_dense(
    old: Bucket,
    chunks: CodedChunks,
    payload: torch.Tensor,
    dtype: DType,
    first_out: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    """Write down every dense chunk's changes."""
    counts = torch.empty(len(chunks), dtype=torch.int32, device=payload.device)
    _launch(old, chunks, payload, dtype, (first_out, positions, bits, counts), is_stored=True)


def _launch(
    old: Bucket,
    chunks: CodedChunks,
    payload: torch.Tensor,
    dtype: DType,
    out: tuple[torch.Tensor, ...],
    *,
    is_stored: bool,
) -> None:
    _list_dense_kernel[(len(chunks),)](
        old.addresses, chunks.piece, chunks.start, chunks.n_elements, chunks.first_word, payload,
        *out, KIND=TRITON_BITS[dtype.n_bytes], PER_WORD=4 // dtype.n_bytes, IS_STORED=is_stored,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _list_dense_kernel(
    olds, chunk_piece, chunk_start, chunk_elements, first_word,
    payload, first_out, positions, bits, counts,
    KIND: tl.constexpr, PER_WORD: tl.constexpr, IS_STORED: tl.constexpr,
):  # fmt: skip
    """One chunk, tile by tile."""
    chunk = tl.program_id(0)
    start = tl.load(chunk_start + chunk)
    old = memory_at(olds, tl.load(chunk_piece + chunk), KIND) + start
    n = tl.load(chunk_elements + chunk).to(tl.int32)
    new = payload.to(tl.pointer_type(KIND)) + tl.load(first_word + chunk) * PER_WORD
    out = tl.load(first_out + chunk)
    place = tl.arange(0, TILE)
    count = tl.full((), 0, tl.int32)
    for begin in range(0, n, TILE):
        is_there = begin + place < n
        now = tl.load(new + begin + place, mask=is_there, other=0)
        changed = now != tl.load(old + begin + place, mask=is_there, other=0)
        ranks = tl.cumsum(changed.to(tl.int32), 0)
        if IS_STORED:
            to = out + count + ranks - 1
            tl.store(positions + to, (start + begin + place).to(tl.int32), mask=changed)
            tl.store(bits + to, now.to(bits.dtype.element_ty, bitcast=True), mask=changed)
        count += tl.max(ranks, 0)
    tl.store(counts + chunk, count)
