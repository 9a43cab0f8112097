"""What the measured work is held against: copies, the least a comparison can do, and torch's way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""For each piece, positions (int32) and new bits."""

COUNT_BLOCK = 8192
SLICE = 1 << 28
"""Elements torch compares at once: what it adds in memory grows with it."""


@triton.jit
def _count_kernel(old, new, counts, n_elements, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """Each program counts the differences in its own block, and writes one number."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    before = tl.load(old + offsets, mask=inside, other=0)
    after = tl.load(new + offsets, mask=inside, other=0)
    tl.store(counts + program, tl.sum((before != after).to(tl.int32), 0))


def count_changes(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How many elements differ, as a number on the device."""
    n_blocks = triton.cdiv(len(old), COUNT_BLOCK)
    counts = torch.empty(n_blocks, dtype=torch.int32, device=old.device)
    _count_kernel[(n_blocks,)](old, new, counts, len(old), BLOCK=COUNT_BLOCK, num_warps=8)
    return counts.sum(dtype=torch.int64)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """All of it, once read and once written."""
    target.copy_(source)


def torch_pairs(olds: list[torch.Tensor], news: list[torch.Tensor]) -> Pairs:
    """Torch's way to the changes: compare, list positions, gather; one wait per piece."""
    return [_pairs(old, new) for old, new in zip(olds, news, strict=True)]


def torch_pairs_flat(old: torch.Tensor, new: torch.Tensor) -> Pairs:
    """The same in the largest slices that are reasonable: fewer waits than pieces."""
    starts = range(0, len(old), SLICE)
    return [_pairs(old[at : at + SLICE], new[at : at + SLICE]) for at in starts]


def _pairs(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positions = (old != new).nonzero().squeeze(1)
    return positions.to(torch.int32), new[positions]


def to_host(pairs: Pairs) -> Pairs:
    """Positions and bits in the host's memory, as a sender without a codec has them."""
    return [(positions.cpu(), bits.cpu()) for positions, bits in pairs]


def to_device(pairs: Pairs, device: torch.device) -> Pairs:
    """The way back; from pinned memory it is one transfer each, without waiting."""
    return [
        (positions.to(device, non_blocking=True), bits.to(device, non_blocking=True))
        for positions, bits in pairs
    ]


def torch_write(targets: list[torch.Tensor], indices: Pairs) -> None:
    """Torch's way to write: one call per piece, with the wide indices it wants."""
    for target, (positions, bits) in zip(targets, indices, strict=True):
        target.index_copy_(0, positions, bits)


def torch_checksum(pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A plain sum per piece: far weaker than a digest, but it reads the same bytes."""
    return [piece.sum(dtype=torch.int64) for piece in pieces]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, in slices: torch compares into a mask as long as its inputs."""
    starts = range(0, len(left), SLICE)
    return all(torch.equal(left[at : at + SLICE], right[at : at + SLICE]) for at in starts)
