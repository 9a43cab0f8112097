"""The models of many pieces at once, as arrays that a GPU takes as they are.

A GPU codes hundreds of pieces in milliseconds: as Python objects, their models would take many times
as long to make, to read and to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from weightwire.errors import StopError
from weightwire.kernels.contract import N_CLASSES, N_TOKENS, ClassModel, StepTable

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ModelBatch:
    """One model and chunk size per piece; a step table is a run of consecutive tokens.

    Records can say no other step tables.
    """

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

    def some(self, numbers: slice | npt.NDArray[np.intp]) -> ModelBatch:
        """A few of them."""
        return ModelBatch(*(getattr(self, field.name)[numbers] for field in fields(self)))

    def model(self, number: int) -> ClassModel:
        """The model of one piece, as everyone else knows it."""
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


def batch_of(models: Sequence[ClassModel], chunk_log2s: Sequence[int]) -> ModelBatch:
    """Models that were made one by one, and their chunk sizes.

    Raises:
        StopError: a step table leaves out a token between two others.
    """
    shape = (len(models), N_CLASSES)
    tables = [table for model in models for table in model.steps]
    if any(table.tokens[-1] - table.tokens[0] >= len(table.tokens) for table in tables):
        raise StopError("a step table is no run of consecutive tokens")
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
        np.array(chunk_log2s, dtype=np.uint8),
    )


def repeated(model: ClassModel, chunk_log2: int, n_pieces: int) -> ModelBatch:
    """One model for all pieces; nothing is copied."""
    one = batch_of([model], [chunk_log2])
    columns = (getattr(one, field.name)[0] for field in fields(one))
    return ModelBatch(*(np.broadcast_to(column, (n_pieces, *column.shape)) for column in columns))


def joined(batches: Sequence[ModelBatch]) -> ModelBatch:
    """All of them, one after the other."""
    if len(batches) == 1:
        return batches[0]
    columns = ([getattr(each, field.name) for each in batches] for field in fields(ModelBatch))
    return ModelBatch(*(np.concatenate(column) for column in columns))
