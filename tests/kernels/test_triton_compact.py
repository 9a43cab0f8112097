"""The GPU's encoder gives the bytes of the reference, and its decoder reads them back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from weightwire.codec.classes import build_model, choose_chunk_log2
from weightwire.codec.piece import EncodedPiece, encode_piece
from weightwire.errors import CorruptStream, StopError
from weightwire.kernels.contract import Streams
from weightwire.kernels.model_batch import batch_of
from weightwire.kernels.native import NativeKernels
from weightwire.model import Bits, DType, dtype_named

pytest.importorskip("triton", reason="triton is not installed: nothing to compare with")

from weightwire.codec.batch_bytes import model_bytes_of
from weightwire.codec.device_pieces import _parts, decode_pieces, encode_pieces
from weightwire.codec.model_bytes import model_bytes
from weightwire.kernels.triton import slabs
from weightwire.kernels.triton.encode import encode_compact_all
from weightwire.kernels.triton.memories import Memories
from weightwire.kernels.triton.slabs import Work

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges

NATIVE = NativeKernels()
SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}
DTYPES = [
    "BF16",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I16", "I32")
    ),
]
BUDGET = 1 << 26


def weights(rng: np.random.Generator, n: int, dtype: DType) -> Bits:
    """Bits like those of a layer's weights."""
    floats = (rng.normal(size=n) * 0.02).astype(np.float32)
    if dtype.name == "F16":
        return floats.astype(np.float16).view(np.uint16)
    if dtype.name in {"BF16", "F32"}:
        return (floats.view(np.uint32) >> (32 - 8 * dtype.n_bytes)).astype(dtype.bits_dtype)
    return rng.integers(0, 256, n).astype(dtype.bits_dtype)


def changed(rng: np.random.Generator, old: Bits, density: float, wild: float = 0.0) -> Bits:
    """Some elements a few steps away, and some anywhere."""
    new = old.copy()
    moved = rng.random(len(old)) < density
    steps = rng.choice(
        [1, -1, 2, -2, 3, -5, 77], size=len(old), p=[0.4, 0.4, 0.07, 0.07, 0.02, 0.02, 0.02]
    )
    new[moved] = (old[moved].astype(np.int64) + steps[moved]).astype(old.dtype)
    anywhere = rng.random(len(old)) < wild
    new[anywhere] = rng.integers(0, np.iinfo(old.dtype).max, anywhere.sum()).astype(old.dtype)
    return new


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    import torch

    return torch.from_numpy(bits.copy().view(SIGNED[bits.itemsize])).to(device)


def on_host(tensor: torch.Tensor, kind: Any) -> Any:
    return tensor.cpu().numpy().view(kind)


def pieces_of(rng: np.random.Generator, dtype: DType, scale: int) -> list[tuple[Bits, Bits]]:
    """Empty, one element, unchanged, tails, all changed, chunk borders, steps no sample foretells."""
    cases = [
        (1200 * scale, 0.01, 0.0),
        (1, 1.0, 0.0),
        (0, 0.0, 0.0),
        (700, 0.0, 0.0),
        (1100, 0.012, 0.004),
        (40, 0.9, 0.0),
        (4097 * scale, 0.004, 0.0005),
    ]
    olds = [weights(rng, n, dtype) for n, _, _ in cases]
    return [(old, changed(rng, old, d, w)) for old, (_, d, w) in zip(olds, cases, strict=True)]


def assert_same(found: Streams, wanted: Streams) -> None:
    assert found.directory.tolist() == wanted.directory.tolist()
    assert found.payload.tobytes() == wanted.payload.tobytes()
    assert found.n_changed == wanted.n_changed


def assert_turns(old: Bits, new: Bits, changes: DeviceChanges) -> None:
    """Written, they turn old into new; and besides the changes only what stays as it is."""
    positions = on_host(changes.positions, np.uint32)
    written = old.copy()
    written[positions] = on_host(changes.bits, old.dtype)
    assert written.tobytes() == new.tobytes()
    assert changes.n_changed == np.count_nonzero(old != new)
    is_change = old[positions] != new[positions]
    assert positions[is_change].tolist() == np.flatnonzero(old != new).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_and_changes_are_those_of_the_reference(name: str, device: torch.device) -> None:
    dtype, rng = dtype_named(name), np.random.default_rng(7)
    pairs = pieces_of(rng, dtype, 1 if device.type == "cpu" else 400)
    olds, news = ([on(device, bits) for bits in side] for side in zip(*pairs, strict=True))
    coded = encode_pieces(olds, news, dtype, budget_bytes=BUDGET)
    for (old, new), piece in zip(pairs, coded, strict=True):
        wanted = encode_piece(old, new, dtype, n_threads=1)
        assert_same(piece.streams, wanted.streams)
        assert piece.on_host().model == wanted.model
        assert piece.chunk_log2 == wanted.chunk_log2
    for (old, new), changes in zip(pairs, decode_pieces(olds, coded, dtype), strict=True):
        assert_turns(old, new, changes)


