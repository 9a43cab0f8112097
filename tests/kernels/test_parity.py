"""Reference and native kernels give the same bytes, whatever the bits."""

from __future__ import annotations

import numpy as np
import pytest

from weightwire.codec.classes import build_model, choose_chunk_log2
from weightwire.kernels.contract import DENSE, PLAIN_CHUNK, Kernels, Streams
from weightwire.kernels.native import NativeKernels
from weightwire.kernels.reference import PLAIN_DENSE, ReferenceKernels
from weightwire.model import _DTYPES, Bits, DType, dtype_named

NATIVE, REFERENCE = NativeKernels(), ReferenceKernels()
SIZES = (0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097)
BF16 = dtype_named("BF16")
every_dtype = pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: dtype.name)


def noise(n: int, dtype: DType, seed: int = 0) -> Bits:
    """Arbitrary bits from integer arithmetic alone."""
    mixed = (np.arange(n, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - 8 * dtype.n_bytes)).astype(dtype.bits_dtype)


def weights(n: int, dtype: DType, seed: int = 0) -> Bits:
    """Bits whose exponents lie close together, as those of a layer do."""
    if not dtype.ordered:
        return noise(n, dtype, seed) & dtype.bits_dtype.type(0x3F)
    key = dtype.key_mask // 2 - noise(n, dtype_named("U8"), seed + 1).astype(np.int64) % 9
    key = np.clip(key, 0, dtype.key_mask).astype(dtype.bits_dtype)
    kept = dtype.bits_dtype.type((1 << 8 * dtype.n_bytes) - 1 - (dtype.key_mask << dtype.key_shift))
    return (noise(n, dtype, seed) & kept) | key << dtype.bits_dtype.type(dtype.key_shift)


def stepped(old: Bits, every: int, step: int = 1, first: int = 0) -> Bits:
    new = old.copy()
    new[first::every] += old.dtype.type(step % (1 << 8 * old.dtype.itemsize))
    return new


def assert_parity(old: Bits, new: Bits, dtype: DType) -> None:
    """Same survey, same streams, same changes, same digests; and the changes are the true ones."""
    at = np.flatnonzero(old != new)
    surveys = [kernels.survey(old, new, dtype) for kernels in (NATIVE, REFERENCE)]
    assert surveys[0].n_by_key.tolist() == surveys[1].n_by_key.tolist()
    assert np.array_equal(surveys[0].n_changed_by_key_token, surveys[1].n_changed_by_key_token)
    model, chunk_log2 = build_model(surveys[0], dtype), choose_chunk_log2(surveys[0])
    coded = [k.encode_compact(old, new, dtype, model, chunk_log2, 2) for k in (NATIVE, REFERENCE)]
    assert_same_streams(*coded)
    assert coded[0].n_changed == len(at)
    for kernels in (NATIVE, REFERENCE):
        kept = kernels.encode_compact(old, new, dtype, model, chunk_log2, 2, keep_changes=True)
        assert_kept(kept, coded[0], old, new)
    for kernels in (NATIVE, REFERENCE):
        changes = kernels.decode_compact(old, dtype, model, chunk_log2, coded[0], 2)
        assert changes.positions.tolist() == at.tolist()
        assert changes.bits.tobytes() == new[at].tobytes()
    assert_plain_parity(old, new, dtype)


