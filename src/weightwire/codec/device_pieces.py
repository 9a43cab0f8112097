"""Pieces that lie on a GPU, coded there: the mirror of ``codec.piece`` for many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightwire.codec.classes import UNUSED_MODEL
from weightwire.codec.model_batch import ModelBatch, build_models
from weightwire.codec.piece import CODECS, EncodedPiece, thread_count
from weightwire.errors import CorruptStream, StopError
from weightwire.kernels.contract import DENSE, PLAIN_CHUNK, ClassModel, Streams
from weightwire.model import DType

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges
    from weightwire.kernels.triton.models import ModelArrays
    from weightwire.kernels.triton.survey import SurveyBatch


@dataclass(frozen=True)
class DevicePiece:
    """A coded piece: streams on the host, and how they were coded."""

    n_elements: int
    streams: Streams
    models: ModelBatch | None
    """None for the plain codec."""
    number: int
    """Of its model, which is made when it is asked for."""

    @property
    def chunk_log2(self) -> int:
        """The size of its chunks."""
        if self.models is None:
            return PLAIN_CHUNK.bit_length() - 1
        return int(self.models.chunk_log2[self.number])

    @property
    def model(self) -> ClassModel | None:
        """How it was coded; the shortest model there is if nothing of it was."""
        if self.models is None:
            return None
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
    codec: str = "compact",
    *,
    budget_bytes: int,
    n_threads: int | None = None,
) -> list[DevicePiece]:
    """Code what changes in pieces of one element type; at most ``budget_bytes`` are allocated.

    Raises:
        StopError: there is no codec of this name.
    """
    from weightwire.kernels.triton.downloads import send_to_host
    from weightwire.kernels.triton.encode import encode_compact_all
    from weightwire.kernels.triton.memories import Memories
    from weightwire.kernels.triton.slabs import Work
    from weightwire.kernels.triton.survey import survey_memories

    if codec not in CODECS:
        raise StopError(f"no codec {codec!r}; choose one of: {', '.join(CODECS)}")
    if not olds:
        return []
    memories = Memories(olds, news)
    counted = survey_memories(memories, dtype)
    changed = send_to_host(counted.n_changed.sum(dim=2))
    survey = counted.to_host()
    if codec == "plain":
        return _encode_plain(olds, news, dtype, survey, changed.wait(), budget_bytes)
    by_class, by_token = survey.n_by_class.numpy(), survey.n_changed.numpy()
    models = build_models(
        survey.base_key.numpy(), by_class, by_token, dtype, thread_count(n_threads)
    )
    chunk_log2s = models.chunk_log2.astype(np.int64)
    work = Work(
        memories, dtype, _batch_arrays(models), chunk_log2s,
        _listed_rates(by_class, changed.wait(), models),
    )  # fmt: skip
    coded = encode_compact_all(work, budget_bytes=budget_bytes)
    return [
        DevicePiece(old.numel(), streams, models, number)
        for number, (old, streams) in enumerate(zip(olds, coded, strict=True))
    ]


def _encode_plain(
    olds: Sequence[torch.Tensor],
    news: Sequence[torch.Tensor],
    dtype: DType,
    survey: SurveyBatch,
    changed: npt.NDArray[np.int64],
    budget_bytes: int,
) -> list[DevicePiece]:
    from weightwire.kernels.triton.plain_encode import encode_plain_all

    rates = changed.sum(axis=1, dtype=np.float64) / np.maximum(
        survey.n_by_class.numpy().sum(axis=1), 1
    )
    coded = encode_plain_all(olds, news, dtype, rates, budget_bytes=budget_bytes)
    return [
        DevicePiece(old.numel(), streams, None, number)
        for number, (old, streams) in enumerate(zip(olds, coded, strict=True))
    ]


def decode_pieces(
    olds: Sequence[torch.Tensor], pieces: Sequence[EncodedPiece | DevicePiece], dtype: DType
) -> list[DeviceChanges]:
    """The changes that pieces of one codec stand for, beside the old bits; writes nothing.

    Raises:
        CorruptStream: streams that no encoder writes.
        StopError: pieces of different codecs, or one without all of its old bits.
    """
    if not olds:
        return []
    is_plain = {_is_plain(piece) for piece in pieces}
    if len(is_plain) > 1:
        raise StopError("pieces of both codecs; decode them apart")
    found = _decode_plain(olds, pieces, dtype) if is_plain.pop() else _decode(olds, pieces, dtype)
    for changes, piece in zip(found, pieces, strict=True):
        if changes.n_changed != piece.streams.n_changed:
            raise CorruptStream(
                f"{changes.n_changed} changes decoded where"
                f" {piece.streams.n_changed} were announced"
            )
    return found


def _is_plain(piece: EncodedPiece | DevicePiece) -> bool:
    return (piece.models if isinstance(piece, DevicePiece) else piece.model) is None


def _decode_plain(
    olds: Sequence[torch.Tensor], pieces: Sequence[EncodedPiece | DevicePiece], dtype: DType
) -> list[DeviceChanges]:
    from weightwire.kernels.triton.plain_decode import decode_plain_all

    sizes, streams = [piece.n_elements for piece in pieces], [piece.streams for piece in pieces]
    return decode_plain_all(sizes, streams, dtype, olds[0].device)


def _decode(
    olds: Sequence[torch.Tensor], pieces: Sequence[EncodedPiece | DevicePiece], dtype: DType
) -> list[DeviceChanges]:
    from weightwire.kernels.triton.decode import Work, decode_compact_all

    if any(piece.n_elements != old.numel() for old, piece in zip(olds, pieces, strict=True)):
        raise StopError("a compact piece is decoded against its old bits, all of them")
    streams = [piece.streams for piece in pieces]
    chunk_log2s = np.array([piece.chunk_log2 for piece in pieces], dtype=np.int64)
    return decode_compact_all(Work(olds, streams, _arrays(pieces), chunk_log2s, dtype))


def _arrays(pieces: Sequence[EncodedPiece | DevicePiece]) -> ModelArrays:
    """All models in one; those of pieces that were coded together are so already."""
    from weightwire.kernels.triton.models import arrays_of

    first = pieces[0]
    if isinstance(first, DevicePiece) and first.models is not None:
        together = [
            piece.number
            for piece in pieces
            if isinstance(piece, DevicePiece) and piece.models is first.models
        ]
        if len(together) == len(pieces):
            return _batch_arrays(first.models).some(np.array(together, dtype=np.intp))
    return arrays_of([piece.model for piece in pieces if piece.model is not None])


def _batch_arrays(models: ModelBatch) -> ModelArrays:
    from weightwire.kernels.triton.models import ModelArrays

    return ModelArrays(
        models.base_keys, models.log2_weights, models.expected, models.n_tokens,
        models.first_token[:, :, None], models.frequencies,
    )  # fmt: skip


def _listed_rates(
    by_class: npt.NDArray[np.int32], changed: npt.NDArray[np.int64], models: ModelBatch
) -> npt.NDArray[np.float64]:
    """Of every piece's sample, how much changed or is expected to."""
    listed = np.where(models.expected, by_class, changed).sum(axis=1)
    rates: npt.NDArray[np.float64] = listed / np.maximum(by_class.sum(axis=1), 1)
    return rates