@pytest.mark.parametrize("name", ["F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I16", "I32"])
def test_rarer_types_give_the_references_bytes_too(name: str, device: torch.device) -> None:
    dtype, rng = dtype_named(name), np.random.default_rng(17)
    olds = [weights(rng, n, dtype) for n in (1100, 40)]
    news = [changed(rng, olds[0], 0.012, 0.004), changed(rng, olds[1], 0.9)]
    sides = [[on(device, bits) for bits in side] for side in (olds, news)]
    coded = encode_pieces(*sides, dtype, budget_bytes=BUDGET)
    found = decode_pieces(sides[0], coded, dtype)
    for old, new, piece, changes in zip(olds, news, coded, found, strict=True):
        assert_same(piece.streams, encode_piece(old, new, dtype, n_threads=1).streams)
        assert_turns(old, new, changes)


def test_pieces_with_more_changes_than_their_samples_foretold_are_coded_again(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    dtype, rng = dtype_named("BF16"), np.random.default_rng(3)
    old = weights(rng, 2000, dtype)
    new = old.copy()
    new[5:205] ^= 1
    calm = changed(rng, old, 0.003)
    pairs = [(old, calm), (old, new), (old, calm)]
    surveys = [NATIVE.survey(a, b, dtype) for a, b in pairs]
    models = [build_model(survey, dtype) for survey in surveys]
    chunks = [choose_chunk_log2(survey) for survey in surveys]
    olds, news = ([on(device, bits) for bits in side] for side in zip(*pairs, strict=True))
    work = Work(Memories(olds, news), dtype, batch_of(models, chunks), np.zeros(3))
    with caplog.at_level("INFO"):
        found = list(encode_compact_all([work], budget_bytes=BUDGET))
    assert "once more" in caplog.text
    for (a, b), model, chunk, coded in zip(pairs, models, chunks, found, strict=True):
        assert_same(coded, NATIVE.encode_compact(a, b, dtype, model, chunk, 1))


def test_piece_for_which_the_device_has_no_room_is_coded_on_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dtype, rng = dtype_named("BF16"), np.random.default_rng(5)
    old = weights(rng, 900, dtype)
    new = old ^ 1
    survey = NATIVE.survey(old, changed(rng, old, 0.003), dtype)
    model, chunk = build_model(survey, dtype), choose_chunk_log2(survey)
    memories = Memories([on(device, old)], [on(device, new)])
    work = Work(memories, dtype, batch_of([model], [chunk]), np.zeros(1))
    begin = slabs._begin

    def full(*args: Any, is_roomy: bool = False) -> Any:
        if is_roomy:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return begin(*args)

    monkeypatch.setattr(slabs, "_begin", full)
    (coded,) = encode_compact_all([work], budget_bytes=BUDGET)
    assert "coded on the host" in caplog.text
    assert_same(coded, NATIVE.encode_compact(old, new, dtype, model, chunk, 1))


def test_pieces_that_go_ahead_give_the_bytes_of_all_pieces_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.codec.device_pieces._WHOLE_ELEMENTS", 1)
    dtype, rng = dtype_named("BF16"), np.random.default_rng(9)
    pairs = [(old, changed(rng, old, 0.02)) for old in [weights(rng, 900, dtype) for _ in range(3)]]
    olds, news = ([on(device, bits) for bits in side] for side in zip(*pairs, strict=True))
    coded = encode_pieces(olds, news, dtype, budget_bytes=BUDGET)
    assert _parts(olds) == [slice(0, 2), slice(2, 3)]
    again = encode_pieces(olds[1:2], news[1:2], dtype, budget_bytes=BUDGET)
    both = [coded[2], *again, coded[0], coded[1]]
    assert model_bytes_of(both) == [
        model_bytes(piece.model, piece.chunk_log2) for piece in both if piece.model is not None
    ]
    for (old, new), piece in zip(pairs, coded, strict=True):
        assert_same(piece.streams, encode_piece(old, new, dtype, n_threads=1).streams)
    mixed = [1, 0, 2]
    found = decode_pieces([olds[n] for n in mixed], [coded[n] for n in mixed], dtype)
    for n, changes in zip(mixed, found, strict=True):
        assert_turns(*pairs[n], changes)


def test_slabs_give_the_bytes_of_all_pieces_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.kernels.triton.slabs.MIN_BUDGET", 1500)
    dtype, rng = dtype_named("BF16"), np.random.default_rng(8)
    pairs = [
        (old, changed(rng, old, 0.02)) for old in [weights(rng, 1100, dtype) for _ in range(3)]
    ]
    surveys = [NATIVE.survey(a, b, dtype) for a, b in pairs]
    models = [build_model(survey, dtype) for survey in surveys]
    chunks = [choose_chunk_log2(survey) for survey in surveys]
    olds, news = ([on(device, bits) for bits in side] for side in zip(*pairs, strict=True))
    work = Work(Memories(olds, news), dtype, batch_of(models, chunks), np.full(3, 0.02))
    for (a, b), model, chunk, coded in zip(
        pairs, models, chunks, encode_compact_all([work], budget_bytes=0), strict=True
    ):
        assert_same(coded, NATIVE.encode_compact(a, b, dtype, model, chunk, 1))


def test_chunks_with_more_exceptions_than_there_is_room_for_are_coded_on_the_host(
    device: torch.device,
) -> None:
    dtype, rng = dtype_named("BF16"), np.random.default_rng(4)
    old = weights(rng, 4096, dtype)
    new = changed(rng, old, 0.0, wild=0.03)
    # A model of single steps: every change is an exception.
    calm = changed(rng, old, 0.0)
    calm[:50] ^= 1
    survey = NATIVE.survey(old, calm, dtype)
    model, chunk = build_model(survey, dtype), 16
    memories = Memories([on(device, old)], [on(device, new)])
    work = Work(memories, dtype, batch_of([model], [chunk]), np.array([0.02]))
    (found,) = encode_compact_all([work], budget_bytes=BUDGET)
    assert_same(found, NATIVE.encode_compact(old, new, dtype, model, chunk, 1))


@pytest.fixture(scope="module")
def piece() -> tuple[Bits, Bits, EncodedPiece]:
    dtype, rng = dtype_named("BF16"), np.random.default_rng(5)
    old = weights(rng, 5000, dtype)
    new = changed(rng, old, 0.01, wild=0.0006)
    return old, new, encode_piece(old, new, dtype, n_threads=1)


@pytest.mark.long
@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("bit", [0, 31])
def test_a_flipped_bit_is_refused_or_decodes_as_on_the_cpu(
    place: float, bit: int, piece: tuple[Bits, Bits, EncodedPiece], device: torch.device
) -> None:
    old, _, coded = piece
    dtype = dtype_named("BF16")
    words = coded.streams.payload.copy().view("<u4")
    words[int(place * len(words))] ^= np.uint32(1 << bit)
    assert_like_the_cpu(old, with_streams(coded, payload=words.view(np.uint8)), dtype, device)


@pytest.mark.parametrize(
    "head",
    [
        1 << 23,
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in (0xFF << 24, 1 << 22, (1 << 21) - 1, 1 << 21, 0)
        ),
        1,
    ],
)
def test_a_false_head_is_refused_or_decodes_as_on_the_cpu(
    head: int, piece: tuple[Bits, Bits, EncodedPiece], device: torch.device
) -> None:
    old, _, coded = piece
    directory = coded.streams.directory.copy()
    directory[0, 0] ^= np.uint32(head)
    assert_like_the_cpu(old, with_streams(coded, directory=directory), dtype_named("BF16"), device)


