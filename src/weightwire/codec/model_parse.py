"""The models that many records start with, read at once, as arrays that a GPU takes as they are.

``codec.model_bytes`` says what a model's bytes are. One by one they become Python objects for every
token of every class, a tenth of a millisecond and more for each record: hundreds of records would
take longer to read than a GPU takes to decode them. The compiled loop reads the same and refuses the
same, and the reference backend calls ``parse_model`` record by record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightwire.codec.model_bytes import parse_model
from weightwire.errors import MalformedRecord
from weightwire.kernels import native_module
from weightwire.kernels.contract import N_CLASSES, N_TOKENS
from weightwire.kernels.model_batch import ModelBatch, batch_of
from weightwire.kernels.steps import max_token
from weightwire.model import DType

_Bodies = Sequence[npt.NDArray[np.uint8]]


class ParsedModels(NamedTuple):
    """One model per body."""

    models: ModelBatch
    ends: npt.NDArray[np.int64]
    """Where each one's bytes end in its body, and the directory starts."""


def parse_models(bodies: _Bodies, dtype: DType) -> ParsedModels:
    """The models at the start of compact bodies of one element type.

    Raises:
        MalformedRecord: as ``parse_model`` for the first model that is, with its number.
    """
    native = native_module()
    if native is None:
        return _parse_one_by_one(bodies, dtype)
    return _parse_native(native, bodies, dtype)


def _parse_native(native: Any, bodies: _Bodies, dtype: DType) -> ParsedModels:
    whole = [np.ascontiguousarray(body) for body in bodies]
    models, ends = room = _room_for(len(bodies))
    try:
        native.parse_models(
            whole, dtype.key_mask, max_token(dtype), models.base_keys, models.log2_weights,
            models.expected, models.n_tokens, models.first_token, models.frequencies,
            models.chunk_log2, ends,
        )  # fmt: skip
    except ValueError as error:
        raise MalformedRecord(str(error)) from None
    return room


def _room_for(n_models: int) -> ParsedModels:
    by_class = (n_models, N_CLASSES)
    models = ModelBatch(
        base_keys=np.zeros(n_models, dtype=np.int32),
        log2_weights=np.zeros(by_class, dtype=np.uint8),
        expected=np.zeros(by_class, dtype=np.uint8),
        n_tokens=np.zeros(by_class, dtype=np.uint8),
        first_token=np.zeros(by_class, dtype=np.uint8),
        frequencies=np.zeros((*by_class, N_TOKENS), dtype=np.uint16),
        chunk_log2=np.zeros(n_models, dtype=np.uint8),
    )
    return ParsedModels(models, np.zeros(n_models, dtype=np.int64))


def _parse_one_by_one(bodies: _Bodies, dtype: DType) -> ParsedModels:
    models, chunk_log2s, ends = [], [], []
    for number, body in enumerate(bodies):
        try:
            model, chunk_log2, end = parse_model(body, dtype)
        except MalformedRecord as error:
            raise MalformedRecord(f"model {number}: {error}") from None
        models.append(model)
        chunk_log2s.append(chunk_log2)
        ends.append(end)
    return ParsedModels(batch_of(models, chunk_log2s), np.array(ends, dtype=np.int64))
