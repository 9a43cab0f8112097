"""Weightwire's kernels as the benchmark calls them; one that is not there yet says so.

Every module is imported when it is called for: a kernel that does not load leaves the others' rows
alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from elements import ElementType
from floors import Pairs

_KERNELS = "weightwire.kernels.triton"


class Missing(Exception):
    """This checkout has no such kernel."""


def encode(
    olds: Sequence[torch.Tensor],
    news: Sequence[torch.Tensor],
    element: ElementType,
    codec: str,
    n_bytes: int,
) -> list[Any]:
    """Compare and code all pieces, ``n_bytes`` in all; the streams are then in the host's memory."""
    from weightwire.codec.device_pieces import encode_pieces

    budget_bytes = n_bytes * 45 // 1000
    return list(encode_pieces(olds, news, element.dtype, codec, budget_bytes=budget_bytes))


def decode(olds: Sequence[torch.Tensor], pieces: Sequence[Any], element: ElementType) -> Pairs:
    """Positions and new bits of all pieces, on the device."""
    from weightwire.codec.device_pieces import decode_pieces

    return [(each.positions, each.bits) for each in decode_pieces(olds, pieces, element.dtype)]


def prepare(targets: Sequence[torch.Tensor], pairs: Pairs) -> Any:
    """A write that is ready to go."""
    writes = [(target, *pair) for target, pair in zip(targets, pairs, strict=True)]
    return _find("scatter", "prepare_scatter")(writes)


def write(prepared: Any) -> None:
    """The pause an engine feels."""
    _find("scatter", "write")(prepared)


def digest(pieces: Sequence[torch.Tensor], first_indices: Sequence[int]) -> Any:
    """Two 64-bit lanes for every piece, wherever the kernel leaves them."""
    return _find("digest", "digest_all")(pieces, first_indices)


def digest_moved(prepared: Any, first_indices: Sequence[int]) -> Any:
    """What a write that is ready would add to the digest of each piece."""
    return _find("digest", "digest_moved_all")(prepared, first_indices)


def lanes(digests: Any) -> list[tuple[int, int]]:
    """Digests as unsigned numbers, from a tensor, an array or a list."""
    if isinstance(digests, torch.Tensor):
        digests = digests.cpu().numpy()
    if isinstance(digests, np.ndarray):
        digests = digests.astype(np.int64).reshape(-1, 2).tolist()
    found = [(d.low, d.high) if hasattr(d, "low") else (d[0], d[1]) for d in digests]
    return [(int(low) % 2**64, int(high) % 2**64) for low, high in found]


def n_stream_bytes(pieces: Sequence[Any]) -> int:
    """Directories and payloads; models add a few hundred bytes a piece."""
    return sum(p.streams.directory.nbytes + p.streams.payload.nbytes for p in pieces)


def _find(module: str, name: str) -> Any:
    try:
        found = importlib.import_module(f"{_KERNELS}.{module}")
    except ModuleNotFoundError as error:
        if error.name != f"{_KERNELS}.{module}":
            raise
        raise Missing(f"{module}.{name}") from None
    if not hasattr(found, name):
        raise Missing(f"{module}.{name}")
    return getattr(found, name)
