"""Digests of live memory, and how an update moves them, without leaving the device.

The sum is that of ``weightwire.kernels.mixing``. Since it is one modulo 2^64, programs may add to
it in any order and the result is the same. A thread takes places of a block that lie together:
it adds their products first, and multiplies by the block's number once for all of them.

Results stay on the device as int64: the two's complement of the unsigned lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.errors import StopError, UnsupportedDType
from weightwire.kernels import mixing
from weightwire.kernels.triton.launch import TRITON_BITS, kept_on, memory_at, to_device
from weightwire.kernels.triton.memories import VECTOR_BYTES, addresses_of, check_flat, sizes_of
from weightwire.kernels.triton.scatter import (
    Scatter,
    launch_part,
    load_span,
    own_span,
    tabulate_writes,
)
from weightwire.kernels.triton.uploads import send_tables

LOG2_BLOCK = tl.constexpr(8)
BLOCK = tl.constexpr(256)
"""Places in a block."""

N_BLOCKS = 128
"""Blocks a program takes: enough that its keys, loaded once, cost nothing beside the elements."""

STEP = 8
"""Blocks a program takes at a time: sixteen elements in each thread's registers."""


def digest_all(memories: Sequence[torch.Tensor], first_indices: Sequence[int]) -> torch.Tensor:
    """Both lanes of each memory's digest: int64 [n_memories, 2], not waited for.

    One launch for all memory of one element width and alignment: for nearly all of a model.

    Raises:
        UnsupportedDType: elements of a width that no kernel here serves.
        StopError: memory on several devices, or with gaps, or not one first index for each.
    """
    _check_counts(len(memories), first_indices)
    device = memories[0].device if memories else torch.device("cpu")
    lanes = torch.zeros((len(memories), 2), dtype=torch.int64, device=device)
    if memories:
        found = _look_at(memories, first_indices)
        for kind in sorted(
            set(zip(found.n_bytes.tolist(), found.alignments.tolist(), strict=True))
        ):
            _digest_alike(found, kind, lanes)
    return lanes


def digest_at_all(
    elements: Sequence[tuple[torch.Tensor, torch.Tensor]], first_indices: Sequence[int]
) -> torch.Tensor:
    """The same sums over single elements, each given as positions and bits: int64 [n, 2].

    Raises:
        UnsupportedDType, StopError: as ``tabulate_writes``, or not one first index for each.
    """
    # There is no memory to read: the bits stand in for it, and are not looked at as such.
    written = tabulate_writes([(bits, positions, bits) for positions, bits in elements])
    return _digest_writes(written, first_indices, moved=False)


def digest_moved_all(scatter: Scatter, first_indices: Sequence[int]) -> torch.Tensor:
    """What each write adds to its memory's digest, told before it is written: int64 [n, 2].

    That is the digest of the bits it brings less that of the bits now at its positions; zero once
    it is written. A position past the end counts as one that holds zero.

    Raises:
        StopError: not one first index for each write.
    """
    return _digest_writes(scatter, first_indices, moved=True)


def digest_at(positions: torch.Tensor, bits: torch.Tensor, first_index: int = 0) -> torch.Tensor:
    """``digest_at_all`` of one: int64 [2]."""
    return digest_at_all([(positions, bits)], [first_index])[0]


def digest_moved(
    memory: torch.Tensor, positions: torch.Tensor, new_bits: torch.Tensor, first_index: int = 0
) -> torch.Tensor:
    """``digest_moved_all`` of one write: int64 [2]."""
    return digest_moved_all(tabulate_writes([(memory, positions, new_bits)]), [first_index])[0]


def lanes_of(digests: torch.Tensor) -> list[tuple[int, int]]:
    """Digests [n, 2] as the unsigned lanes that ``Kernels.digest`` gives; waits for them."""
    rows: list[list[int]] = digests.tolist()
    return [(low % (1 << 64), high % (1 << 64)) for low, high in rows]


