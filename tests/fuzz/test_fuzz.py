"""Random bodies against the decoders: refused with a typed error, or decoded the same by both backends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weightwire.codec.body import body_bytes, parse_body
from weightwire.codec.piece import Codec, EncodedPiece, decode_piece, encode_piece
from weightwire.errors import CorruptStream, MalformedRecord
from weightwire.kernels.native import NativeKernels
from weightwire.kernels.reference import ReferenceKernels
from weightwire.model import Bits, Changes, DType, dtype_named

NATIVE, REFERENCE = NativeKernels(), ReferenceKernels()
TYPES = ("U8", "F8_E4M3", "F8_E5M2", "U16", "F16", "BF16", "U32", "F32", "U64", "F64")
N_NATIVE, N_BOTH = 2000, 150
"""Cases per element type: against the native decoder alone, and against both."""


def sample(source: random.Random, dtype: DType) -> tuple[Bits, Bits]:
    n = source.choice((1, 5, 16, 64, 200, 1030))
    old = np.frombuffer(source.randbytes(n * dtype.n_bytes), dtype.bits_dtype)
    if source.random() < 0.5 and dtype.ordered:
        old = (old >> dtype.bits_dtype.type(2)) | dtype.bits_dtype.type(1 << dtype.key_shift)
    new = old.copy()
    for place in source.sample(range(n), source.randrange(n + 1)):
        new[place] = (int(new[place]) + source.choice((1, -1, 1, -1, 3, 12345))) % (
            1 << 8 * dtype.n_bytes
        )
    return old, new


def damaged(source: random.Random, body: bytes) -> bytes:
    """A body with a few bytes changed, words dropped, doubled or swapped."""
    raw = bytearray(body)
    for _ in range(source.choice((1, 1, 1, 2, 5))):
        if not raw:
            return bytes(raw)
        at = source.randrange(len(raw))
        kind = source.randrange(6)
        if kind < 3:
            raw[at] ^= 1 << source.randrange(8)
        elif kind == 3:
            raw[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 4:
            del raw[at & ~3 : (at & ~3) + 4]
        else:
            raw[at & ~3 : at & ~3] = source.randbytes(4)
    return bytes(raw)


def parsed(body: bytes, codec: Codec, n: int, n_changed: int, dtype: DType) -> EncodedPiece | None:
    try:
        return parse_body(np.frombuffer(body, np.uint8), codec, n, n_changed, dtype)
    except MalformedRecord:
        return None


def outcome(kernels: object, old: Bits, piece: EncodedPiece, dtype: DType) -> Changes | None:
    try:
        if piece.model is None:
            return kernels.decode_plain(len(old), dtype, piece.streams, 1)  # type: ignore[attr-defined]
        return kernels.decode_compact(  # type: ignore[attr-defined]
            old, dtype, piece.model, piece.chunk_log2, piece.streams, 1
        )
    except CorruptStream:
        return None


def assert_sound(changes: Changes | None, old: Bits) -> None:
    """Whatever decodes lies inside its tensor and ascends."""
    if changes is None:
        return
    assert len(changes.positions) == len(changes.bits) <= len(old)
    assert changes.bits.dtype == old.dtype
    places = changes.positions.astype(np.int64)
    assert np.all(places[1:] > places[:-1])
    assert not len(places) or places[-1] < len(old)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_damaged_bodies_are_refused_or_decode_within_bounds(codec: Codec, name: str) -> None:
    source, dtype = random.Random(f"{codec} {name}"), dtype_named(name)
    n_refused = n_decoded = 0
    for number in range(N_NATIVE):
        if number % 20 == 0:
            old, new = sample(source, dtype)
            piece = encode_piece(old, new, dtype, codec, n_threads=1)
            body = body_bytes(piece)
        forged = parsed(damaged(source, body), codec, len(old), piece.n_changed, dtype)
        changes = forged and outcome(NATIVE, old, forged, dtype)
        assert_sound(changes, old)
        n_refused += changes is None
        n_decoded += changes is not None
    assert n_refused > N_NATIVE // 4
    print(f"{codec} {name}: {N_NATIVE} cases, {n_refused} refused, {n_decoded} decoded")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_both_decoders_judge_damaged_bodies_alike(codec: Codec, name: str) -> None:
    source, dtype = random.Random(f"both {codec} {name}"), dtype_named(name)
    for number in range(N_BOTH):
        if number % 10 == 0:
            old, new = sample(source, dtype)
            old, new = old[:200], new[:200]
            piece = encode_piece(old, new, dtype, codec, n_threads=1)
            body = body_bytes(piece)
        forged = parsed(damaged(source, body), codec, len(old), piece.n_changed, dtype)
        if forged is None:
            continue
        one, other = (outcome(kernels, old, forged, dtype) for kernels in (NATIVE, REFERENCE))
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.positions.tolist() == other.positions.tolist()
            assert one.bits.tobytes() == other.bits.tobytes()


def test_noise_as_a_whole_body_is_refused() -> None:
    source, bf16 = random.Random(5), dtype_named("BF16")
    old = np.arange(100, dtype=np.uint16)
    for _ in range(1000):
        body = source.randbytes(4 * source.randrange(40))
        forged = parsed(body, "compact", 100, 3, bf16)
        if forged is not None:
            with pytest.raises(CorruptStream):
                decode_piece(old, forged, bf16)
