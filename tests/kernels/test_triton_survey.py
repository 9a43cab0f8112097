"""Samples counted on the GPU are those the reference counts, for many pieces at once."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: no GPU kernels to test")
pytest.importorskip("triton", reason="triton is not installed: no GPU kernels to test")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.codec.classes import find_base_key, sums_by_class
from weightwire.errors import StopError
from weightwire.kernels.contract import N_CLASSES, N_TOKENS, WHOLE_SAMPLE, Survey
from weightwire.kernels.native import NativeKernels
from weightwire.kernels.reference import ReferenceKernels
from weightwire.kernels.triton.survey import SurveyBatch, survey_all
from weightwire.model import _DTYPES, Bits, DType, dtype_named

BF16, F32, U8 = dtype_named("BF16"), dtype_named("F32"), dtype_named("U8")
SERVED = [dtype for dtype in _DTYPES if dtype.n_bytes <= 4]
every_dtype = pytest.mark.parametrize("dtype", SERVED, ids=lambda dtype: dtype.name)


def noise(random: np.random.Generator, n: int, dtype: DType) -> Bits:
    return random.integers(0, 1 << 8 * dtype.n_bytes, n, dtype=dtype.bits_dtype)


def weights(random: np.random.Generator, n: int, dtype: DType) -> Bits:
    """Bits whose keys lie close together, as those of a layer do, with some far from them."""
    bits = noise(random, n, dtype)
    if not dtype.ordered:
        return bits
    width = dtype.bits_dtype.type
    near = np.maximum(dtype.key_mask - random.geometric(0.3, n), 0).astype(dtype.bits_dtype)
    key = np.where(random.random(n) < 0.9, near, noise(random, n, dtype) & width(dtype.key_mask))
    return (bits & ~width(dtype.key_mask << dtype.key_shift)) | key << width(dtype.key_shift)


def altered(random: np.random.Generator, old: Bits, rate: float, dtype: DType) -> Bits:
    """Changes by small steps, and some by any."""
    small = old + random.integers(-5, 6, len(old)).astype(old.dtype)
    new = np.where(random.random(len(old)) < 0.7, small, noise(random, len(old), dtype))
    return np.where(random.random(len(old)) < rate, new, old)


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    signed = bits if bits.dtype.itemsize == 1 else bits.view(f"<i{bits.dtype.itemsize}")
    return torch.from_numpy(signed.copy()).to(device)


def survey_on(device: torch.device, pieces: list[tuple[Bits, Bits]], dtype: DType) -> SurveyBatch:
    olds = [on(device, old) for old, _ in pieces]
    news = [on(device, new) for _, new in pieces]
    return survey_all(olds, news, dtype).to_host()


def assert_same_survey(batch: SurveyBatch, number: int, wanted: Survey) -> None:
    base_key = find_base_key(wanted.n_by_key)
    n_changed = sums_by_class(wanted.n_changed_by_key_token, base_key)
    assert batch.n_by_key[number].tolist() == wanted.n_by_key.tolist()
    assert int(batch.base_key[number]) == base_key
    assert batch.n_by_class[number].tolist() == sums_by_class(wanted.n_by_key, base_key).tolist()
    assert np.array_equal(batch.n_changed[number].numpy(), n_changed)


def assert_parity(device: torch.device, pieces: list[tuple[Bits, Bits]], dtype: DType) -> None:
    batch = survey_on(device, pieces, dtype)
    for number, (old, new) in enumerate(pieces):
        # Long samples are counted by the native kernels, which the reference is tested against.
        kernels = ReferenceKernels() if len(old) < 1 << 14 else NativeKernels()
        assert_same_survey(batch, number, kernels.survey(old, new, dtype))


@every_dtype
def test_surveys_of_many_pieces_agree(dtype: DType, device: torch.device) -> None:
    random = np.random.default_rng(dtype.code)
    pieces = []
    for n, rate in ((0, 1.0), (1, 1.0), (63, 0.0), (4095, 0.05), (4096, 1.0), (4097, 0.5)):
        old = weights(random, n, dtype)
        pieces.append((old, altered(random, old, rate, dtype)))
    assert_parity(device, pieces, dtype)


@every_dtype
def test_arbitrary_bits_agree(dtype: DType, device: torch.device) -> None:
    random = np.random.default_rng(1)
    pieces = [(noise(random, 3000, dtype), noise(random, 3000, dtype)) for _ in range(2)]
    assert_parity(device, pieces, dtype)


@every_dtype
def test_steps_at_the_border_of_every_token_agree(dtype: DType, device: torch.device) -> None:
    powers = [1 << e for e in range(8 * dtype.n_bytes)]
    steps = [p + p // 2 * half + near for p in powers for half in (0, 1) for near in (-1, 0, 1)]
    wide = np.array([s % (1 << 8 * dtype.n_bytes) for s in steps], dtype=np.uint64)
    new = wide.astype(dtype.bits_dtype)
    old = np.zeros_like(new)
    pieces = [(old, new), (new, old), (~old, new), (new, ~old), (old, ~new)]
    assert_parity(device, pieces, dtype)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (WHOLE_SAMPLE - 1, U8),
        (WHOLE_SAMPLE, BF16),
        (WHOLE_SAMPLE + 1, BF16),
        (1_000_003, F32),
        (5_000_003, U8),
    ],
)
def test_long_pieces_are_sampled_at_the_same_places(
    n: int, dtype: DType, device: torch.device
) -> None:
    random = np.random.default_rng(n)
    old = weights(random, n, dtype)
    assert_parity(device, [(old, altered(random, old, 0.03, dtype))], dtype)


def test_each_key_alone_and_outliers_at_their_border_agree(device: torch.device) -> None:
    pieces = []
    for key in (0, 1, 14, 15, 16, 17, 254, 255):
        old = np.full(2048, key << 7, dtype=np.uint16)
        pieces.append((old, old ^ np.uint16(1)))
    for n_outliers in (1, 2, 3):
        old = np.full(2048, 100 << 7, dtype=np.uint16)
        old[:n_outliers] = 200 << 7
        pieces.append((old, old))
    assert_parity(device, pieces, BF16)


def test_pieces_that_start_at_any_element_agree(device: torch.device) -> None:
    random = np.random.default_rng(5)
    old = weights(random, 5000, BF16)
    new = altered(random, old, 0.2, BF16)
    olds, news = on(device, old), on(device, new)
    cuts = [(0, 1), (1, 8), (7, 4500), (9, 9), (4999, 5000)]
    batch = survey_all([olds[a:b] for a, b in cuts], [news[a:b] for a, b in cuts], BF16).to_host()
    for number, (a, b) in enumerate(cuts):
        assert_same_survey(batch, number, ReferenceKernels().survey(old[a:b], new[a:b], BF16))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(SERVED),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=40),
)
def test_any_bits_agree(dtype: DType, pairs: list[tuple[int, int]]) -> None:
    bits = np.array(pairs, dtype=np.uint64).reshape(-1, 2).astype(dtype.bits_dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert_parity(device, [(bits[:, 0].copy(), bits[:, 1].copy())], dtype)


def test_shapes_are_those_promised(device: torch.device) -> None:
    old = np.zeros(3, dtype=np.uint16)
    batch = survey_on(device, [(old, old), (old, old)], BF16)
    assert batch.n_by_key.shape == (2, 256)
    assert batch.base_key.shape == (2,)
    assert batch.n_by_class.shape == (2, N_CLASSES)
    assert batch.n_changed.shape == (2, N_CLASSES, N_TOKENS)
    assert batch.counts.dtype == torch.int32


def test_pieces_that_do_not_match_are_refused(device: torch.device) -> None:
    short, long = torch.zeros(3, dtype=torch.int16), torch.zeros(4, dtype=torch.int16)
    with pytest.raises(StopError, match="different lengths"):
        survey_all([short], [long], BF16)
    with pytest.raises(StopError, match="different lengths"):
        survey_all([short, long], [short], BF16)
    with pytest.raises(StopError, match="have 4 bytes"):
        survey_all([short], [short], F32)
    with pytest.raises(StopError, match="no pieces"):
        survey_all([], [], BF16)
    with pytest.raises(StopError, match="8-byte"):
        survey_all([short.long()], [short.long()], dtype_named("F64"))
