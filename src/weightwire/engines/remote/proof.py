"""The proof that all ranks together hold a version: each digests its memory, the sums are compared.

Three things must agree: the digest the publisher committed, the digests of the single tensors it
is made of, and the sum over all ranks of what lies in their live memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightwire.apply.layouts.shares import Share, prove_shares
from weightwire.apply.layouts.target import LayoutTarget
from weightwire.digest import TensorDigest, combine
from weightwire.errors import EngineRefused, TargetMismatch, UnsupportedDType
from weightwire.model import TensorSpec, dtype_named


@dataclass(frozen=True)
class RankProof:
    """One rank's part of a proof."""

    version: int
    tensors: tuple[tuple[TensorSpec, TensorDigest], ...]
    """What the version has, by the rank's own account."""
    shares: tuple[Share, ...]
    """What the rank's live memory has of it."""

    def as_json(self) -> dict[str, Any]:
        """For the answer to a remote call: digests as hex, because JSON numbers are too short."""
        return {
            "version": self.version,
            "tensors": [
                [spec.name, spec.dtype.name, list(spec.shape), str(digest)]
                for spec, digest in self.tensors
            ],
            "shares": [
                [
                    s.name,
                    [list(r) for r in s.region],
                    s.n_elements,
                    s.n_tensor_elements,
                    str(s.digest),
                ]
                for s in self.shares
            ],
        }


def proof_of(version: int, target: LayoutTarget, digests: Mapping[str, TensorDigest]) -> RankProof:
    """Read one rank's live memory.

    Raises:
        StopError: nothing was loaded yet.
        BaseMismatch: memory holds bits that nobody published.
    """
    specs = target.layout.specs
    tensors = tuple((specs[name], digest) for name, digest in digests.items())
    return RankProof(version, tensors, target.shares())


def parse_proof(raw: Mapping[str, Any]) -> RankProof:
    """The mirror of ``RankProof.as_json``.

    Raises:
        EngineRefused: not a proof: the server runs another release of Weightwire.
    """
    try:
        tensors = tuple(
            (TensorSpec(name, dtype_named(dtype), tuple(shape)), _digest(digest))
            for name, dtype, shape, digest in raw["tensors"]
        )
        shares = tuple(
            Share(name, tuple(tuple(part) for part in region), n, n_tensor, _digest(digest))
            for name, region, n, n_tensor, digest in raw["shares"]
        )
        return RankProof(int(raw["version"]), tensors, shares)
    except (KeyError, TypeError, ValueError, UnsupportedDType) as error:
        raise EngineRefused(f"not a rank's proof: {error!r}; same Weightwire release?") from error


def prove(ranks: Sequence[RankProof], version: int, digest: str) -> int:
    """Add up what the ranks hold and compare it with a version; gives how many tensors it has.

    Raises:
        TargetMismatch: a rank holds another version, or a tensor is not the version's.
    """
    for rank, each in enumerate(ranks):
        if each.version != version or combine(each.tensors) != digest:
            raise TargetMismatch(
                f"rank {rank} holds version {each.version} with digest {combine(each.tensors)},"
                f" not version {version} with {digest}"
            )
    wanted = {spec.name: found for spec, found in ranks[0].tensors}
    _require_all(wanted, prove_shares((each.shares for each in ranks), wanted))
    return len(wanted)


def _require_all(wanted: Iterable[str], proven: Iterable[str]) -> None:
    missing = sorted({*wanted} - {*proven})
    if missing:
        raise TargetMismatch(f"no rank holds all of {', '.join(missing)[:300]}")


def _digest(text: str) -> TensorDigest:
    return TensorDigest(low=int(text[16:], 16), high=int(text[:16], 16))
