"""Six published encodings, written as well as NumPy and zstandard allow.

They are what Weightwire is measured against, so they must be no slower and no larger than they
need be, and just as exact: where the original compares floats or adds differences, these compare
and store bits. Each works on one slice; ``sliced.py`` runs slices on all threads, since NumPy and
zstandard release the interpreter lock.

All diff by an integer compare, and none stores a count: the lengths of the parts tell it.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from weightwire.bench.gaps import (
    Positions,
    bridge,
    decode_leb128,
    encode_leb128,
    gaps_between,
    gaps_u16,
    positions_after,
)
from weightwire.bench.zstd import Part, compress, decompress
from weightwire.model import Bits

SLICE_ELEMENTS = 1 << 22
"""Large enough that the interpreter costs nothing, small enough to keep every thread busy."""

Parts: TypeAlias = tuple[Part, ...]
"""A slice's patch: the byte streams that would be sent."""


class SliceEncoding(Protocol):
    """One way to write what changed in a slice.

    ``encode`` sees both versions and finds the difference itself. ``decode_into`` gets memory
    that holds the old version and turns it into the new one in place.
    """

    @property
    def name(self) -> str:
        """What is stored, in a few words."""

    @property
    def source(self) -> str:
        """The systems that publish this encoding or a close relative of it."""

    def encode(self, old: Bits, new: Bits) -> Parts:
        """The parts that turn ``old`` into ``new``."""

    def decode_into(self, out: Bits, parts: Parts) -> None:
        """Write the new version over the old one."""


class RawPositions:
    """Four bytes of position and the value."""

    name = "int32 position + value"
    source = "vLLM sparse_nccl, verl, prime-rl, SparseRL-Sync"

    def encode(self, old: Bits, new: Bits) -> Parts:
        positions = changed_positions(old, new)
        return _raw(positions.astype(np.int32)), _raw(new[positions])

    def decode_into(self, out: Bits, parts: Parts) -> None:
        positions, values = parts
        out[positions.view(np.int32)] = values.view(out.dtype)


class ShortGaps:
    """Two bytes of gap and the value; longer gaps are bridged by rewriting unchanged elements."""

    name = "u16 gap + value"
    source = "TRL delta sync"

    def encode(self, old: Bits, new: Bits) -> Parts:
        positions = bridge(changed_positions(old, new))
        return _raw(gaps_u16(positions)), _raw(new[positions])

    def decode_into(self, out: Bits, parts: Parts) -> None:
        gaps, values = parts
        out[positions_after(gaps.view(np.uint16))] = values.view(out.dtype)


class Leb128Gaps:
    """A gap in as many bytes as it needs, and the value."""

    name = "LEB128 gap + value"
    source = "SparrowRL, AuroraRL (there with differences instead of values)"

    def encode(self, old: Bits, new: Bits) -> Parts:
        positions = changed_positions(old, new)
        return encode_leb128(gaps_between(positions)), _raw(new[positions])

    def decode_into(self, out: Bits, parts: Parts) -> None:
        gaps, values = parts
        out[np.cumsum(decode_leb128(gaps))] = values.view(out.dtype)


class SplitGaps:
    """One byte of gap, 255 standing for the next entry of a two-byte stream; all compressed."""

    name = "u8/u16 gap + value + zstd-1"
    source = "PULSE, grail"

    def encode(self, old: Bits, new: Bits) -> Parts:
        positions = bridge(changed_positions(old, new))
        gaps = gaps_u16(positions)
        short = np.minimum(gaps, 0xFF).astype(np.uint8)
        return compress(short), compress(gaps[gaps >= 0xFF]), compress(new[positions])

    def decode_into(self, out: Bits, parts: Parts) -> None:
        short, long, values = (decompress(part) for part in parts)
        gaps = short.astype(np.uint16)
        gaps[short == 0xFF] = long.view(np.uint16)
        out[positions_after(gaps)] = values.view(out.dtype)


class DenseXor:
    """The XOR of all elements, mostly zeros, compressed."""

    name = "dense XOR + zstd-1"
    source = "slime, miles, SkyRL, ModelExpress"

    def encode(self, old: Bits, new: Bits) -> Parts:
        return (compress(old ^ new),)

    def decode_into(self, out: Bits, parts: Parts) -> None:
        out ^= decompress(parts[0]).view(out.dtype)


class ShortGapsXor:
    """Two bytes of gap and the XOR of old and new bits, each stream compressed."""

    name = "u16 gap + XOR + zstd-1"
    source = "NeMo-RL, NeMo-DCR"

    def encode(self, old: Bits, new: Bits) -> Parts:
        positions = bridge(changed_positions(old, new))
        return compress(gaps_u16(positions)), compress(old[positions] ^ new[positions])

    def decode_into(self, out: Bits, parts: Parts) -> None:
        gaps, flips = (decompress(part) for part in parts)
        out[positions_after(gaps.view(np.uint16))] ^= flips.view(out.dtype)


PUBLISHED: tuple[SliceEncoding, ...] = (
    RawPositions(),
    ShortGaps(),
    Leb128Gaps(),
    SplitGaps(),
    DenseXor(),
    ShortGapsXor(),
)

BEST_PUBLISHED = ShortGapsXor.name
"""The smallest of them on real training runs: what ratios are taken against."""


def changed_positions(old: Bits, new: Bits) -> Positions:
    """Where the bits differ; floats are never compared, so −0 and every NaN count."""
    return np.flatnonzero(old != new)


def _raw(array: Bits) -> Part:
    return array.view(np.uint8)
