"""The models of many pieces at once, as arrays that a GPU takes as they are.

A GPU counts and codes hundreds of pieces in milliseconds; making their models one by one in Python
would take many times as long. ``codec.classes`` says what a model is: the compiled loop gives the
same numbers, and the reference backend calls it piece by piece.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire.codec.classes import chunk_log2_of, model_of_classes
from weightwire.errors import StopError
from weightwire.kernels import kernels
from weightwire.kernels.contract import N_CLASSES, N_TOKENS, ClassModel, StepTable
from weightwire.kernels.steps import max_token
from weightwire.model import DType

MAX_COUNT = (1 << 30) - 1
"""Most elements a class may count: products of four such numbers still fit 128 bits."""

_MODELS_PER_THREAD = 64

_Counts = npt.NDArray[np.signedinteger]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ModelBatch:
    """One model and chunk size per piece; a step table is a run of consecutive tokens."""

    base_keys: npt.NDArray[np.int32]
    log2_weights: _Bytes
    """[pieces, classes], as all below unless they say otherwise."""
    expected: _Bytes
    n_tokens: _Bytes
    first_token: _Bytes
    frequencies: npt.NDArray[np.uint16]
    """[pieces, classes, tokens], counted from the class's first token; zeros past its last."""
    chunk_log2: _Bytes
    """[pieces]"""

    def __len__(self) -> int:
        return len(self.base_keys)

    def model(self, number: int) -> ClassModel:
        """The model of one piece, as ``build_model`` gives it."""
        firsts, counts = self.first_token[number].tolist(), self.n_tokens[number].tolist()
        rows = zip(firsts, counts, self.frequencies[number], strict=True)
        return ClassModel(
            base_key=int(self.base_keys[number]),
            log2_weights=tuple(self.log2_weights[number].tolist()),
            expected=tuple(self.expected[number].astype(bool).tolist()),
            steps=tuple(
                StepTable(tuple(range(first, first + n)), tuple(row[:n].tolist()))
                for first, n, row in rows
            ),
        )


def batch_part(models: ModelBatch, numbers: slice | npt.NDArray[np.intp]) -> ModelBatch:
    """A few of them."""
    return ModelBatch(*(getattr(models, field.name)[numbers] for field in fields(models)))


def joined(batches: Sequence[ModelBatch]) -> ModelBatch:
    """All of them, one after the other."""
    if len(batches) == 1:
        return batches[0]
    columns = ([getattr(each, field.name) for each in batches] for field in fields(ModelBatch))
    return ModelBatch(*(np.concatenate(column) for column in columns))


def build_models(
    base_keys: npt.NDArray[np.int32],
    n_by_class: _Counts,
    n_changed: _Counts,
    dtype: DType,
    n_threads: int,
) -> tuple[ModelBatch, npt.NDArray[np.int64]]:
    """Choose how to code pieces of one element type that look like this.

    Gives also how many elements of each sample are listed: changed, or expected to.

    Args:
        base_keys: per piece, the lowest key of its classes: ``find_base_key``.
        n_by_class: [pieces, classes], elements of its sample.
        n_changed: [pieces, classes, tokens], int32 or int64: those that changed, by step token.
        dtype: the type of all elements.
        n_threads: most threads to use.

    Raises:
        StopError: no survey gives such counts.
    """
    n_pieces = len(base_keys)
    if n_by_class.shape != (n_pieces, N_CLASSES):
        raise StopError(f"elements by class have shape {n_by_class.shape}")
    if n_changed.shape != (n_pieces, N_CLASSES, N_TOKENS):
        raise StopError(f"changes by class have shape {n_changed.shape}")
    build = _reference_batch if kernels().name == "reference" else _native_batch
    return build(base_keys, n_by_class, n_changed, max_token(dtype), n_threads)


def _native_batch(
    base_keys: npt.NDArray[np.int32],
    n_by_class: _Counts,
    n_changed: _Counts,
    last_token: int,
    n_threads: int,
) -> tuple[ModelBatch, npt.NDArray[np.int64]]:
    native: Any = importlib.import_module("weightwire._native")
    by_class = np.ascontiguousarray(n_by_class, dtype=np.int64).ravel()
    by_token = np.ascontiguousarray(n_changed).ravel()
    try:
        # To start a thread takes longer than a few models.
        n_threads = min(n_threads, -(-len(base_keys) // _MODELS_PER_THREAD))
        arrays = native.build_models(by_token, by_class, last_token, max(n_threads, 1))
    except ValueError as error:
        raise StopError(str(error)) from None
    log2_weights, expected, n_tokens, first_token, frequencies, chunk_log2, n_listed = arrays
    models = ModelBatch(
        base_keys=np.asarray(base_keys, dtype=np.int32),
        log2_weights=log2_weights.reshape(-1, N_CLASSES),
        expected=expected.reshape(-1, N_CLASSES),
        n_tokens=n_tokens.reshape(-1, N_CLASSES),
        first_token=first_token.reshape(-1, N_CLASSES),
        frequencies=frequencies.reshape(-1, N_CLASSES, N_TOKENS),
        chunk_log2=chunk_log2,
    )
    return models, n_listed


def _reference_batch(
    base_keys: npt.NDArray[np.int32],
    n_by_class: _Counts,
    n_changed: _Counts,
    last_token: int,
    n_threads: int,
) -> tuple[ModelBatch, npt.NDArray[np.int64]]:
    del n_threads
    by_class, by_token = n_by_class.astype(np.int64), n_changed.astype(np.int64)
    _check_counts(by_class, by_token, last_token)
    pieces = zip(base_keys.tolist(), by_class, by_token, strict=True)
    models = [model_of_classes(key, n, changed, last_token) for key, n, changed in pieces]
    totals = zip(by_class.sum(axis=1).tolist(), by_token.sum(axis=(1, 2)).tolist(), strict=True)
    batch = _batch_of(models, [chunk_log2_of(n, changed) for n, changed in totals])
    return batch, np.where(batch.expected, by_class, by_token.sum(axis=2)).sum(axis=1)


def _check_counts(
    by_class: npt.NDArray[np.int64], by_token: npt.NDArray[np.int64], last_token: int
) -> None:
    for counts in (by_class, by_token):
        if np.any((counts < 0) | (counts > MAX_COUNT)):
            raise StopError("a count is out of range")
    if np.any(by_token.sum(axis=2) > by_class):
        raise StopError("more changes than elements")
    if by_token[:, :, last_token + 1 :].any():
        raise StopError("a token is out of range")


def _batch_of(models: list[ClassModel], chunk_log2: list[int]) -> ModelBatch:
    shape = (len(models), N_CLASSES)
    tables = [table for model in models for table in model.steps]
    frequencies = np.zeros((len(tables), N_TOKENS), dtype=np.uint16)
    for row, table in zip(frequencies, tables, strict=True):
        row[: len(table.frequencies)] = table.frequencies
    return ModelBatch(
        np.array([model.base_key for model in models], dtype=np.int32),
        np.array([model.log2_weights for model in models], dtype=np.uint8).reshape(shape),
        np.array([model.expected for model in models], dtype=np.uint8).reshape(shape),
        np.array([len(table.tokens) for table in tables], dtype=np.uint8).reshape(shape),
        np.array([table.tokens[0] for table in tables], dtype=np.uint8).reshape(shape),
        frequencies.reshape(*shape, N_TOKENS),
        np.array(chunk_log2, dtype=np.uint8),
    )
