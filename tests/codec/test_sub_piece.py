from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.codec.piece import EncodedPiece, decode_piece, encode_piece, sub_piece
from weightwire.errors import CorruptStream
from weightwire.kernels.contract import Streams
from weightwire.model import dtype_named

BF16 = dtype_named("BF16")
N = (1 << 17) + 12345


def states(share: float) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(3)
    old = (source.standard_normal(N) * 0.02).astype(np.float32).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    new = old.copy()
    new[source.random(N) < share] += 1
    new[70_000:80_000] ^= 0x1234  # a stretch that is cheaper dense
    return old, new


PIECES = {
    (codec, share): (*states(share), encode_piece(*states(share), BF16, codec))
    for codec in ("compact", "plain")
    for share in (0.0001, 0.01, 0.4)
}


@pytest.mark.parametrize("key", PIECES)
@settings(deadline=None)
@given(st.data())
def test_chunks_of_a_piece_decode_to_the_changes_in_them(
    key: tuple[str, float], data: st.DataObject
) -> None:
    old, new, piece = PIECES[key]
    n_chunks = len(piece.streams.directory)
    first = data.draw(st.integers(0, n_chunks - 1))
    last = data.draw(st.integers(first + 1, n_chunks))
    part = sub_piece(piece, first, last, BF16)
    start = first << piece.chunk_log2
    stop = start + part.n_elements
    changes = decode_piece(old[start:stop], part, BF16)
    patched = old[start:stop].copy()
    patched[changes.positions] = changes.bits
    assert patched.tobytes() == new[start:stop].tobytes()
    assert (stop == N) == (last == n_chunks)


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_directory_that_does_not_match_its_payload_is_refused(codec: str) -> None:
    _, _, piece = PIECES[codec, 0.01]
    cut = Streams(piece.streams.directory, piece.streams.payload[:-4], piece.n_changed)
    lying = EncodedPiece(piece.n_elements, piece.model, piece.chunk_log2, cut)
    with pytest.raises(CorruptStream, match="directory"):
        sub_piece(lying, 0, 1, BF16)
