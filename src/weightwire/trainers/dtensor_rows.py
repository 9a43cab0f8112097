"""A DTensor's local rows: where they lie in the whole tensor, and which replica answers for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weightwire.errors import UnsupportedLayout


@dataclass(frozen=True)
class Rows:
    """One rank's rows of a tensor."""

    tensor: Any
    start: int
    """Flat index of the first element."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    is_mine: bool
    """False on all replicas but the first."""
    watched: Any
    """The tensor that training writes to."""


def local_rows(name: str, tensor: DTensor) -> Rows:
    """This rank's rows of ``tensor``; one that is not spread by rows is redistributed, alone.

    That is an all-to-all among the ranks of its own mesh: each gets as many elements as it had.

    Raises:
        UnsupportedLayout: sums that are still to be added up, or a layout torch cannot redistribute.
    """
    watched = tensor.detach().to_local()
    tensor = by_rows(name, tensor.detach())
    coordinate = tensor.device_mesh.get_coordinate()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    start = offset[0] * math.prod(tensor.shape[1:]) if tensor.ndim else 0
    return Rows(
        tensor.to_local().contiguous(),
        start,
        tuple(tensor.shape),
        coordinate is not None and _is_first_replica(tensor, coordinate),
        watched,
    )


def by_rows(name: str, tensor: DTensor) -> DTensor:
    """The same tensor with every rank's elements in one run, in the order of the ranks."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedLayout(
            f"{name!r} is placed {tensor.placements}: its parts are still to be summed up"
        )
    # Exactly Shard: a strided one, as tensor parallelism below FSDP makes it, interleaves rows.
    if all(p.is_replicate() or (p == Shard(0) and type(p) is Shard) for p in tensor.placements):
        return tensor
    rows = [Replicate() if p.is_replicate() else Shard(0) for p in tensor.placements]
    try:
        return tensor.redistribute(placements=rows)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedLayout(
            f"{name!r} is placed {tensor.placements}, and torch cannot spread it by rows: {error}"
        ) from error


def _is_first_replica(tensor: DTensor, coordinate: list[int]) -> bool:
    return all(
        where == 0
        for where, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )
