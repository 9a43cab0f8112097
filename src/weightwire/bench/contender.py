"""What takes part in the benchmark: anything that turns pairs of versions into a patch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weightwire.bench.generate import Pair
from weightwire.model import Bits


class Encoded(Protocol):
    """A patch in memory: how large it would be on the wire, and how to apply it."""

    @property
    def n_bytes(self) -> int:
        """Bytes to send."""

    def decode_into(self, outs: Sequence[Bits]) -> None:
        """Turn the old version of every tensor into the new one, in place."""


class Contender(Protocol):
    """An encoding with its threads.

    The benchmark calls ``encode`` with all tensors of a case, so that small tensors can be spread
    over threads, then hands the patch copies of the old versions and compares bit for bit.
    """

    @property
    def name(self) -> str:
        """What the tables call it."""

    @property
    def source(self) -> str:
        """The systems that use it."""

    @property
    def n_threads(self) -> int:
        """How many threads both directions use."""

    def encode(self, pairs: Sequence[Pair]) -> Encoded:
        """Find what changed and write it."""


@dataclass(frozen=True)
class Span:
    """A stretch of one tensor, worked on at once."""

    tensor: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Bits]) -> Bits:
        """The elements of the stretch, as a view."""
        return tensors[self.tensor][self.start : self.stop]


def cut(lengths: Iterable[int], n_elements: int) -> tuple[Span, ...]:
    """Stretches of at most ``n_elements`` that cover tensors of these lengths."""
    return tuple(
        Span(tensor, start, min(start + n_elements, length))
        for tensor, length in enumerate(lengths)
        for start in range(0, length, n_elements)
    )
