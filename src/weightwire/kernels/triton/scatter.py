"""Writing a staged update into live weights: the pause an engine feels, so it only launches.

Everything that allocates, checks or waits happens in ``prepare_scatter``. ``write`` then launches
one kernel for each width of elements and positions: it allocates nothing, waits for nothing, may
be captured in a CUDA graph, and may be repeated, since it does not depend on what was there.

Positions are ``torch.int32`` read as unsigned, or ``torch.int64``. They are distinct within a
write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from weightwire.errors import StopError, UnsupportedDType
from weightwire.kernels.triton.launch import TRITON_BITS, Bucket, make_bucket, memory_at
from weightwire.kernels.triton.memories import addresses_of, check_flat, sizes_of
from weightwire.kernels.triton.uploads import send_tables

SPAN = 2048
"""Positions a program takes: sixteen stores in flight in each of its threads."""

POSITION_KINDS = {torch.int32: tl.uint32, torch.int64: tl.uint64}
"""As unsigned, a negative position lies past every end: one comparison finds both mistakes."""

Write = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Memory, positions in it, and the bits to be there."""


@dataclass(frozen=True)
class ScatterPart:
    """What one launch writes: elements of one width, at positions of one width."""

    bucket: Bucket
    """The bits to write; its spans are the programs."""
    memories: tuple[torch.Tensor, ...]
    """Held, as the positions are, so that no address outlives its memory."""
    positions: tuple[torch.Tensor, ...]
    memory_addresses: torch.Tensor
    memory_sizes: torch.Tensor
    """int64, in elements."""
    position_addresses: torch.Tensor
    numbers: tuple[int, ...]
    """Where each write stood among those given."""
    rows: torch.Tensor
    """The same, int64, for kernels."""
    starts: torch.Tensor
    """int64: how many elements the writes before each one have."""

    @property
    def n_bytes(self) -> int:
        """Of one element."""
        n_bytes: int = self.bucket.memories[0].element_size()
        return n_bytes

    @property
    def n_elements(self) -> int:
        """Of all writes together."""
        return sum(len(bits) for bits in self.bucket.memories)


@dataclass(frozen=True)
class Scatter:
    """Writes that are ready: hold it for as long as a launch of it may run."""

    parts: tuple[ScatterPart, ...]
    n_writes: int
    device: torch.device


def prepare_scatter(writes: Sequence[Write]) -> Scatter:
    """Check the writes, and bring all that ``write`` needs to the device; waits for it once.

    Raises:
        UnsupportedDType: elements or positions of a type that no kernel here serves.
        StopError: a position past its memory's end, lengths or widths that differ, memory with
            gaps, or several devices.
    """
    scatter = tabulate_writes(writes)
    _check_bounds(scatter)
    _rehearse(scatter)
    return scatter


def write(scatter: Scatter) -> None:
    """Write all bits; safe to repeat."""
    for part in scatter.parts:
        _launch_write(part)


def matches(scatter: Scatter) -> torch.Tensor:
    """int32 on the device, one per write: how many elements differ from what it writes."""
    counts = torch.zeros(scatter.n_writes, dtype=torch.int32, device=scatter.device)
    for part in scatter.parts:
        wanted, bits = part.bucket.addresses, TRITON_BITS[part.n_bytes]
        tables = (wanted, part.memory_addresses, part.rows, counts)
        launch_part(_mismatch_kernel, part, *tables, BITS=bits)
    return counts


def read(scatter: Scatter) -> list[torch.Tensor]:
    """The bits now there, for each write: what would undo it."""
    found: dict[int, torch.Tensor] = {}
    for part in scatter.parts:
        bits = part.bucket.memories
        flat = torch.empty(part.n_elements, dtype=bits[0].dtype, device=scatter.device)
        tables = (part.memory_addresses, part.starts, flat)
        launch_part(_read_kernel, part, *tables, BITS=TRITON_BITS[part.n_bytes])
        found.update(zip(part.numbers, flat.split([len(each) for each in bits]), strict=True))
    return [found[number] for number in range(scatter.n_writes)]


def tabulate_writes(writes: Sequence[Write]) -> Scatter:
    """Describe writes to kernels without waiting for the device: positions are not looked at.

    Raises:
        UnsupportedDType, StopError: as ``prepare_scatter``, but for positions past the end.
    """
    check_flat([tensor for each in writes for tensor in each])
    groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for number, (memory, positions, bits) in enumerate(writes):
        _check_fit(number, memory, positions, bits)
        groups.setdefault((bits.dtype, positions.dtype), []).append(number)
    parts = tuple(_tabulate(writes, numbers) for numbers in groups.values())
    device = writes[0][0].device if writes else torch.device("cpu")
    return Scatter(parts, len(writes), device)


def _tabulate(writes: Sequence[Write], numbers: list[int]) -> ScatterPart:
    memories, positions, bits = zip(*(writes[number] for number in numbers), strict=True)
    lengths = sizes_of(bits)
    tables = [
        addresses_of(memories), sizes_of(memories), addresses_of(positions),
        np.array(numbers, dtype=np.int64), np.cumsum(lengths) - lengths,
    ]  # fmt: skip
    at, sizes, positions_at, rows, starts = send_tables(tables, bits[0].device)
    return ScatterPart(
        bucket=make_bucket(bits, SPAN),
        memories=memories,
        positions=positions,
        memory_addresses=at,
        memory_sizes=sizes,
        position_addresses=positions_at,
        numbers=tuple(numbers),
        rows=rows,
        starts=starts,
    )


