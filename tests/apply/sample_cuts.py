"""Patches of one tensor that are cut anywhere: as publishers of any number of ranks cut them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from weightwire.codec.patch import MemoryBuckets, Patch
from weightwire.codec.piece import encode_piece
from weightwire.codec.record import KIND_OF_CODEC, RecordHead, patch_record
from weightwire.codec.writer import MemorySink, PatchWriter
from weightwire.diff.memory import open_state
from weightwire.digest import combine, digest_bits
from weightwire.model import Bits, TensorSpec


def cut_patch(
    name: str, old: np.ndarray, new: np.ndarray, cuts: Sequence[int], codec: str = "compact"
) -> Patch:
    """The patch from one array to another, in pieces that end at ``cuts``."""
    spec = open_state({name: new}).specs[name]
    before, after = (open_state({name: a}).read(name, 0, a.size) for a in (old, new))
    sink = MemorySink()
    writer = PatchWriter(sink, codec)
    edges = sorted({0, *cuts, spec.n_elements})
    for start, stop in pairwise(edges):
        writer.add(_record(spec, start, before[start:stop], after[start:stop], codec))
    index = writer.finish(
        base_digest=combine([(spec, digest_bits(before))]),
        target_digest=combine([(spec, digest_bits(after))]),
        n_tensors=1,
        n_elements=spec.n_elements,
        unchanged={},
        removed=(),
        tied={},
    )
    return Patch(index, MemoryBuckets(sink.files))


def _record(spec: TensorSpec, start: int, old: Bits, new: Bits, codec: str) -> object:
    piece = encode_piece(old, new, spec.dtype, codec)
    head = RecordHead(
        spec,
        KIND_OF_CODEC[codec],
        start,
        len(old),
        piece.n_changed,
        digest_bits(old, start),
        digest_bits(new, start),
        spec.shape,
    )
    return patch_record(head, piece)
