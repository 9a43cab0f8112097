"""Digests of tensors that are on a device, computed there: one launch for nearly all of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from weightwire.diff.state import StateReader, makes_device_bits, require_device_bits
from weightwire.digest import TensorDigest, piece_ranges

if TYPE_CHECKING:
    import torch

_MADE_BYTES = 256 << 20
"""Of memory that is made to be digested, so much at a time."""

_Part = tuple[str, int, "torch.Tensor"]
"""Of a tensor's bits: the tensor's name, the index of the first one, and they themselves."""


def device_lanes(
    state: StateReader, first_indices: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Both lanes of every part of these tensors, which all are on devices; parts add up."""
    waiting: dict[torch.device, list[_Part]] = {}
    n_made = 0
    for name, first_index in first_indices.items():
        is_made, spec = makes_device_bits(state, name), state.specs[name]
        for start, stop in piece_ranges(spec) if is_made else [(0, spec.n_elements)]:
            bits = require_device_bits(state, name, start, stop)
            waiting.setdefault(bits.device, []).append((name, first_index + start, bits))
            n_made += (stop - start) * spec.dtype.n_bytes if is_made else 0
            if n_made > _MADE_BYTES:
                yield from _digested(waiting)
                n_made = 0
    yield from _digested(waiting)


def digests_of(lanes: torch.Tensor) -> list[TensorDigest]:
    """Digests as the rest of Weightwire has them; waits for them."""
    from weightwire.kernels.triton.digest import lanes_of

    return [TensorDigest(*each) for each in lanes_of(lanes)]


def _digested(waiting: dict[torch.device, list[_Part]]) -> Iterator[tuple[str, int, int]]:
    """Launch on all devices, then wait for each."""
    from weightwire.kernels.triton.digest import digest_all, lanes_of

    under_way = [
        (parts, digest_all([bits for *_, bits in parts], [first for _, first, _ in parts]))
        for parts in waiting.values()
    ]
    waiting.clear()
    for parts, digests in under_way:
        for (name, *_), (low, high) in zip(parts, lanes_of(digests), strict=True):
            yield name, low, high
