"""That what was measured is right: the same bits after the round trip, the same bytes as the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ours
import torch
from states import Pair

from weightwire.codec.piece import encode_piece, thread_count
from weightwire.kernels import available_backends, kernels, use_backend
from weightwire.kernels.contract import Streams

REFERENCE_ELEMENTS = 1 << 14
"""The reference is a definition, not a fast one: it is shown the start of a piece."""


class Wrong(Exception):
    """A kernel gave other bits than it must."""


def choose_cpu() -> str:
    """Native kernels if they load, else the reference."""
    use_backend("native" if "native" in available_backends() else "reference")
    return kernels().name


def some_pieces(pair: Pair) -> list[int]:
    """The first, the last, one between them, and the shortest."""
    sizes = [piece.stop - piece.start for piece in pair.model.pieces]
    last = len(sizes) - 1
    return sorted({0, last // 2, last, min(range(len(sizes)), key=sizes.__getitem__)})


def check_streams(pair: Pair, codec: str, encoded: Sequence[Any]) -> str:
    """A few pieces are coded as the CPU codes them.

    Raises:
        Wrong: the first difference.
    """
    chosen, element = some_pieces(pair), pair.model.element
    olds, news = ([pair.pieces_of(flat)[i] for i in chosen] for flat in (pair.old, pair.new))
    pieces = [encoded[i] for i in chosen]
    if kernels().name == "reference":
        olds, news = ([bits[:REFERENCE_ELEMENTS] for bits in many] for many in (olds, news))
        n_bytes = element.n_bytes * sum(len(bits) for bits in olds)
        pieces = ours.encode(olds, news, element, codec, n_bytes)
    for number, old, new, piece in zip(chosen, olds, news, pieces, strict=True):
        wanted = encode_piece(on_host(old), on_host(new), element.dtype, codec)
        if getattr(piece, "model", wanted.model) != wanted.model:
            raise Wrong(f"piece {number}: another model than the CPU's")
        if getattr(piece, "chunk_log2", wanted.chunk_log2) != wanted.chunk_log2:
            raise Wrong(f"piece {number}: another chunk size than the CPU's")
        _check_same(number, piece.streams, wanted.streams)
    return f"{len(chosen)} pieces like {kernels().name}"


def _check_same(number: int, found: Streams, wanted: Streams) -> None:
    if found.n_changed != wanted.n_changed:
        raise Wrong(f"piece {number}: {found.n_changed} changes, not {wanted.n_changed}")
    for part in ("directory", "payload"):
        ours_bytes, theirs = (getattr(streams, part).tobytes() for streams in (found, wanted))
        if ours_bytes != theirs:
            raise Wrong(f"piece {number}: another {part} ({len(ours_bytes)}, {len(theirs)} bytes)")


def check_digests(pair: Pair, digests: Any) -> str:
    """A few pieces have the CPU's digest.

    Raises:
        Wrong: one has not.
    """
    found, chosen = ours.lanes(digests), some_pieces(pair)
    for number in chosen:
        bits, first = pair.pieces_of(pair.new)[number], pair.first_indices[number]
        wanted = kernels().digest(on_host(bits), first, thread_count())
        if found[number] != wanted:
            raise Wrong(f"digest of piece {number}: {found[number]}, not {wanted}")
    return f"{len(chosen)} pieces like {kernels().name}"


def check_moved_digests(pair: Pair, before: Any, moved: Any, after: Any) -> str:
    """Old digests and what the changes add to them are the new digests.

    Raises:
        Wrong: not for some piece.
    """
    lanes = [np.array(ours.lanes(part), dtype=np.uint64) for part in (before, moved, after)]
    if not np.array_equal(lanes[0] + lanes[1], lanes[2]):
        raise Wrong("digests moved by the changes differ from those of the new version")
    return f"all {len(pair.model.pieces)} pieces"


def on_host(bits: torch.Tensor) -> Any:
    """Bits as the CPU kernels want them."""
    return bits.cpu().numpy().view(f"<u{bits.element_size()}")
