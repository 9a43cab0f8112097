"""Models made many at once are those that ``build_model`` makes one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightwire as ww
from weightwire.codec.batch_bytes import batch_bytes
from weightwire.codec.classes import (
    build_model,
    choose_chunk_log2,
    find_base_key,
    sums_by_class,
)
from weightwire.codec.model_build import MAX_COUNT, build_models
from weightwire.codec.model_bytes import model_bytes
from weightwire.errors import StopError
from weightwire.kernels.contract import N_CLASSES, N_TOKENS, ClassModel, Survey
from weightwire.kernels.model_batch import ModelBatch
from weightwire.kernels.steps import max_token
from weightwire.model import _DTYPES, DType, dtype_named

BF16 = dtype_named("BF16")
every_dtype = pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: dtype.name)
Counts = npt.NDArray[np.int64]


@pytest.fixture(params=["native", "reference"], autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    ww.use_backend(request.param)
    yield
    ww.use_backend(None)


def random_survey(random: np.random.Generator, dtype: DType, n_elements: int) -> Survey:
    """Elements on a few neighbouring keys and anywhere; steps of all sizes, of one, or of none."""
    n_keys = dtype.key_mask + 1
    first, last = sorted(random.integers(0, n_keys, 2).tolist())
    spread = np.zeros(n_keys)
    spread[first : last + 1] = random.random(last + 1 - first) ** random.integers(1, 9) + 1e-9
    n_by_key = random.multinomial(n_elements, spread / spread.sum())
    rates = random.choice([0.0, 1e-4, 0.03, 0.5, 0.97, 1.0], n_keys)
    return Survey(n_by_key, steps_for(random, random.binomial(n_by_key, rates), dtype))


def steps_for(random: np.random.Generator, n_changed: Counts, dtype: DType) -> Counts:
    """So many changes of each key, spread over tokens."""
    last = max_token(dtype)
    chances = random.random((len(n_changed), last + 1)) ** random.integers(1, 60)
    chances[random.random(chances.shape) < random.choice([0.0, 0.5, 0.95])] = 0
    chances[:, random.integers(0, last + 1)] += 1e-9
    chances /= chances.sum(axis=1, keepdims=True)
    n_by_token = np.zeros((len(n_changed), N_TOKENS), dtype=np.int64)
    n_by_token[:, : last + 1] = random.multinomial(n_changed, chances)
    return n_by_token


def survey_of(dtype: DType, n: int, n_changed: int, key: int = 0, token: int = 0) -> Survey:
    """All elements have one key, all changes one token."""
    n_by_key = np.zeros(dtype.key_mask + 1, dtype=np.int64)
    n_by_token = np.zeros((dtype.key_mask + 1, N_TOKENS), dtype=np.int64)
    n_by_key[key], n_by_token[key, token] = n, n_changed
    return Survey(n_by_key, n_by_token)


def built(surveys: list[Survey], dtype: DType, n_threads: int = 2) -> tuple[ModelBatch, Counts]:
    keys = [find_base_key(survey.n_by_key) for survey in surveys]
    n_by_class = [sums_by_class(s.n_by_key, k) for s, k in zip(surveys, keys, strict=True)]
    n_changed = [
        sums_by_class(s.n_changed_by_key_token, k) for s, k in zip(surveys, keys, strict=True)
    ]
    return build_models(
        np.array(keys, dtype=np.int32),
        np.array(n_by_class).reshape(-1, N_CLASSES),
        np.array(n_changed, dtype=np.int32).reshape(-1, N_CLASSES, N_TOKENS),
        dtype,
        n_threads,
    )


def n_listed(survey: Survey, model: ClassModel) -> int:
    n_elements = sums_by_class(survey.n_by_key, model.base_key)
    n_changed = sums_by_class(survey.n_changed_by_key_token, model.base_key).sum(axis=1)
    return int(np.where(model.expected, n_elements, n_changed).sum())


def assert_same_models(surveys: list[Survey], dtype: DType) -> None:
    batch, listed = built(surveys, dtype)
    assert len(batch) == len(surveys)
    assert [batch.model(i) for i in range(len(batch))] == [build_model(s, dtype) for s in surveys]
    assert batch.chunk_log2.tolist() == [choose_chunk_log2(s) for s in surveys]
    assert batch_bytes(batch, np.arange(len(batch))) == [
        model_bytes(batch.model(i), int(batch.chunk_log2[i])) for i in range(len(batch))
    ]
    assert listed.tolist() == [
        n_listed(s, model)
        for s, model in zip(surveys, map(batch.model, range(len(batch))), strict=True)
    ]
    past = np.arange(N_TOKENS) >= batch.n_tokens[:, :, None]
    assert not batch.frequencies[past].any()
    assert batch.frequencies.sum(axis=2).tolist() == [[4096] * N_CLASSES] * len(surveys)


@every_dtype
def test_models_of_random_surveys_agree(dtype: DType) -> None:
    random = np.random.default_rng(dtype.code)
    sizes = (1, 2, 3, 17, 1000, 1 << 18, 1 << 20, MAX_COUNT) * 5
    assert_same_models([random_survey(random, dtype, size) for size in sizes], dtype)


@every_dtype
def test_models_of_the_barest_surveys_agree(dtype: DType) -> None:
    top, last = dtype.key_mask, max_token(dtype)
    surveys = [
        survey_of(dtype, n, changed, key, token)
        for n, changed in ((0, 0), (1, 0), (1, 1), (2, 1), (1 << 18, 0), (1 << 18, 1 << 18))
        for key, token in ((0, 0), (top, last), (top // 2, last // 2))
    ]
    assert_same_models(surveys, dtype)


@pytest.mark.parametrize("n_rare", [1, 2])
def test_the_border_of_rare_steps_is_the_same(n_rare: int) -> None:
    surveys = []
    for total in (1023, 1024, 1025, 2047, 2048, 2049):
        survey = survey_of(BF16, 1 << 18, total - n_rare, 100)
        survey.n_changed_by_key_token[100, 29] = n_rare
        surveys.append(survey)
    assert_same_models(surveys, BF16)


def test_the_largest_counts_agree() -> None:
    surveys = []
    for n_changed in (0, 1, MAX_COUNT // 2, MAX_COUNT // 2 + 1, MAX_COUNT - 1, MAX_COUNT):
        survey = survey_of(BF16, MAX_COUNT, n_changed, 100)
        survey.n_by_key[101:103] = 1, MAX_COUNT
        survey.n_changed_by_key_token[101:103, 7] = 1, MAX_COUNT // 2
        surveys.append(survey)
    assert_same_models(surveys, BF16)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 64)), min_size=16, max_size=16),
    st.integers(0, 13),
)
def test_any_rates_agree(classes: list[tuple[int, int]], token: int) -> None:
    survey = survey_of(BF16, 0, 0)
    for key, (n, sixty_fourths) in enumerate(classes):
        survey.n_by_key[100 + key] = n
        survey.n_changed_by_key_token[100 + key, token] = n * sixty_fourths // 64
        survey.n_changed_by_key_token[100 + key, 0] += (n - n * sixty_fourths // 64) // 3
    assert_same_models([survey], BF16)


def test_no_pieces_give_no_models() -> None:
    assert_same_models([], BF16)


@pytest.mark.parametrize("count", [np.int32, np.int64])
@pytest.mark.parametrize("n_threads", [1, 5])
def test_width_of_counts_and_number_of_threads_change_nothing(count: type, n_threads: int) -> None:
    random = np.random.default_rng(3)
    surveys = [random_survey(random, BF16, 1 << 18) for _ in range(100)]
    batch, _ = built(surveys, BF16, n_threads)
    assert [batch.model(i) for i in range(100)] == [build_model(s, BF16) for s in surveys]
    keys = batch.base_keys
    pieces = [(s, int(k)) for s, k in zip(surveys, keys, strict=True)]
    n_by_class = np.array([sums_by_class(s.n_by_key, k) for s, k in pieces], dtype=count)
    n_changed = [sums_by_class(s.n_changed_by_key_token, k) for s, k in pieces]
    again, _ = build_models(keys, n_by_class, np.array(n_changed, dtype=count), BF16, n_threads)
    assert again.frequencies.tobytes() == batch.frequencies.tobytes()
    assert again.log2_weights.tobytes() == batch.log2_weights.tobytes()


@pytest.mark.parametrize(
    ("n", "n_changed", "token", "why"),
    [
        (1, 2, 0, "more changes"),
        (-1, 0, 0, "out of range"),
        (5, -1, 0, "out of range"),
        (MAX_COUNT + 1, 0, 0, "out of range"),
        (5, 1, 30, "token is out of range"),
    ],
)
def test_counts_that_no_survey_gives_are_refused(
    n: int, n_changed: int, token: int, why: str
) -> None:
    survey = survey_of(BF16, n, n_changed, 0, token)
    n_by_class = sums_by_class(survey.n_by_key, 0)[None]
    by_token = sums_by_class(survey.n_changed_by_key_token, 0)[None]
    with pytest.raises(StopError, match=why):
        build_models(np.zeros(1, dtype=np.int32), n_by_class, by_token, BF16, 1)


def test_counts_of_the_wrong_shape_are_refused() -> None:
    keys, n_by_class = np.zeros(2, dtype=np.int32), np.zeros((2, N_CLASSES), dtype=np.int64)
    n_changed = np.zeros((2, N_CLASSES, N_TOKENS), dtype=np.int64)
    with pytest.raises(StopError, match="elements by class"):
        build_models(keys, n_by_class[:1], n_changed, BF16, 1)
    with pytest.raises(StopError, match="changes by class"):
        build_models(keys, n_by_class, n_changed[:, :, 1:], BF16, 1)