def _check_counts(n: int, first_indices: Sequence[int]) -> None:
    if len(first_indices) != n:
        raise StopError(f"{len(first_indices)} first indices for {n} digests")


@cache
def _keys_on(device: torch.device) -> torch.Tensor:
    return kept_on(device, mixing.place_keys().view(np.int32))


# ------------------------------------------------------------------------------------ whole memory


@dataclass(frozen=True)
class _Found:
    """Memories, looked at once: one entry each."""

    sizes: npt.NDArray[np.int64]
    n_bytes: npt.NDArray[np.int64]
    """Of an element."""
    firsts: npt.NDArray[np.int64]
    block_addresses: npt.NDArray[np.int64]
    """Where the block of the first element would start, were all of it in memory."""
    alignments: npt.NDArray[np.int64]
    """Bytes that a thread may load at once: a power of two."""


def _look_at(memories: Sequence[torch.Tensor], first_indices: Sequence[int]) -> _Found:
    n_bytes = np.array([*map(torch.Tensor.element_size, memories)], dtype=np.int64)
    for odd in np.flatnonzero(~np.isin(n_bytes, list(TRITON_BITS))):
        raise UnsupportedDType(f"no digest of {memories[odd].dtype} elements here")
    check_flat(memories)
    addresses = addresses_of(memories)
    if (addresses % n_bytes).any():
        raise StopError("digests need elements that start on borders of their own size")
    firsts = np.array(first_indices, dtype=np.int64)
    blocks = addresses - firsts % BLOCK.value * n_bytes
    alignments = np.gcd(blocks, VECTOR_BYTES)
    return _Found(sizes_of(memories), n_bytes, firsts, blocks, alignments)


def _digest_alike(found: _Found, kind: tuple[int, int], lanes: torch.Tensor) -> None:
    """Add the digests of all memories of one element width and alignment, with one launch."""
    n_bytes, alignment = kind
    numbers = np.flatnonzero((found.n_bytes == n_bytes) & (found.alignments == alignment))
    runs = _tabulate(found, numbers, lanes.device)
    n_programs = len(runs.span_run)
    if not n_programs:
        return
    with torch.cuda.device_of(lanes):
        _digest_kernel[(n_programs,)](
            runs.table,
            runs.span_run,
            _keys_on(lanes.device),
            lanes,
            KIND=TRITON_BITS[n_bytes],
            VECTOR=alignment // n_bytes,
            ALIGNMENT=alignment,
            N_BLOCKS=N_BLOCKS,
            STEP=STEP,
        )


@dataclass(frozen=True)
class _Runs:
    """Runs of elements, and their spans of whole blocks."""

    table: torch.Tensor
    """int64 [n, 6]: address of the first block, first and end place, block number, digest, first span.

    Places count from the start of a run's first block, which may lie before its memory.
    """
    span_run: torch.Tensor
    """int32, one per span."""


