"""A patch onto a checkpoint on disk: into a new one, or in place; whole or not at all.

Every bit that is written has been proven: changed pieces against the digests of their records
before and after, unchanged tensors against the index while they stream by, and the whole against
the patch's target digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from weightwire.apply.proof import check_base, check_promise, require_target, stand
from weightwire.apply.structure import restructures
from weightwire.checkpoint import Checkpoint, overwrite_in_place, recover, write_checkpoint
from weightwire.codec.patch import Patch
from weightwire.codec.patched import PatchedState
from weightwire.digest import TensorDigest, digest_bits
from weightwire.errors import BaseMismatch
from weightwire.model import Bits, Changes, TensorSpec

Progress: TypeAlias = Callable[[int], None]
"""Told the number of bytes dealt with since its last call."""
Stage: TypeAlias = Callable[[str, int], Progress]
"""Told that a stage of so many bytes begins, it gives that stage's progress."""


@dataclass(frozen=True)
class FilesApplied:
    """What an apply to files did."""

    path: Path
    digest: str
    n_changed: int
    was_target: bool = False
    """The checkpoint already was the target: nothing was written."""
    n_recovered: int = 0
    """Interrupted applies that were finished first."""


def no_stage(name: str, n_bytes: int) -> Progress:
    """A stage nobody watches."""
    del name, n_bytes
    return lambda _: None


def apply_to_new(
    base_path: Path, patch: Patch, out: Path, *, overwrite: bool = False, stage: Stage = no_stage
) -> FilesApplied:
    """Write base plus patch as a new checkpoint of the same form; ``out`` is whole or absent.

    Raises:
        BaseMismatch, MissingTensor: not the checkpoint this patch was made for.
        RetryError: the patch is damaged.
        OutputExists: ``out`` exists, and overwriting was not asked for.
        TargetMismatch: the patch does not give what it promises.
        WeightwireError: whatever ``Checkpoint.open`` raises; nothing is left behind.
    """
    with Checkpoint.open(base_path) as base:
        _write_target(base, patch, out, stage, overwrite=overwrite)
    return FilesApplied(out, patch.target_digest, patch.n_changed)


def apply_in_place(path: Path, patch: Patch, *, stage: Stage = no_stage) -> FilesApplied:
    """Bring a checkpoint from the patch's base to its target; crash-safe, and safe to repeat.

    An apply that died half way is finished first. Pure value patches overwrite single elements
    under a journal; others rewrite the checkpoint beside itself and swap the two.

    Raises:
        BaseMismatch: neither the patch's base nor its target; nothing was written.
        RetryError: the patch or an old journal is damaged; nothing was written.
        UnsupportedLayout: a shard is a symbolic link; nothing was written.
        TargetMismatch: the files are not what was written to them.
    """
    done = FilesApplied(path, patch.target_digest, patch.n_changed, n_recovered=len(recover(path)))
    with Checkpoint.open(path) as checkpoint:
        n_bytes = _size(checkpoint.specs)
        standing = stand(checkpoint, patch, stage("check", n_bytes))
        if standing.is_target:
            return replace(done, was_target=True)
        check_base(standing, patch)
        _overwrite(checkpoint, path, patch, stage)
    with Checkpoint.open(path) as checkpoint:
        require_target(checkpoint, patch, stage("verify", _size(checkpoint.specs)))
    return done


def _overwrite(checkpoint: Checkpoint, path: Path, patch: Patch, stage: Stage) -> None:
    if restructures(patch) or patch.index.tied.keys() & checkpoint.specs.keys():
        # Swapping a link to the folder would leave the folder itself as it was.
        out = path.resolve() if path.is_dir() else path
        _write_target(checkpoint, patch, out, stage, overwrite=True)
        return
    patched = PatchedState(checkpoint, patch)
    check_promise(patch, patched.specs)
    overwrite_in_place(path, _all_changes(patched, stage), proof=patch.target_digest)


def _all_changes(patched: PatchedState, stage: Stage) -> Iterator[tuple[str, Changes]]:
    """Every proven change, one piece in memory at a time, positions counted from the tensor's start."""
    heads = patched.patch.heads
    progress = stage("apply", sum(pieces[0][1].spec.n_bytes for pieces in heads.values()))
    for name, pieces in heads.items():
        for bucket, head in pieces:
            yield name, from_tensor_start(patched.changes(bucket, head), head.start, head.stop)
            progress(head.n_elements * head.spec.dtype.n_bytes)


def from_tensor_start(changes: Changes, start: int, stop: int) -> Changes:
    """A piece's changes with positions counted from its tensor's start; none reaches ``stop``."""
    if start == 0:
        return changes
    wide = np.dtype(np.uint32 if stop <= 1 << 32 else np.uint64)
    positions = changes.positions.astype(wide, copy=False) + wide.type(start)
    return Changes(positions, changes.bits)


def _write_target(
    base: Checkpoint, patch: Patch, out: Path, stage: Stage, *, overwrite: bool
) -> None:
    target = _ProvenTarget(base, patch)
    progress = stage("apply", _size(target.specs))
    write_checkpoint(out, base, target.specs, target.read, overwrite=overwrite, progress=progress)


class _ProvenTarget:
    """The target as it streams into a new checkpoint, each tensor read once, from its start.

    Tensors without a record are proven when their last piece goes by, which is before the new
    checkpoint gets its name. An alias that the base stores as a tensor of its own stays one.
    """

    def __init__(self, base: Checkpoint, patch: Patch) -> None:
        """Check all that can be known before the first read.

        Raises:
            BaseMismatch, MissingTensor, TargetMismatch: as ``apply_to_new``.
        """
        self._patched = PatchedState(base, patch)
        self._unchanged = patch.index.unchanged
        self._aliases = {a: name for a, name in patch.index.tied.items() if a in base.specs}
        self._running: dict[str, TensorDigest] = {}
        check_promise(patch, self._patched.specs)
        for name, spec in self._patched.specs.items():
            if name in self._unchanged and spec.n_elements == 0:
                self._check(name, TensorDigest())

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The target's tensors, stored aliases included."""
        specs = self._patched.specs
        return {**specs, **{a: replace(specs[n], name=a) for a, n in self._aliases.items()}}

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Proven bits; of an unchanged tensor, proven once its last element is asked for."""
        if name in self._aliases:
            return self._patched.read(self._aliases[name], start, stop)
        bits = self._patched.read(name, start, stop)
        if name in self._unchanged:
            self._count(name, bits, start, stop)
        return bits

    def _count(self, name: str, bits: Bits, start: int, stop: int) -> None:
        before = self._running.pop(name, TensorDigest())
        self._running[name] = before + digest_bits(bits, start)
        if stop == self._patched.specs[name].n_elements:
            self._check(name, self._running.pop(name))

    def _check(self, name: str, found: TensorDigest) -> None:
        if str(found) != self._unchanged[name]:
            raise BaseMismatch(
                f"tensor {name!r:.200}: its bits have digest {found}, the patch needs"
                f" {self._unchanged[name]}; nothing was written; start from the version it was"
                " made for"
            )


def _size(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.n_bytes for spec in specs.values())
