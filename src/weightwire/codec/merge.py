"""Several patches in, one net patch out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from weightwire.codec.index import PatchIndex
from weightwire.codec.patch import Patch
from weightwire.codec.patched import PatchedState
from weightwire.codec.piece import plain_piece
from weightwire.codec.plain_changes import encode_changes
from weightwire.codec.record import Kind, Record, full_record, patch_record
from weightwire.codec.writer import BucketSink, PatchWriter
from weightwire.diff.compare import diff_states
from weightwire.diff.state import StateReader
from weightwire.errors import IncompatiblePatches
from weightwire.model import Bits, Changes


def merge_states(
    base: StateReader | None,
    patches: Sequence[Patch],
    sink: BucketSink,
    codec: str | None = None,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> PatchIndex:
    """Write the buckets of the net patch over a chain of patches, and give its index.

    With a base, positions that came back to their old bits disappear. Without one, all patches
    must be plain, and such positions stay, since nobody knows the old bits.

    Raises:
        IncompatiblePatches: not a chain, or compact patches without a base.
        BaseMismatch: not the base of the first patch.
    """
    check_chain(patches)
    if base is None:
        if codec not in (None, "plain"):
            raise IncompatiblePatches(
                f"a {codec} patch needs a base to be made; give it with --base"
            )
        return _merge_plain(patches, PatchWriter(sink, "plain"))
    state = base
    for patch in patches:
        state = PatchedState(state, patch)
    index = diff_states(base, state, sink, codec or patches[-1].codec, progress=progress)
    if (index.base_digest, index.target_digest) != (
        patches[0].base_digest,
        patches[-1].target_digest,
    ):
        raise IncompatiblePatches(
            f"the chain leads from {patches[0].base_digest} to {patches[-1].target_digest}, this"
            f" base gave {index.base_digest} to {index.target_digest}"
        )
    return index


def check_chain(patches: Sequence[Patch]) -> None:
    """Each patch must start where the one before it ends.

    Raises:
        IncompatiblePatches: none given, or a gap; names the place.
    """
    if not patches:
        raise IncompatiblePatches("no patches to merge")
    for number, (first, second) in enumerate(pairwise(patches), start=1):
        if first.target_digest != second.base_digest:
            raise IncompatiblePatches(
                f"patch {number} leads to {first.target_digest}, patch {number + 1} starts from"
                f" {second.base_digest}; give them in order, without gaps"
            )


def _merge_plain(patches: Sequence[Patch], writer: PatchWriter) -> PatchIndex:
    if any(patch.codec != "plain" for patch in patches):
        raise IncompatiblePatches(
            "compact patches need their base to be merged; give it with --base"
        )
    unchanged: dict[str, str] = {}
    for name in _names(patches):
        versions = [patch for patch in patches if name in patch.heads]
        if not versions:
            unchanged[name] = patches[-1].index.unchanged[name]
        for record in _merge_tensor(versions, name):
            writer.add(record)
    last = patches[-1].index
    return writer.finish(
        base_digest=patches[0].base_digest,
        target_digest=last.target_digest,
        n_tensors=last.n_tensors,
        n_elements=last.n_elements,
        unchanged=unchanged,
        removed=_removed(patches),
        tied=last.tied,
    )


def _names(patches: Sequence[Patch]) -> list[str]:
    """The tensors of the last target."""
    last = patches[-1]
    return [*last.heads, *last.index.unchanged]


def _removed(patches: Sequence[Patch]) -> list[str]:
    there = set(_names(patches)) | set(patches[-1].index.tied)
    gone = {name: None for patch in patches for name in patch.index.removed}
    return [name for name in gone if name not in there]


def _merge_tensor(patches: Sequence[Patch], name: str) -> Iterator[Record]:
    """Net records of one tensor, a piece at a time; a FULL record forgets what was before it."""
    fulls = [n for n, patch in enumerate(patches) if patch.heads[name][0][1].kind is Kind.FULL]
    patches = patches[fulls[-1] :] if fulls else patches
    versions = [patch.heads[name] for patch in patches]
    if len({len(version) for version in versions}) > 1:
        raise IncompatiblePatches("patches cut their tensors differently; merge them with a base")
    for pieces in zip(*versions, strict=True):
        found = zip(patches, pieces, strict=True)
        yield _merge_piece([patch.record(bucket, head.key) for patch, (bucket, head) in found])


def _merge_piece(records: Sequence[Record]) -> Record:
    first, last = records[0].head, records[-1].head
    if any(
        record.head.start != first.start or record.head.stop != first.stop for record in records
    ):
        raise IncompatiblePatches("patches cut their tensors differently; merge them with a base")
    head = replace(last, base_digest=first.base_digest, base_shape=first.base_shape)
    if first.kind is Kind.FULL:
        head = replace(head, kind=Kind.FULL, base_shape=last.spec.shape, n_changed=last.n_elements)
        return full_record(head, _overwritten(records))
    changes = _net_changes([record.changes(None) for record in records], last.spec.dtype.bits_dtype)
    streams = encode_changes(last.n_elements, changes)
    return patch_record(head, plain_piece(last.n_elements, streams))


def _overwritten(records: Sequence[Record]) -> Bits:
    bits: Bits = records[0].full_bits().copy()
    for record in records[1:]:
        changes = record.changes(None)
        bits[changes.positions] = changes.bits
    return bits


def _net_changes(versions: Sequence[Changes], dtype: np.dtype[np.unsignedinteger]) -> Changes:
    positions = np.concatenate([changes.positions for changes in versions])
    bits = np.concatenate([changes.bits for changes in versions]).astype(dtype)
    newest_first = positions[::-1]
    kept, index = np.unique(newest_first, return_index=True)
    return Changes(kept, bits[::-1][index])
