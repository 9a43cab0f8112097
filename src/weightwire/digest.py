"""Fingerprints of tensors and states: found errors, not authenticity.

A tensor's digest is a sum over its elements, so it can be computed in pieces, in any order, and
moved in O(changed). A state's digest hashes the names, types, shapes and digests of its tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from weightwire.codec.piece import piece_elements, thread_count
from weightwire.diff.state import StateReader, device_bits
from weightwire.kernels import kernels
from weightwire.model import Bits, TensorSpec

_LANE = 1 << 64


@dataclass(frozen=True)
class TensorDigest:
    """Two 64-bit sums; adding digests of disjoint pieces gives the digest of their union."""

    low: int = 0
    high: int = 0

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.low + other.low) % _LANE, (self.high + other.high) % _LANE)

    def __sub__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.low - other.low) % _LANE, (self.high - other.high) % _LANE)

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"


def digest_bits(bits: Bits, first_index: int = 0, *, n_threads: int | None = None) -> TensorDigest:
    """Digest of a run of elements that starts at ``first_index`` of its tensor."""
    return TensorDigest(*kernels().digest(bits, first_index, thread_count(n_threads)))


def digest_at(positions: Bits, bits: Bits, first_index: int = 0) -> TensorDigest:
    """Digest of single elements at ``first_index + positions``: what an update adds or takes away."""
    return TensorDigest(*kernels().digest_at(positions, bits, first_index))


def digest_tensor(
    state: StateReader,
    name: str,
    progress: Callable[[int], None] = lambda _: None,
    first_index: int = 0,
) -> TensorDigest:
    """Digest of one tensor, where it is or read in pieces; it may be a part, from an index on."""
    on_device = _digests_on_device(state, {name: first_index}, progress)
    if on_device:
        return on_device[name]
    spec, total = state.specs[name], TensorDigest()
    for start, stop in piece_ranges(spec):
        total += digest_bits(state.read(name, start, stop), first_index + start)
        progress((stop - start) * spec.dtype.n_bytes)
    return total


def piece_ranges(spec: TensorSpec) -> list[tuple[int, int]]:
    """The ranges in which a tensor is read and coded; one empty range for an empty tensor."""
    size = piece_elements(spec.dtype)
    starts = range(0, max(spec.n_elements, 1), size)
    return [(start, min(start + size, spec.n_elements)) for start in starts]


def combine(tensors: Iterable[tuple[TensorSpec, TensorDigest]]) -> str:
    """A state's digest, as 32 hex digits, from its tensors' digests in any order."""
    state = hashlib.blake2b(digest_size=16, person=b"weightwire.state")
    for spec, digest in sorted(tensors, key=lambda pair: pair[0].name.encode()):
        name = spec.name.encode()
        state.update(struct.pack("<I", len(name)) + name)
        state.update(struct.pack("<BB", spec.dtype.code, len(spec.shape)))
        state.update(struct.pack(f"<{len(spec.shape)}Q", *spec.shape))
        state.update(struct.pack("<QQ", digest.low, digest.high))
    return state.hexdigest()


def digest_state(
    state: StateReader, progress: Callable[[int], None] = lambda _: None
) -> tuple[str, dict[str, TensorDigest]]:
    """A state's digest and that of each of its tensors."""
    tensors = digest_tensors(state, dict.fromkeys(state.specs, 0), progress)
    return combine((state.specs[name], digest) for name, digest in tensors.items()), tensors


def digest_tensors(
    state: StateReader,
    first_indices: Mapping[str, int],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, TensorDigest]:
    """Digests of some tensors, each from its first index on; those on a device at once, and there."""
    found = _digests_on_device(state, first_indices, progress)
    return {
        name: found[name] if name in found else digest_tensor(state, name, progress, first)
        for name, first in first_indices.items()
    }


def _digests_on_device(
    state: StateReader, first_indices: Mapping[str, int], progress: Callable[[int], None]
) -> dict[str, TensorDigest]:
    """Of the tensors that are on a device; nothing is imported where none is."""
    names = [name for name in first_indices if device_bits(state, name, 0, 0) is not None]
    if not names:
        return {}
    from weightwire.diff.device_digest import device_lanes

    found = {name: TensorDigest() for name in names}
    for name, *lanes in device_lanes(state, {name: first_indices[name] for name in names}):
        found[name] += TensorDigest(*lanes)
    for name in names:
        progress(state.specs[name].n_bytes)
    return found
