"""Several ranks prove together what none of them holds alone.

A tensor's digest is a sum over its elements by their place in the checkpoint. So each rank digests
what lies in its engine's memory, and the sum over all ranks is the digest the publisher signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightwire.apply.device_stream import SideStreams
from weightwire.apply.layouts.device_elements import digest_live
from weightwire.apply.layouts.layout import Layout, Part
from weightwire.apply.layouts.regions import Axis
from weightwire.digest import TensorDigest
from weightwire.errors import TargetMismatch


@dataclass(frozen=True)
class Share:
    """What one rank holds of one tensor."""

    name: str
    region: tuple[tuple[int, ...], ...]
    """Which elements: equal exactly for ranks that hold the same ones."""
    n_elements: int
    n_tensor_elements: int
    digest: TensorDigest
    """Over the elements as they are in live memory, by their place in the tensor."""


def shares_of(layout: Layout) -> tuple[Share, ...]:
    """The shares of one rank, read from its engine's memory.

    Raises:
        BaseMismatch: memory holds bits that nobody published.
    """
    streams = SideStreams()
    return tuple(_share(layout, name, parts, streams) for name, parts in layout.parts.items())


def prove_shares(
    shares: Iterable[Iterable[Share]], digests: Mapping[str, TensorDigest]
) -> tuple[str, ...]:
    """Add up the shares of all ranks and compare with a version; gives the tensors that are proven.

    A tensor that the ranks hold only in part, all together, or in regions that overlap and are not
    the same, cannot be added up: it is not among the proven ones.

    Raises:
        TargetMismatch: names a tensor that is not the version's, or differs between replicas.
    """
    regions: dict[str, dict[tuple[tuple[int, ...], ...], Share]] = {}
    for share in (share for rank in shares for share in rank):
        first = regions.setdefault(share.name, {}).setdefault(share.region, share)
        if first.digest != share.digest:
            raise TargetMismatch(f"tensor {share.name!r:.200}: two ranks hold it, and they differ")
    proven = []
    for name, found in regions.items():
        whole = next(iter(found.values())).n_tensor_elements
        if name in digests and sum(share.n_elements for share in found.values()) == whole:
            _require(name, sum((s.digest for s in found.values()), TensorDigest()), digests[name])
            proven.append(name)
    return tuple(proven)


def _require(name: str, found: TensorDigest, wanted: TensorDigest) -> None:
    if found != wanted:
        raise TargetMismatch(
            f"tensor {name!r:.200}: the ranks together hold {found}, the version has {wanted}"
        )


def _share(layout: Layout, name: str, parts: tuple[Part, ...], streams: SideStreams) -> Share:
    mine = [part for part in parts if not part.is_copy]
    digest = sum((digest_live(layout, part, streams) for part in mine), TensorDigest())
    region = tuple(sorted(_region(part) for part in mine))
    n_elements = sum(part.box.n_elements for part in mine)
    return Share(name, region, n_elements, layout.specs[name].n_elements, digest)


def _region(part: Part) -> tuple[int, ...]:
    """The box without its places: axes that continue one another on this side are one."""
    joined: list[Axis] = []
    for axis in part.box.axes:
        if joined and joined[-1].source == axis.n * axis.source:
            joined[-1] = Axis(joined[-1].n * axis.n, axis.source, 0)
        else:
            joined.append(axis)
    return (part.box.source, *(number for axis in joined for number in (axis.n, axis.source)))