def with_streams(coded: EncodedPiece, **parts: Any) -> EncodedPiece:
    return dataclasses.replace(coded, streams=coded.streams._replace(**parts))


def assert_like_the_cpu(old: Bits, coded: EncodedPiece, dtype: DType, device: torch.device) -> None:
    try:
        wanted = NATIVE.decode_compact(old, dtype, coded.model, coded.chunk_log2, coded.streams, 1)
        if len(wanted) != coded.streams.n_changed:
            raise CorruptStream("another number of changes")
    except CorruptStream:
        with pytest.raises(CorruptStream):
            decode_pieces([on(device, old)], [coded], dtype)
        return
    (found,) = decode_pieces([on(device, old)], [coded], dtype)
    new = old.copy()
    new[wanted.positions] = wanted.bits
    assert_turns(old, new, found)


def test_pieces_of_either_codec_are_decoded_but_not_together(device: torch.device) -> None:
    dtype = dtype_named("BF16")
    old, new = np.arange(10, dtype=np.uint16), np.arange(1, 11, dtype=np.uint16)
    here = [on(device, old)]
    plain = encode_piece(old, new, dtype, "plain", n_threads=1)
    (coded,) = encode_pieces(here, [on(device, new)], dtype, "plain", budget_bytes=BUDGET)
    assert_same(coded.streams, plain.streams)
    assert (coded.model, coded.chunk_log2) == (plain.model, plain.chunk_log2)
    for piece in (plain, coded):
        assert_turns(old, new, decode_pieces(here, [piece], dtype)[0])
    compact = encode_piece(old, new, dtype, n_threads=1)
    with pytest.raises(StopError, match="both codecs"):
        decode_pieces(here * 2, [plain, compact], dtype)
    with pytest.raises(StopError, match="no codec"):
        encode_pieces(here, here, dtype, "dense", budget_bytes=BUDGET)