def _check_fit(
    number: int, memory: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor
) -> None:
    if positions.dtype not in POSITION_KINDS or bits.element_size() not in TRITON_BITS:
        raise UnsupportedDType(f"write {number}: {positions.dtype} positions of {bits.dtype} bits")
    if memory.element_size() != bits.element_size() or len(positions) != len(bits):
        raise StopError(f"write {number}: memory, positions and bits do not fit together")


def _check_bounds(scatter: Scatter) -> None:
    """One look at all positions, and one wait for its result."""
    worst = torch.zeros(scatter.n_writes, dtype=torch.int32, device=scatter.device)
    for part in scatter.parts:
        launch_part(_outside_kernel, part, part.memory_sizes, part.rows, worst)
    outside = [number for number, n in enumerate(worst.tolist()) if n]
    if outside:
        raise StopError(f"write {outside[0]}: a position lies past the end of its memory")


def _rehearse(scatter: Scatter) -> None:
    """Write nothing, so that compiling and loading the kernel falls outside the pause."""
    for part in scatter.parts:
        bucket = replace(
            part.bucket,
            sizes=torch.zeros_like(part.bucket.sizes),
            span_memory=part.bucket.span_memory[:1],
            span_number=part.bucket.span_number[:1],
        )
        _launch_write(replace(part, bucket=bucket))


def _launch_write(part: ScatterPart) -> None:
    bits = TRITON_BITS[part.n_bytes]
    launch_part(_write_kernel, part, part.bucket.addresses, part.memory_addresses, BITS=bits)


def launch_part(kernel: Any, part: ScatterPart, *tables: torch.Tensor, **constants: Any) -> None:
    """Launch a kernel over a part's spans: the tables that find a span come before its own."""
    if not part.bucket.n_spans:
        return
    with torch.cuda.device_of(part.rows):
        kernel[(part.bucket.n_spans,)](
            part.position_addresses,
            part.bucket.sizes,
            part.bucket.span_memory,
            part.bucket.span_number,
            *tables,
            POSITIONS=POSITION_KINDS[part.positions[0].dtype],
            SPAN=SPAN,
            **constants,
        )


@triton.jit
def own_span(sizes, span_memory, span_number, SPAN: tl.constexpr):
    """This program's write, where its span starts there, and which of its lanes are inside."""
    owner = tl.load(span_memory + tl.program_id(0))
    start = tl.load(span_number + tl.program_id(0)).to(tl.int64) * SPAN
    n_left = tl.minimum(tl.load(sizes + owner) - start, SPAN).to(tl.int32)
    return owner, start, tl.arange(0, SPAN) < n_left


@triton.jit
def load_span(addresses, owner, start, inside, KIND: tl.constexpr, SPAN: tl.constexpr):
    """A span's part of one of the tables' memories; zero in lanes outside."""
    pointers = memory_at(addresses, owner, KIND) + start + tl.arange(0, SPAN)
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def _write_kernel(
    position_addresses,
    sizes,
    span_memory,
    span_number,
    bit_addresses,
    memory_addresses,
    POSITIONS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Every position of the span is inside its memory, and no other program writes there."""
    owner, start, inside = own_span(sizes, span_memory, span_number, SPAN)
    positions = load_span(position_addresses, owner, start, inside, POSITIONS, SPAN)
    bits = load_span(bit_addresses, owner, start, inside, BITS, SPAN)
    # A 32-bit offset would be taken as signed.
    memory = memory_at(memory_addresses, owner, BITS)
    tl.store(memory + positions.to(tl.int64), bits, mask=inside)


@triton.jit
def _mismatch_kernel(
    position_addresses,
    sizes,
    span_memory,
    span_number,
    bit_addresses,
    memory_addresses,
    rows,
    counts,
    POSITIONS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Adds to a write's count the elements of the span whose memory holds other bits."""
    owner, start, inside = own_span(sizes, span_memory, span_number, SPAN)
    positions = load_span(position_addresses, owner, start, inside, POSITIONS, SPAN)
    wanted = load_span(bit_addresses, owner, start, inside, BITS, SPAN)
    memory = memory_at(memory_addresses, owner, BITS)
    found = tl.load(memory + positions.to(tl.int64), mask=inside, other=0)
    differ = (found != wanted).to(tl.int32)
    tl.atomic_add(counts + tl.load(rows + owner), tl.sum(differ, axis=0))


@triton.jit
def _read_kernel(
    position_addresses,
    sizes,
    span_memory,
    span_number,
    memory_addresses,
    starts,
    found,
    POSITIONS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """The writes' elements stand end to end in ``found``, in the order of their tables."""
    owner, start, inside = own_span(sizes, span_memory, span_number, SPAN)
    positions = load_span(position_addresses, owner, start, inside, POSITIONS, SPAN)
    memory = memory_at(memory_addresses, owner, BITS)
    bits = tl.load(memory + positions.to(tl.int64), mask=inside, other=0)
    first = tl.load(starts + owner) + start
    pointers = found.to(tl.pointer_type(BITS)) + first + tl.arange(0, SPAN)
    tl.store(pointers, bits, mask=inside)


@triton.jit
def _outside_kernel(
    position_addresses,
    sizes,
    span_memory,
    span_number,
    memory_sizes,
    rows,
    worst,
    POSITIONS: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """``worst`` is zero exactly if no position lies outside; a maximum, unlike a sum, cannot wrap."""
    owner, start, inside = own_span(sizes, span_memory, span_number, SPAN)
    positions = load_span(position_addresses, owner, start, inside, POSITIONS, SPAN)
    end = tl.load(memory_sizes + owner).to(tl.uint64)
    outside = inside & (positions.to(tl.uint64) >= end)
    tl.atomic_max(worst + tl.load(rows + owner), tl.sum(outside.to(tl.int32), axis=0))
