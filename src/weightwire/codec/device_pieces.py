"""Pieces that lie on a GPU, coded there: the mirror of ``codec.piece`` for many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightwire.codec.classes import UNUSED_MODEL
from weightwire.codec.model_batch import ModelBatch, build_models
from weightwire.codec.piece import EncodedPiece, thread_count
from weightwire.errors import CorruptStream, StopError
from weightwire.kernels.contract import DENSE, N_TOKENS, ClassModel, Streams
from weightwire.model import DType

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges
    from weightwire.kernels.triton.models import ModelArrays
    from weightwire.kernels.triton.survey import SurveyBatch


@dataclass(frozen=True)
class DevicePiece:
    """A coded piece: streams on the host, and its changes on the device where they were kept."""

    n_elements: int
    streams: Streams
    models: ModelBatch
    number: int
    """Of its model, which is made when it is asked for."""
    changes: DeviceChanges | None

    @property
    def chunk_log2(self) -> int:
        """The size of its chunks."""
        return int(self.models.chunk_log2[self.number])

    @property
    def model(self) -> ClassModel:
        """How it was coded; the shortest model there is if nothing of it was."""
        if np.isin(self.streams.directory[:, 0], (0, DENSE)).all():
            return UNUSED_MODEL
        return self.models.model(self.number)

    def on_host(self) -> EncodedPiece:
        """As the codec knows it."""
        return EncodedPiece(self.n_elements, self.model, self.chunk_log2, self.streams)


def encode_pieces(
    olds: Sequence[torch.Tensor],
    news: Sequence[torch.Tensor],
    dtype: DType,
    *,
    budget_bytes: int,
    keep_changes: bool = False,
    n_threads: int | None = None,
) -> list[DevicePiece]:
    """Code what changes in pieces of one element type; at most ``budget_bytes`` are allocated."""
    from weightwire.kernels.triton.encode import Work, encode_compact_all
    from weightwire.kernels.triton.survey import survey_all

    if not olds:
        return []
    survey = survey_all(olds, news, dtype).to_host()
    by_class, changed = survey.n_by_class.numpy(), survey.n_changed.numpy()
    models = build_models(
        survey.base_key.numpy(), by_class, changed, dtype, thread_count(n_threads)
    )
    chunk_log2s = models.chunk_log2.astype(np.int64)
    work = Work(
        olds, news, dtype, _batch_arrays(models), chunk_log2s, _listed_rates(survey, models)
    )
    coded = encode_compact_all(work, budget_bytes=budget_bytes, keep_changes=keep_changes)
    return [
        DevicePiece(old.numel(), each.streams, models, number, each.changes)
        for number, (old, each) in enumerate(zip(olds, coded, strict=True))
    ]


def decode_pieces(
    olds: Sequence[torch.Tensor], pieces: Sequence[EncodedPiece | DevicePiece], dtype: DType
) -> list[DeviceChanges]:
    """The changes that compact pieces stand for, beside the old bits; writes nothing.

    Raises:
        CorruptStream: streams that no encoder writes.
        StopError: a piece of the plain codec, or without all of its old bits.
    """
    from weightwire.kernels.triton.decode import Work, decode_compact_all

    if not olds:
        return []
    if any(piece.n_elements != old.numel() for old, piece in zip(olds, pieces, strict=True)):
        raise StopError("a compact piece is decoded against its old bits, all of them")
    streams = [piece.streams for piece in pieces]
    chunk_log2s = np.array([piece.chunk_log2 for piece in pieces], dtype=np.int64)
    found = decode_compact_all(Work(olds, streams, _arrays(pieces), chunk_log2s, dtype))
    for changes, piece in zip(found, pieces, strict=True):
        if changes.n_changed != piece.streams.n_changed:
            raise CorruptStream(
                f"{changes.n_changed} changes decoded where"
                f" {piece.streams.n_changed} were announced"
            )
    return found


def _arrays(pieces: Sequence[EncodedPiece | DevicePiece]) -> ModelArrays:
    """All models in one; those of pieces that were coded together are so already."""
    from weightwire.kernels.triton.models import arrays_of

    first = pieces[0]
    if isinstance(first, DevicePiece) and all(
        isinstance(piece, DevicePiece) and piece.models is first.models for piece in pieces
    ):
        numbers = np.array([piece.number for piece in pieces], dtype=np.intp)  # type: ignore[union-attr]
        return _batch_arrays(first.models).some(numbers)
    models = [piece.model for piece in pieces]
    if any(model is None for model in models):
        raise StopError("a piece of the plain codec; only compact ones are decoded here")
    return arrays_of([model for model in models if model is not None])


def _batch_arrays(models: ModelBatch) -> ModelArrays:
    from weightwire.kernels.triton.models import ModelArrays

    return ModelArrays(
        models.base_keys, models.log2_weights, models.expected, models.n_tokens,
        _tokens(models), models.frequencies,
    )  # fmt: skip


def _tokens(models: ModelBatch) -> npt.NDArray[np.uint8]:
    return models.first_token[:, :, None] + np.arange(N_TOKENS, dtype=np.uint8)


def _listed_rates(survey: SurveyBatch, models: ModelBatch) -> npt.NDArray[np.float64]:
    """Of every piece's sample, how much changed or is expected to."""
    by_class = survey.n_by_class.numpy().astype(np.float64)
    changed = survey.n_changed.numpy().sum(axis=2)
    listed = np.where(models.expected, by_class, changed).sum(axis=1)
    rates: npt.NDArray[np.float64] = listed / np.maximum(by_class.sum(axis=1), 1)
    return rates
