"""A batch of models gives back each of those it was made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weightwire.errors import StopError
from weightwire.kernels.contract import ALL_ALIKE, N_CLASSES, ClassModel, StepTable
from weightwire.kernels.model_batch import ModelBatch, batch_of, joined, repeated

COLD = ClassModel(
    base_key=7,
    log2_weights=(8, *range(N_CLASSES - 1)),
    expected=(True, *(False,) * (N_CLASSES - 1)),
    steps=(StepTable((3, 4, 5), (1, 95, 4000)),) * N_CLASSES,
)
MODELS, CHUNK_LOG2S = [ALL_ALIKE, COLD, ALL_ALIKE], [10, 20, 16]


def told(batch: ModelBatch) -> list[tuple[ClassModel, int]]:
    return [(batch.model(n), int(batch.chunk_log2[n])) for n in range(len(batch))]


def test_models_come_back_as_they_were() -> None:
    assert told(batch_of(MODELS, CHUNK_LOG2S)) == list(zip(MODELS, CHUNK_LOG2S, strict=True))
    assert told(batch_of([], [])) == []


def test_a_few_are_chosen_and_joined_again() -> None:
    batch = batch_of(MODELS, CHUNK_LOG2S)
    parts = [batch.some(np.array([2, 1])), batch.some(slice(0, 1))]
    assert told(joined(parts)) == [told(batch)[n] for n in (2, 1, 0)]
    assert joined([batch]) is batch


def test_one_model_serves_many_pieces() -> None:
    assert told(repeated(COLD, 12, 3)) == [(COLD, 12)] * 3


def test_a_step_table_that_leaves_a_token_out_is_refused() -> None:
    gapped = StepTable((0, 1, 5), (2000, 2000, 96))
    with pytest.raises(StopError, match="consecutive"):
        batch_of([replace(COLD, steps=(*COLD.steps[:-1], gapped))], [12])
