"""Choosing how to code many pieces at once, from what samples of them look like.

A GPU counts and codes hundreds of pieces in milliseconds; making their models one by one in Python
would take many times as long. ``codec.classes`` says what a model is: the compiled loop gives the
same numbers, and the reference backend calls it piece by piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire.codec.classes import chunk_log2_of, model_of_classes
from weightwire.errors import StopError
from weightwire.kernels import native_module
from weightwire.kernels.contract import N_CLASSES, N_TOKENS
from weightwire.kernels.model_batch import ModelBatch, batch_of
from weightwire.kernels.steps import max_token
from weightwire.model import DType

MAX_COUNT = (1 << 30) - 1
"""Most elements a class may count: products of four such numbers still fit 128 bits."""

_MODELS_PER_THREAD = 64

_Counts = npt.NDArray[np.signedinteger]


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
    native = native_module()
    if native is None:
        return _reference_batch(base_keys, n_by_class, n_changed, max_token(dtype))
    return _native_batch(native, base_keys, n_by_class, n_changed, max_token(dtype), n_threads)


def _native_batch(
    native: Any,
    base_keys: npt.NDArray[np.int32],
    n_by_class: _Counts,
    n_changed: _Counts,
    last_token: int,
    n_threads: int,
) -> tuple[ModelBatch, npt.NDArray[np.int64]]:
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
) -> tuple[ModelBatch, npt.NDArray[np.int64]]:
    by_class, by_token = n_by_class.astype(np.int64), n_changed.astype(np.int64)
    _check_counts(by_class, by_token, last_token)
    pieces = zip(base_keys.tolist(), by_class, by_token, strict=True)
    models = [model_of_classes(key, n, changed, last_token) for key, n, changed in pieces]
    totals = zip(by_class.sum(axis=1).tolist(), by_token.sum(axis=(1, 2)).tolist(), strict=True)
    batch = batch_of(models, [chunk_log2_of(n, changed) for n, changed in totals])
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