def _tabulate(found: _Found, numbers: npt.NDArray[np.intp], device: torch.device) -> _Runs:
    firsts, sizes = found.firsts[numbers], found.sizes[numbers]
    leads = firsts % BLOCK.value
    n_spans = np.where(sizes > 0, -(-(leads + sizes) // (N_BLOCKS * BLOCK.value)), 0)
    table = np.stack(
        [
            found.block_addresses[numbers], leads, leads + sizes, firsts // BLOCK.value, numbers,
            np.cumsum(n_spans) - n_spans,
        ],
        axis=1,
    )  # fmt: skip
    span_run = np.repeat(np.arange(len(numbers), dtype=np.int32), n_spans)
    return _Runs(*send_tables([table.reshape(-1), span_run], device))


@triton.jit
def _digest_kernel(
    runs,
    span_run,
    keys,
    lanes,
    KIND: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    N_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Adds the sum over one span, of whole blocks, to its run's digest.

    Only at a run's ends is a block not wholly in memory: all other spans are read without masks,
    which is what lets a thread load a whole vector.
    """
    run = runs + 6 * tl.load(span_run + tl.program_id(0)).to(tl.int64)
    number = tl.program_id(0) - tl.load(run + 5)
    start = number * (N_BLOCKS * BLOCK)
    span = tl.load(run).to(tl.pointer_type(KIND)) + start
    # Said of the sum, since the compiler does not follow alignment through a cast of an address.
    span = tl.multiple_of(span, ALIGNMENT)
    low, high = tl.load(run + 1) - start, tl.load(run + 2) - start
    first_block = (tl.load(run + 3) + number * N_BLOCKS).to(tl.uint32)
    ALL_STEPS: tl.constexpr = N_BLOCKS // STEP
    n_steps = tl.cdiv(tl.minimum(high, N_BLOCKS * BLOCK), STEP * BLOCK).to(tl.int32)
    if (low <= 0) & (high >= N_BLOCKS * BLOCK):
        lane0, lane1 = span_sums(span, ALL_STEPS, first_block, low, high, keys, VECTOR, False, STEP)
    else:
        lane0, lane1 = span_sums(span, n_steps, first_block, low, high, keys, VECTOR, True, STEP)
    digest = lanes + 2 * tl.load(run + 4)
    tl.atomic_add(digest, lane0.to(tl.int64, bitcast=True))
    tl.atomic_add(digest + 1, lane1.to(tl.int64, bitcast=True))


@triton.jit
def span_sums(
    span,
    n_steps,
    first_block,
    low,
    high,
    keys,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Both lanes over places ``low`` to ``high`` of a span.

    A block is read as two halves of whole vectors, so that a thread has two vectors of the same
    block for each multiplication by that block's number.
    """
    HALF: tl.constexpr = BLOCK // 2
    N_VECTORS: tl.constexpr = HALF // VECTOR
    blocks = tl.arange(0, STEP)
    vectors = tl.arange(0, N_VECTORS) * VECTOR
    places = vectors[None, :, None] + tl.arange(0, VECTOR)[None, None, :]
    offsets = blocks[:, None, None] * BLOCK + places
    left0, left1, left2 = load_keys(keys, places)
    right0, right1, right2 = load_keys(keys, places + HALF)
    sum0 = tl.zeros((STEP, N_VECTORS), tl.uint64)
    sum1 = tl.zeros((STEP, N_VECTORS), tl.uint64)
    for step in range(n_steps):
        at = offsets + step * (STEP * BLOCK)
        a0, a1 = vector_sums(span, at, low, high, left0, left1, left2, MASKED)
        b0, b1 = vector_sums(span, at + HALF, low, high, right0, right1, right2, MASKED)
        numbers = first_block + (step * STEP + blocks).to(tl.uint32)
        sum0 += (a0 + b0) * block_multiplier(numbers, 0)[:, None]
        sum1 += (a1 + b1) * block_multiplier(numbers, 1)[:, None]
    return tl.sum(tl.sum(sum0, axis=1), axis=0), tl.sum(tl.sum(sum1, axis=1), axis=0)


@triton.jit
def load_keys(keys, places):
    """The three keys of each place."""
    words = keys.to(tl.pointer_type(tl.uint32)) + places
    return tl.load(words), tl.load(words + BLOCK), tl.load(words + 2 * BLOCK)


@triton.jit
def vector_sums(span, at, low, high, key0, key1, key2, MASKED: tl.constexpr):
    """Both lanes over the last axis, for places ``at`` of a span; no block counts here yet."""
    if MASKED:
        inside = (at >= low) & (at < high)
        lane0, lane1 = products(tl.load(span + at, mask=inside, other=0), key0, key1, key2)
        nothing = tl.zeros_like(lane0)
        lane0 = tl.where(inside, lane0, nothing)
        lane1 = tl.where(inside, lane1, nothing)
    else:
        lane0, lane1 = products(tl.load(span + at), key0, key1, key2)
    return tl.sum(lane0, axis=2), tl.sum(lane1, axis=2)


@triton.jit
def products(bits, key0, key1, key2):
    """What elements add to the two sums of their blocks."""
    limbs = bits.to(tl.uint32)
    keyed = (limbs + key0).to(tl.uint64)
    return keyed * (limbs + key1).to(tl.uint64), keyed * (limbs + key2).to(tl.uint64)


@triton.jit
def block_multiplier(blocks, LANE: tl.constexpr):
    """The odd number by which the sums of blocks count in a lane."""
    high = block_word(blocks, 2 * LANE).to(tl.uint64)
    low = block_word(blocks, 2 * LANE + 1).to(tl.uint64)
    one = tl.full((), 1, tl.uint64)
    return (high << tl.full((), 32, tl.uint64)) | low | one


@triton.jit
def block_word(blocks, ROW: tl.constexpr):
    """One of the four words from which a block's numbers are made."""
    OFFSET: tl.constexpr = (ROW * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF
    factor = tl.full((), 0x85EBCA6B, tl.uint32)
    return mix32(blocks * factor + tl.full((), OFFSET, tl.uint32))


@triton.jit
def mix32(value):
    """``mixing``'s bijection of unsigned 32-bit words."""
    sixteen = tl.full((), 16, tl.uint32)
    value = (value ^ (value >> sixteen)) * tl.full((), 0x7FEB352D, tl.uint32)
    value = (value ^ (value >> tl.full((), 15, tl.uint32))) * tl.full((), 0x846CA68B, tl.uint32)
    return value ^ (value >> sixteen)


# --------------------------------------------------------------------------------- single elements


def _digest_writes(scatter: Scatter, first_indices: Sequence[int], moved: bool) -> torch.Tensor:
    _check_counts(scatter.n_writes, first_indices)
    lanes = torch.zeros((scatter.n_writes, 2), dtype=torch.int64, device=scatter.device)
    firsts = to_device(np.array(first_indices, dtype=np.int64), scatter.device)
    keys = _keys_on(scatter.device)
    for part in scatter.parts:
        tables = (part.bucket.addresses, part.memory_addresses, part.memory_sizes, part.rows)
        kind = TRITON_BITS[part.n_bytes]
        launch_part(_elements_kernel, part, *tables, firsts, keys, lanes, BITS=kind, MOVED=moved)
    return lanes


@triton.jit
def _elements_kernel(
    position_addresses,
    sizes,
    span_memory,
    span_number,
    bit_addresses,
    memory_addresses,
    memory_sizes,
    rows,
    firsts,
    keys,
    lanes,
    POSITIONS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    MOVED: tl.constexpr,
) -> None:
    """Adds a span's new elements to its write's digest; with MOVED, takes the old ones away."""
    owner, start, inside = own_span(sizes, span_memory, span_number, SPAN)
    positions = load_span(position_addresses, owner, start, inside, POSITIONS, SPAN).to(tl.int64)
    bits = load_span(bit_addresses, owner, start, inside, BITS, SPAN)
    row = tl.load(rows + owner)
    indices = tl.load(firsts + row) + positions
    key0, key1, key2 = load_keys(keys, (indices & (BLOCK - 1)).to(tl.int32))
    lane0, lane1 = products(bits, key0, key1, key2)
    if MOVED:
        held = (positions >= 0) & (positions < tl.load(memory_sizes + owner)) & inside
        memory = memory_at(memory_addresses, owner, BITS)
        old0, old1 = products(tl.load(memory + positions, mask=held, other=0), key0, key1, key2)
        lane0, lane1 = lane0 - old0, lane1 - old1
    blocks = (indices >> LOG2_BLOCK).to(tl.uint32)
    nothing = tl.zeros_like(lane0)
    lane0 = tl.where(inside, lane0 * block_multiplier(blocks, 0), nothing)
    lane1 = tl.where(inside, lane1 * block_multiplier(blocks, 1), nothing)
    digest = lanes + 2 * row
    tl.atomic_add(digest, tl.sum(lane0, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_add(digest + 1, tl.sum(lane1, axis=0).to(tl.int64, bitcast=True))