def assert_plain_parity(old: Bits, new: Bits, dtype: DType) -> None:
    plain = [kernels.encode_plain(old, new, 2) for kernels in (NATIVE, REFERENCE)]
    assert_same_streams(*plain)
    for kernels in (NATIVE, REFERENCE):
        assert_kept(kernels.encode_plain(old, new, 2, keep_changes=True), plain[0], old, new)
    decoded = [k.decode_plain(len(old), dtype, plain[0], 2) for k in (NATIVE, REFERENCE)]
    assert decoded[0].positions.tolist() == decoded[1].positions.tolist()
    assert decoded[0].bits.tobytes() == decoded[1].bits.tobytes()
    for kernels in (NATIVE, REFERENCE):
        written = old.copy()
        kernels.scatter(written, decoded[0].positions, decoded[0].bits, 2)
        assert written.tobytes() == new.tobytes()
        together = [old.copy(), old.copy(), old[:0].copy()]
        wide = decoded[0].positions.astype(np.uint64)
        kernels.scatter_all(
            [
                (together[0], decoded[0].positions, decoded[0].bits),
                (together[1], wide, decoded[0].bits),
                (together[2], wide[:0], decoded[0].bits[:0]),
            ],
            2,
        )
        assert together[0].tobytes() == together[1].tobytes() == new.tobytes()
        again = old.copy()
        before = kernels.exchange(again, decoded[0].positions, decoded[0].bits, 2)
        assert again.tobytes() == new.tobytes()
        assert before.tobytes() == old[decoded[0].positions].tobytes()
        assert kernels.matches(written, decoded[0].positions, decoded[0].bits, 2)
        for place in decoded[0].positions[::97]:
            written[place] ^= 1
            assert not kernels.matches(written, decoded[0].positions, decoded[0].bits, 2)
            written[place] ^= 1
    at = np.flatnonzero(old != new).astype(np.uint32)
    for first in (0, 1, 255, 1 << 33):
        assert NATIVE.digest(new, first, 2) == REFERENCE.digest(new, first, 2)
        assert NATIVE.digest_at(at, new[at], first) == REFERENCE.digest_at(at, new[at], first)


def assert_kept(kept: Streams, dropped: Streams, old: Bits, new: Bits) -> None:
    """Kept changes are the true ones, in the promised types, and alter nothing in the streams."""
    assert_same_streams(kept, dropped)
    assert dropped.changes is None
    assert kept.changes is not None
    at = np.flatnonzero(old != new)
    assert (kept.changes.positions.dtype, kept.changes.bits.dtype) == (np.uint32, new.dtype)
    assert kept.changes.positions.tolist() == at.tolist()
    assert kept.changes.bits.tobytes() == new[at].tobytes()


def assert_same_streams(one: Streams, other: Streams) -> None:
    assert one.directory.tolist() == other.directory.tolist()
    assert one.payload.tobytes() == other.payload.tobytes()
    assert one.n_changed == other.n_changed


@pytest.mark.parametrize("n", SIZES)
def test_backends_agree_at_every_tail(n: int) -> None:
    old = weights(n, BF16)
    for new in (old.copy(), stepped(old, 7), stepped(old, 61, -1, 3), noise(n, BF16, 5)):
        assert_parity(old, new, BF16)


@every_dtype
@pytest.mark.parametrize("n", [0, 1, 17, 65, 700])
def test_backends_agree_on_every_type(dtype: DType, n: int) -> None:
    old = weights(n, dtype)
    for new in (old.copy(), stepped(old, 9), stepped(old, 1), noise(n, dtype, 3)):
        assert_parity(old, new, dtype)


@every_dtype
def test_backends_agree_on_arbitrary_bits_of_every_type(dtype: DType) -> None:
    old = noise(1500, dtype)
    mixed = np.where(np.arange(1500) % 11 == 0, noise(1500, dtype, 9), old)
    for new in (mixed, stepped(old, 2, 3), ~old):
        assert_parity(old, new, dtype)


@every_dtype
def test_backends_agree_where_all_elements_are_equal(dtype: DType) -> None:
    for value in (0, 1, (1 << 8 * dtype.n_bytes) - 1, 1 << (8 * dtype.n_bytes - 1)):
        old = np.full(333, value, dtype.bits_dtype)
        for new in (old.copy(), stepped(old, 50), stepped(old, 1), stepped(old, 1, -1)):
            assert_parity(old, new, dtype)


@pytest.mark.parametrize("place", [0, 15, 16, 4095, 4096, 65535, 65536, 70_000])
def test_backends_agree_on_a_single_change_anywhere(place: int) -> None:
    old = weights(70_001, BF16)
    new = old.copy()
    new[place] ^= 1
    assert_parity(old, new, BF16)


@pytest.mark.parametrize("name", ["U8", "BF16", "F32", "F64"])
def test_backends_agree_on_gaps_longer_than_a_chunk(name: str) -> None:
    dtype = dtype_named(name)
    old = weights(3 * (1 << 20) + 5, dtype)
    new = old.copy()
    new[[0, 65_600, (1 << 20) - 1, 1 << 20, -1]] ^= dtype.bits_dtype.type(1)
    assert_parity(old, new, dtype)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("every", [3, 40, 900])
