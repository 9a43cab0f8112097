"""Any two states of any bits: the patch gives exactly the target, with either codec and backend."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightwire as ww
from weightwire import limits
from weightwire.codec import CODECS, decode_piece, encode_piece
from weightwire.codec.body import body_bytes, parse_body
from weightwire.diff.views import _NUMPY_NAMES
from weightwire.errors import LimitExceeded, StopError
from weightwire.model import _DTYPES, Bits, DType, dtype_named

few = settings(max_examples=60, deadline=None)
codecs = st.sampled_from(CODECS)


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    ww.use_backend(request.param)
    yield request.param
    ww.use_backend(None)


@st.composite
def bit_pairs(draw: st.DrawFn) -> tuple[DType, Bits, Bits]:
    dtype = draw(st.sampled_from(_DTYPES))
    n = draw(st.integers(0, 80))
    old = draw(hnp.arrays(dtype.bits_dtype, n))
    new = old.copy()
    for place in draw(st.lists(st.integers(0, max(0, n - 1)), max_size=n)):
        new[place] = draw(st.integers(0, (1 << 8 * dtype.n_bytes) - 1))
    return dtype, old, new


@few
@given(bit_pairs(), codecs, st.sampled_from(["native", "reference"]))
def test_coded_pieces_give_back_every_bit(
    pair: tuple[DType, Bits, Bits], codec: str, backend: str
) -> None:
    dtype, old, new = pair
    ww.use_backend(backend)
    try:
        piece = encode_piece(old, new, dtype, codec)
        kept = encode_piece(old, new, dtype, codec, keep_changes=True)
        body = np.frombuffer(body_bytes(piece), np.uint8)
        parsed = parse_body(body, piece.codec, len(old), piece.n_changed, dtype)
        changes = decode_piece(old, parsed, dtype)
    finally:
        ww.use_backend(None)
    result = old.copy()
    result[changes.positions] = changes.bits
    assert result.tobytes() == new.tobytes()
    assert piece.n_changed == np.count_nonzero(old != new)
    assert piece.n_bytes == len(body)
    assert body_bytes(kept) == body.tobytes()
    assert kept.streams.changes is not None
    patched = old.copy()
    patched[kept.streams.changes.positions] = kept.streams.changes.bits
    assert patched.tobytes() == new.tobytes()


@st.composite
def states(draw: st.DrawFn) -> dict[str, np.ndarray]:
    state = {}
    for name in draw(st.lists(st.sampled_from("abcdé"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(_NUMPY_NAMES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        bits = draw(hnp.arrays(f"<u{dtype.itemsize}", shape))
        state[name] = np.asarray(bits & 1 if dtype == np.bool_ else bits).view(dtype)
    return state


@few
@given(states(), states(), codecs)
def test_any_state_becomes_any_other(
    base: dict[str, np.ndarray], target: dict[str, np.ndarray], codec: str
) -> None:
    patch = ww.diff(base, target, codec=codec)
    live = {name: array.copy() for name, array in base.items()}
    applied = ww.apply(live, patch)
    assert live.keys() == target.keys()
    for name, wanted in target.items():
        assert (live[name].dtype, live[name].shape) == (wanted.dtype, wanted.shape)
        assert live[name].tobytes() == wanted.tobytes()
    assert applied.digest == ww.digest(live) == ww.digest(target) == patch.target_digest


@pytest.mark.parametrize("codec", CODECS)
def test_patches_are_the_same_with_either_backend(codec: str) -> None:
    base = {"w": np.arange(5000, dtype=np.float32) / 3, "b": np.arange(70, dtype=np.float16)}
    target = {"w": base["w"].copy(), "b": base["b"] * 2}
    target["w"][::37] *= np.float32(1.0000001)
    found = []
    for name in ("native", "reference"):
        ww.use_backend(name)
        patch = ww.diff(base, target, codec=codec)
        found.append((patch.index, [record.body.tobytes() for record in patch.records()]))
    ww.use_backend(None)
    assert found[0] == found[1]


@pytest.mark.parametrize("codec", CODECS)
def test_saved_patches_load_as_they_were(codec: str, tmp_path: object, backend: str) -> None:
    base = {"w": np.arange(300, dtype=np.float32), "same": np.arange(4)}
    target = {"w": base["w"] + 1, "same": base["same"], "new": np.zeros((0, 3), np.int8)}
    patch = ww.diff(base, target, codec=codec)
    patch.save(f"{tmp_path}/patch")
    loaded = ww.Patch.load(f"{tmp_path}/patch")
    assert loaded.index == patch.index
    assert loaded.n_bytes == patch.n_bytes
    live = {name: array.copy() for name, array in base.items()}
    ww.apply(live, loaded)
    assert ww.digest(live) == ww.digest(target)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n_piece", [1, 7, 64])
def test_tensors_in_many_pieces_give_back_every_bit(
    codec: str, n_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PIECE_ELEMENTS", n_piece)
    monkeypatch.setattr(limits, "BUCKET_BYTES", 300)
    base = {"w": np.arange(130, dtype=np.float32), "v": np.arange(9), "x@64": np.arange(3)}
    target = {"w": base["w"].copy(), "v": base["v"] + 1, "x@64": base["x@64"] - 1}
    target["w"][[0, 64, 129]] *= -1
    patch = ww.diff(base, target, codec=codec)
    assert len(patch.heads["w"]) == -(-130 // n_piece)
    ww.apply(base, patch)
    assert {n: a.tobytes() for n, a in base.items()} == {n: a.tobytes() for n, a in target.items()}


def test_compact_piece_without_its_old_bits_is_refused() -> None:
    old, bf16 = np.zeros(10, np.uint16), dtype_named("BF16")
    piece = encode_piece(old, old + np.uint16(1), bf16)
    with pytest.raises(StopError, match="old bits"):
        decode_piece(None, piece, bf16)
    with pytest.raises(StopError, match="old bits"):
        decode_piece(old[1:], piece, bf16)


@pytest.mark.parametrize("target", [{}, {"a": np.ones(3)}, {"a": np.ones(3, np.int8)}])
def test_codec_that_does_not_exist_is_refused_whatever_there_is_to_code(
    target: dict[str, np.ndarray],
) -> None:
    with pytest.raises(StopError, match="no codec 'zip'"):
        ww.diff({"a": np.zeros(3)}, target, codec="zip")


def test_piece_longer_than_any_reader_accepts_is_refused() -> None:
    old = np.broadcast_to(np.uint8(0), limits.MAX_PIECE_ELEMENTS + 1)
    with pytest.raises(LimitExceeded, match="split it"):
        encode_piece(old, old, dtype_named("U8"))
