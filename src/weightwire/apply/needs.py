"""Which elements of a tensor a receiver keeps current, where it does not keep all.

A rank of a tensor-parallel engine holds some elements of a tensor. To decode their chunks it needs
the old bits of whole chunks, so what it keeps is rounded out to whole chunks. Chunks of every size
are nested in those of the largest, if pieces begin at multiples of it: then what is kept never
depends on what is not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weightwire import limits
from weightwire.digest import TensorDigest
from weightwire.model import TensorSpec

GRAIN = 1 << limits.MAX_CHUNK_LOG2
"""What is kept begins and ends at multiples of this many elements."""


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop`` of a flat tensor."""

    start: int
    stop: int

    def __bool__(self) -> bool:
        return self.start < self.stop

    def __and__(self, other: Span) -> Span:
        return Span(max(self.start, other.start), min(self.stop, other.stop))

    def covers(self, other: Span) -> bool:
        """Whether it has all of another one."""
        return not other or (self.start <= other.start and other.stop <= self.stop)

    def without(self, other: Span) -> tuple[Span, ...]:
        """What is left before and after another one."""
        inner = self & other
        if not inner:
            return (self,) if self else ()
        return tuple(s for s in (Span(self.start, inner.start), Span(inner.stop, self.stop)) if s)


NOTHING = Span(0, 0)


def whole(spec: TensorSpec) -> Span:
    """All elements."""
    return Span(0, spec.n_elements)


def rounded_out(span: Span, spec: TensorSpec) -> Span:
    """The smallest span around another one that no chunk straddles."""
    if not span:
        return NOTHING
    stop = -(-span.stop // GRAIN) * GRAIN
    return Span(span.start // GRAIN * GRAIN, min(stop, spec.n_elements))


@runtime_checkable
class Needs(Protocol):
    """What a receiver keeps of a run."""

    def span(self, spec: TensorSpec) -> Span:
        """The elements it keeps current; decoding the others is a waste."""

    def prove_all(self, names: Collection[str]) -> None:
        """Raise BaseMismatch if what is kept of one of these tensors is not what it was."""

    def keep_whole(self) -> None:
        """From the next anchor on, keep whole tensors: patches are cut where chunks straddle."""


@runtime_checkable
class SelfProving(Protocol):
    """A state that can be told from a damaged one although it is only a part of the run's."""

    def is_sound(self, name: str, digest: TensorDigest) -> bool:
        """Whether all it has of a tensor is right; ``digest`` is that of the whole tensor."""