def test_backends_agree_at_chunk_borders(extra: int, every: int) -> None:
    old = weights(PLAIN_CHUNK + extra, dtype_named("F16"))
    assert_parity(old, stepped(old, every), dtype_named("F16"))


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
def test_backends_agree_on_signed_zeros_infinities_nans_and_subnormals(name: str) -> None:
    dtype = dtype_named(name)
    sign = 1 << (8 * dtype.n_bytes - 1)
    inf = dtype.key_mask << dtype.key_shift
    special = [
        0,
        sign,
        1,
        sign | 1,
        inf,
        inf | sign,
        inf | 1,
        inf | sign | 1,
        sign - 1,
        2 * sign - 1,
    ]
    values = np.array(special, dtype=dtype.bits_dtype)
    old, new = np.repeat(values, len(values)), np.tile(values, len(values))
    assert_parity(old, new, dtype)
    assert_parity(new, old, dtype)


def test_streams_do_not_depend_on_the_number_of_threads() -> None:
    old = weights(300_000, BF16)
    new = stepped(old, 60)
    survey = NATIVE.survey(old, new, BF16)
    model = build_model(survey, BF16)
    one = NATIVE.encode_compact(old, new, BF16, model, 12, 1)
    for n_threads in (2, 3, 16):
        assert_same_streams(one, NATIVE.encode_compact(old, new, BF16, model, 12, n_threads))
        kept = NATIVE.encode_compact(old, new, BF16, model, 12, n_threads, keep_changes=True)
        assert_kept(kept, one, old, new)
        changes = NATIVE.decode_compact(old, BF16, model, 12, one, n_threads)
        assert changes.positions.tolist() == list(range(0, 300_000, 60))


@pytest.mark.parametrize("name", ["U8", "U16", "F32", "F64"])
def test_memory_at_odd_addresses_gives_the_same_bytes(name: str) -> None:
    dtype = dtype_named(name)
    old, new = weights(999, dtype), stepped(weights(999, dtype), 10)
    shifted = [
        np.frombuffer(b"x" + bits.tobytes(), np.uint8)[1:].view(bits.dtype) for bits in (old, new)
    ]
    survey = NATIVE.survey(old, new, dtype)
    model = build_model(survey, dtype)
    assert_same_streams(
        NATIVE.encode_compact(old, new, dtype, model, 10, 1),
        NATIVE.encode_compact(*shifted, dtype, model, 10, 1),
    )
    assert NATIVE.digest(new, 0, 1) == NATIVE.digest(shifted[1], 0, 1)


@every_dtype
def test_dense_chunks_keep_only_what_truly_changed(dtype: DType) -> None:
    old = noise(1 << 12, dtype)
    new = np.where(np.arange(len(old)) % 100 == 0, old, noise(len(old), dtype, 9))
    new[1 << 11 :] = old[1 << 11 :]
    model = build_model(NATIVE.survey(old, stepped(old, 60), dtype), dtype)
    for kernels in (NATIVE, REFERENCE):
        compact = kernels.encode_compact(old, new, dtype, model, 10, 2, keep_changes=True)
        assert_kept(compact, NATIVE.encode_compact(old, new, dtype, model, 10, 2), old, new)
        assert compact.directory[:, 0].tolist() == [DENSE, DENSE, 0, 0]
        plain = kernels.encode_plain(old[:2048], new[:2048], 2, keep_changes=True)
        assert_kept(plain, NATIVE.encode_plain(old[:2048], new[:2048], 2), old[:2048], new[:2048])
        assert (plain.directory >> 24).tolist() == [[PLAIN_DENSE]]


@pytest.mark.parametrize("kernels", [NATIVE, REFERENCE], ids=lambda kernels: kernels.name)
def test_kept_changes_do_not_follow_the_memory_they_came_from(kernels: Kernels) -> None:
    old = weights(5000, BF16)
    new = stepped(old, 7)
    model = build_model(kernels.survey(old, new, BF16), BF16)
    expected = new[::7].tobytes()
    compact = kernels.encode_compact(old, new, BF16, model, 12, 1, keep_changes=True)
    plain = kernels.encode_plain(old, new, 1, keep_changes=True)
    new[:] = 0
    for streams in (compact, plain):
        assert streams.changes is not None
        assert streams.changes.bits.tobytes() == expected
