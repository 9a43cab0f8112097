"""A state that is spread over ranks: what each holds, and whether that makes a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightwire.diff.places import Outline, Place, place
from weightwire.diff.state import StateReader
from weightwire.errors import UnsupportedLayout
from weightwire.model import TensorSpec


@dataclass(frozen=True)
class Layout:
    """What a rank says of its part, without the bits."""

    outline: Outline
    parts: Mapping[str, tuple[int, int]]
    """First element and the one after the last, of each tensor it answers for."""


@dataclass(frozen=True)
class Shards:
    """One rank's part of a state.

    Every rank knows all tensors; each answers for one run of elements of some of them, counted
    row by row over the whole tensor. A run of another rank must not overlap it: of replicas only
    one answers.
    """

    outline: Outline
    starts: Mapping[str, int]
    """Where this rank's elements begin in the whole tensor."""
    local: StateReader
    """These elements, flat; tensors of which this rank has none are not listed."""
    watched: Mapping[str, Any] = field(default_factory=dict)
    """The tensors behind it, to notice writes."""

    @property
    def standing(self) -> Standing:
        """What to remember of it once it is committed: nothing that holds on to live tensors."""
        return Standing(self.outline, dict(self.starts), dict(self.local.specs))

    @property
    def layout(self) -> Layout:
        """What rank 0 must know of it."""
        specs = self.local.specs
        return Layout(
            self.outline,
            {n: (start, start + specs[n].n_elements) for n, start in self.starts.items()},
        )

    def places(self, base: Outline, fresh: frozenset[str]) -> dict[str, Place]:
        """Where this rank's elements lie, and what they are compared with."""
        return {
            name: place(
                self.outline.specs[name], start, None if name in fresh else base.specs.get(name)
            )
            for name, start in self.starts.items()
        }


@dataclass(frozen=True)
class Standing:
    """Where the elements of a rank's baseline lie."""

    outline: Outline
    starts: Mapping[str, int]
    local_specs: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Part:
    """A run of a tensor's elements, and the rank that answers for it."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Ownership:
    """Which rank answers for which elements; every element has exactly one."""

    outline: Outline
    parts: Mapping[str, tuple[Part, ...]]
    """Of each tensor, ascending."""

    def moved_since(self, other: Ownership) -> frozenset[str]:
        """Tensors whose elements changed hands: their old bits are on the wrong rank."""
        return frozenset(
            name for name, parts in self.parts.items() if other.parts.get(name, parts) != parts
        )


def own(layouts: Sequence[Layout]) -> Ownership:
    """Put the ranks' layouts together.

    Raises:
        UnsupportedLayout: ranks disagree about a tensor, or elements are missing, double, or not in
            the order of the ranks; names the tensor.
    """
    outline = layouts[0].outline
    for rank, layout in enumerate(layouts):
        _check_same(outline, layout.outline, rank)
    parts = {name: _parts_of(spec, layouts) for name, spec in outline.specs.items()}
    return Ownership(outline, parts)


def _parts_of(spec: TensorSpec, layouts: Sequence[Layout]) -> tuple[Part, ...]:
    parts = tuple(
        Part(rank, *layout.parts[spec.name])
        for rank, layout in enumerate(layouts)
        if spec.name in layout.parts
    )
    expected = 0
    for part in parts:
        # An empty tensor has one owner too: someone must say that it is there.
        if part.start != expected or (part.start == part.stop and len(parts) > 1):
            raise _unfit(spec, part)
        expected = part.stop
    if expected != spec.n_elements or not parts:
        raise UnsupportedLayout(
            f"{spec.name!r}: no rank answers for elements {expected} to {spec.n_elements}"
        )
    return parts


def _unfit(spec: TensorSpec, part: Part) -> UnsupportedLayout:
    return UnsupportedLayout(
        f"{spec.name!r}: rank {part.rank} answers for elements {part.start} to {part.stop}, which do"
        " not follow those of the ranks before it; shard it by rows, in the order of the ranks"
    )


def _check_same(one: Outline, other: Outline, rank: int) -> None:
    if list(one.specs.values()) == list(other.specs.values()) and one.ties == other.ties:
        return
    differing = [n for n in {**one.specs, **other.specs} if one.specs.get(n) != other.specs.get(n)]
    differing += [n for n in {**one.ties, **other.ties} if one.ties.get(n) != other.ties.get(n)]
    what = f"about {min(differing)!r}" if differing else "about the order of the tensors"
    raise UnsupportedLayout(
        f"rank 0 and rank {rank} disagree {what}; every rank must publish the same model, with the"
        " same tensors tied"
    )
