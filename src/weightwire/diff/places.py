"""Where what is compared lies in the state that a patch speaks of: all of it, or a rank's part.

A trainer's rank may hold a run of elements of each tensor. It compares its own, and says of each
piece where that lies in the whole tensor; digests are sums, so what the ranks found adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from weightwire.codec.index import BucketEntry, PatchIndex
from weightwire.codec.record import RecordHead
from weightwire.digest import TensorDigest, combine
from weightwire.model import TensorSpec

_NOTHING = TensorDigest()


@dataclass(frozen=True)
class Place:
    """The tensor that records speak of, and where in it the elements at hand begin."""

    spec: TensorSpec
    start: int
    base_shape: tuple[int, ...] | None
    """The whole tensor's shape in the base; None where there is nothing to compare with."""

    def head_here(self, head: RecordHead, spec: TensorSpec) -> RecordHead:
        """A record's head in the coordinates of the elements at hand."""
        if spec == self.spec:
            return head
        return replace(head, spec=spec, start=head.start - self.start, base_shape=spec.shape)


@dataclass(frozen=True)
class Found:
    """What a comparison found in a state, or in a part of one."""

    base: Mapping[str, TensorDigest]
    target: Mapping[str, TensorDigest]
    changed: frozenset[str]
    """Tensors that need records; all of their pieces do, those without a change too."""
    n_changed: int

    def __add__(self, other: Found) -> Found:
        return Found(
            _added(self.base, other.base),
            _added(self.target, other.target),
            self.changed | other.changed,
            self.n_changed + other.n_changed,
        )


@dataclass(frozen=True)
class Outline:
    """Which tensors a state has, without their bits."""

    specs: Mapping[str, TensorSpec]
    ties: Mapping[str, str]

    @property
    def n_elements(self) -> int:
        """Elements of all tensors."""
        return sum(spec.n_elements for spec in self.specs.values())

    @property
    def n_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.n_bytes for spec in self.specs.values())

    def digest(self, digests: Mapping[str, TensorDigest]) -> str:
        """The state's digest, from those of its tensors; one that nobody has any of counts as 0."""
        return combine((spec, digests.get(name, _NOTHING)) for name, spec in self.specs.items())


def whole_places(
    base: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]
) -> dict[str, Place]:
    """The places of a state that is compared as a whole."""
    return {name: place(spec, 0, base.get(name)) for name, spec in target.items()}


def place(spec: TensorSpec, start: int, base: TensorSpec | None) -> Place:
    """Where elements lie; a tensor of another type or size than before has no base."""
    patchable = base and (base.dtype, base.n_elements) == (spec.dtype, spec.n_elements)
    return Place(spec, start, base.shape if base and patchable else None)


def index_of(
    found: Found, base: Outline, target: Outline, codec: str, buckets: Iterable[BucketEntry]
) -> PatchIndex:
    """The index of the patch from ``base`` to ``target``, once everything in them was compared."""
    ties = dict(target.ties)
    return PatchIndex(
        codec=codec,
        base_digest=base.digest(found.base),
        target_digest=target.digest(found.target),
        n_tensors=len(target.specs),
        n_elements=target.n_elements,
        n_changed=found.n_changed,
        buckets=tuple(buckets),
        unchanged={n: str(found.target[n]) for n in target.specs if n not in found.changed},
        removed=tuple(n for n in base.specs if n not in target.specs and n not in ties),
        tied=ties,
    )


def _added(
    one: Mapping[str, TensorDigest], other: Mapping[str, TensorDigest]
) -> dict[str, TensorDigest]:
    return {name: one.get(name, _NOTHING) + other.get(name, _NOTHING) for name in {**one, **other}}
