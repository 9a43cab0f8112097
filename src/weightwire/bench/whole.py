"""The best published encoding once more, written the straightforward way: whole tensors at a time.

``published.py`` with ``sliced.py`` is that encoding in slices on a pool of threads. Written plainly
it is five lines per tensor. Both are raced, because "how much faster" depends on which of them one
would run otherwise. Neither is the code of the systems that publish the encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightwire.bench.gaps import bridge, gaps_u16, positions_after
from weightwire.bench.generate import Pair
from weightwire.bench.published import ShortGapsXor
from weightwire.bench.zstd import Part, compress, decompress
from weightwire.model import Bits

WHOLE_TENSORS = f"{ShortGapsXor.name}, whole tensors"


@dataclass(frozen=True)
class WholePatch:
    """One zstd frame per tensor: all gaps, then all flips."""

    frames: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all frames; names and shapes are not charged, as with the other encodings."""
        return sum(frame.nbytes for frame in self.frames)

    def decode_into(self, outs: Sequence[Bits]) -> None:
        """Flip the bits of every tensor in turn; no count is stored, the length tells it."""
        for out, frame in zip(outs, self.frames, strict=True):
            raw = decompress(frame)
            n_gap_bytes = 2 * (len(raw) // (2 + out.itemsize))
            gaps, flips = raw[:n_gap_bytes].view(np.uint16), raw[n_gap_bytes:]
            out[positions_after(gaps)] ^= flips.view(out.dtype)


@dataclass(frozen=True)
class WholeTensors:
    """NumPy works on one thread; zstd compresses with all, where a tensor's changes are enough."""

    n_threads: int
    name: str = WHOLE_TENSORS
    source: str = ShortGapsXor.source

    def encode(self, pairs: Sequence[Pair]) -> WholePatch:
        """Diff and encode one tensor after another."""
        return WholePatch(tuple(self._encode(pair.old, pair.new) for pair in pairs))

    def _encode(self, old: Bits, new: Bits) -> Part:
        flips = old ^ new
        positions = bridge(np.flatnonzero(flips))
        parts = gaps_u16(positions).view(np.uint8), flips[positions].view(np.uint8)
        return compress(np.concatenate(parts), self.n_threads)
