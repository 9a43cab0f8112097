"""Is this state the one a patch starts from, or the one it leads to? Digests decide, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weightwire.codec.patch import Patch
from weightwire.codec.record import Kind
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, combine, digest_state
from weightwire.errors import BaseMismatch, TargetMismatch
from weightwire.model import TensorSpec


@dataclass(frozen=True)
class Standing:
    """What a state is to a patch."""

    digest: str
    is_base: bool
    is_target: bool
    wrong_base: tuple[str, ...]
    """Tensors that keep it from being the base."""
    wrong_target: tuple[str, ...]
    """Tensors that keep it from being the target."""


def stand(
    state: StateReader, patch: Patch, progress: Callable[[int], None] = lambda _: None
) -> Standing:
    """Read the whole state once and compare it with both ends of a patch."""
    digest, tensors = digest_state(state, progress)
    specs = state.specs
    digests = {digest, _without_aliases(specs, tensors, patch)}
    base, target = tensor_digests(patch, base=True), tensor_digests(patch, base=False)
    return Standing(
        digest=digest,
        is_base=patch.base_digest in digests,
        is_target=patch.target_digest in digests,
        wrong_base=_differing(tensors, base),
        wrong_target=_differing(tensors, target),
    )


def check_base(standing: Standing, patch: Patch) -> None:
    """Refuse a state that does not stand at the patch's base.

    Raises:
        BaseMismatch: names the first tensors that differ; nothing has been written.
    """
    if not standing.is_base or standing.wrong_base:
        raise BaseMismatch(
            _message(standing.digest, patch.base_digest, standing.wrong_base, "needs")
        )


def require_base(
    state: StateReader, patch: Patch, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Read the whole state and refuse it if it is not the patch's base.

    Raises:
        BaseMismatch: names the first tensors that differ; nothing has been written.
    """
    check_base(stand(state, patch, progress), patch)


def require_target(
    state: StateReader, patch: Patch, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Read the whole state and refuse it if it is not the patch's target.

    Raises:
        TargetMismatch: names the first tensors that differ.
    """
    standing = stand(state, patch, progress)
    if not standing.is_target:
        raise TargetMismatch(
            _message(standing.digest, patch.target_digest, standing.wrong_target, "leads to")
        )


def check_promise(patch: Patch, specs: Mapping[str, TensorSpec]) -> None:
    """Refuse a patch whose records do not lead to the target in its index.

    Raises:
        TargetMismatch: they lead elsewhere; nothing has been written.
    """
    promised = promised_target(patch, specs)
    if promised != patch.target_digest:
        raise TargetMismatch(
            f"the patch's records lead to {promised}, its index promises {patch.target_digest};"
            " nothing was written; fetch the patch again"
        )


def tensor_digests(patch: Patch, *, base: bool) -> dict[str, TensorDigest]:
    """Per tensor, the digest at one end of the patch; tensors without a base are left out of it."""
    digests = {name: _parse_digest(text) for name, text in patch.index.unchanged.items()}
    for name, pieces in patch.heads.items():
        if base and pieces[0][1].kind is Kind.FULL:
            continue
        sides = (h.base_digest if base else h.target_digest for _, h in pieces)
        digests[name] = sum(sides, TensorDigest())
    return digests


def promised_target(patch: Patch, specs: Mapping[str, TensorSpec]) -> str:
    """The state digest that follows from the records: must equal the one in the index."""
    digests = tensor_digests(patch, base=False)
    return combine((specs[name], digest) for name, digest in digests.items())


def _parse_digest(text: str) -> TensorDigest:
    return TensorDigest(int(text[16:], 16), int(text[:16], 16))


def _without_aliases(
    specs: Mapping[str, TensorSpec], tensors: Mapping[str, TensorDigest], patch: Patch
) -> str:
    """The digest a state has where tied names are stored once; copies of them must agree."""
    tied = patch.index.tied
    if any(
        alias in tensors
        and _kind_and_bits(specs, tensors, alias) != _kind_and_bits(specs, tensors, name)
        for alias, name in tied.items()
    ):
        return ""
    return combine((specs[name], digest) for name, digest in tensors.items() if name not in tied)


def _kind_and_bits(
    specs: Mapping[str, TensorSpec], tensors: Mapping[str, TensorDigest], name: str
) -> tuple[object, ...]:
    if name not in specs:
        return ()
    return specs[name].dtype, specs[name].shape, tensors[name]


def _differing(
    found: Mapping[str, TensorDigest], wanted: Mapping[str, TensorDigest]
) -> tuple[str, ...]:
    return tuple(name for name, digest in wanted.items() if found.get(name) != digest)


def _message(found: str, wanted: str, wrong: tuple[str, ...], verb: str) -> str:
    names = ", ".join(repr(name) for name in wrong[:3]) or "the set of tensors, types or shapes"
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"the state has digest {found}, the patch {verb} {wanted}; different: {names}{more}"
