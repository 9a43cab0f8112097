"""A state with a patch laid over it: reads as the target, writes nothing, proves what it gives.

Everything that applies a patch goes through here: to memory, to files, in place, and in chains
(patches over patches), so there is one place where bits are checked.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightwire.codec.patch import Patch
from weightwire.codec.piece import thread_count
from weightwire.codec.record import Kind, Record, RecordHead
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_at, digest_bits
from weightwire.errors import BaseMismatch, MalformedHeader, MissingTensor, TargetMismatch
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes, TensorSpec


class PatchedState:
    """Implements ``StateReader``: the base's tensors with a patch applied on the fly.

    A piece's old bits are checked before it is decoded and its new bits after; a reader never
    sees an unproven one. One decoded piece is kept, since reads go forward.
    """

    def __init__(self, base: StateReader, patch: Patch) -> None:
        self._base, self.patch = base, patch
        self._base_specs = base.specs
        self._specs = target_specs(self._base_specs, patch)
        self._kept: tuple[RecordHead, Bits] | None = None

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The target's tensors: the base's order, then what is new."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """The target's aliases."""
        return self.patch.index.tied

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Target bits.

        Raises:
            BaseMismatch: the base is not the one the patch was made for.
            TargetMismatch, CorruptStream: the patch does not give what it promises.
        """
        if name not in self.patch.heads:
            return self._base.read(name, start, stop)
        parts = [
            self._new_bits(bucket, head)[max(start - head.start, 0) : stop - head.start]
            for bucket, head in self.patch.heads[name]
            if head.start < stop and start < head.stop
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._empty(name)])

    def changes(self, bucket: int, head: RecordHead) -> Changes:
        """The proven changes of one piece, positions counted from its start."""
        record = self.patch.record(bucket, head.key)
        if record.head.kind is Kind.FULL:
            return proven_full(record)
        old = self._base.read(head.spec.name, head.start, head.stop)
        return proven_changes(record, old)

    def _new_bits(self, bucket: int, head: RecordHead) -> Bits:
        if self._kept is None or self._kept[0] is not head:
            self._kept = (head, self._apply(bucket, head))
        return self._kept[1]

    def _apply(self, bucket: int, head: RecordHead) -> Bits:
        record = self.patch.record(bucket, head.key)
        if head.kind is Kind.FULL:
            return proven_full(record).bits
        old = self._base.read(head.spec.name, head.start, head.stop)
        changes = proven_changes(record, old)
        new: Bits = old.copy()
        kernels().scatter(new, changes.positions, changes.bits, thread_count())
        return new

    def _empty(self, name: str) -> Bits:
        return np.empty(0, dtype=self._specs[name].dtype.bits_dtype)


def proven_full(record: Record) -> Changes:
    """A FULL record's bits, after they were checked.

    Raises:
        TargetMismatch, MalformedRecord: the patch is not what it says.
    """
    changes = record.changes(None)
    check_target_digest(record.head, digest_bits(changes.bits, record.head.start))
    return changes


def proven_changes(record: Record, old: Bits) -> Changes:
    """A record's changes, after its old bits and its new ones were checked.

    Raises:
        BaseMismatch: ``old`` is not what the patch was made for.
        TargetMismatch, CorruptStream, MalformedRecord: the patch is not what it says.
    """
    head = record.head
    found = digest_bits(old, head.start)
    check_base_digest(head, found)
    changes = record.changes(old)
    before = digest_at(changes.positions, old[changes.positions], head.start)
    after = digest_at(changes.positions, changes.bits, head.start)
    check_target_digest(head, found - before + after)
    return changes


def check_base_digest(head: RecordHead, found: TensorDigest) -> None:
    """Refuse old bits that a record was not made for.

    Raises:
        BaseMismatch: names the tensor.
    """
    if found != head.base_digest:
        raise BaseMismatch(
            f"tensor {head.key!r}: its bits have digest {found}, the patch needs"
            f" {head.base_digest}; nothing was written; start from the version it was made for"
        )


def check_target_digest(head: RecordHead, found: TensorDigest) -> None:
    """Refuse new bits that are not those a record promises.

    Raises:
        TargetMismatch: names the tensor.
    """
    if found != head.target_digest:
        raise TargetMismatch(
            f"tensor {head.key!r}: patched bits have digest {found}, the patch promises"
            f" {head.target_digest}; nothing was written; fetch the patch again"
        )


def target_specs(base: Mapping[str, TensorSpec], patch: Patch) -> dict[str, TensorSpec]:
    """The tensors there are after a patch: the base's order, then what is new.

    Raises:
        BaseMismatch, MissingTensor: not the base this patch was made for.
        MalformedHeader: the index contradicts its records.
    """
    removed = {*patch.index.removed}
    specs = {name: spec for name, spec in base.items() if name not in removed}
    for alias in patch.index.tied:
        specs.pop(alias, None)
    for name, pieces in patch.heads.items():
        head = pieces[0][1]
        if head.kind is not Kind.FULL:
            check_base_spec(base.get(name), head)
        specs[name] = head.spec
    for name in patch.index.unchanged:
        if name not in specs:
            raise MissingTensor(f"the state has no tensor {name!r}; start from an anchor")
    extra = specs.keys() - patch.heads.keys() - patch.index.unchanged.keys()
    if extra:
        raise BaseMismatch(f"the state has a tensor {min(extra)!r} that the patch does not know")
    if sum(spec.n_elements for spec in specs.values()) != patch.n_elements:
        raise MalformedHeader("the index lies about its number of elements; fetch the patch again")
    return specs


def check_base_spec(base: TensorSpec | None, head: RecordHead) -> None:
    """Refuse a record made for a tensor of another type or shape.

    Raises:
        BaseMismatch, MissingTensor: names the tensor.
    """
    name = head.spec.name
    if base is None:
        raise MissingTensor(f"the state has no tensor {name!r}; start from an anchor")
    if (base.dtype, base.shape) != (head.spec.dtype, head.base_shape):
        raise BaseMismatch(
            f"tensor {name!r} is {base.dtype.name}{list(base.shape)}, the patch needs"
            f" {head.spec.dtype.name}{list(head.base_shape)}"
        )
