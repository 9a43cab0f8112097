"""Pieces that lie on a GPU, coded there: the mirror of ``codec.piece`` for many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    from weightwire.kernels.triton.slabs import Work
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
    from weightwire.kernels.triton.encode import encode_compact_all

    if codec not in CODECS:
        raise StopError(f"no codec {codec!r}; choose one of: {', '.join(CODECS)}")
    if not olds:
        return []
    # All samples are counted before the first is waited for.
    surveyed = [_Surveyed(olds[part], news[part], dtype) for part in _parts(olds)]
    if codec == "plain":
        return [
            piece
            for each in surveyed
            for piece in _encode_plain(each, dtype, budget_bytes)
        ]  # fmt: skip
    batches: list[ModelBatch] = []

    def works() -> Iterator[Work]:
        for each in surveyed:
            batches.append(each.models(dtype, thread_count(n_threads)))
            yield each.work(dtype, batches[-1])

    coded = encode_compact_all(works(), budget_bytes=budget_bytes)
    numbered = [(models, number) for models in batches for number in range(len(models))]
    return [
        DevicePiece(old.numel(), streams, models, number)
        for old, streams, (models, number) in zip(olds, coded, numbered, strict=True)
    ]


_WHOLE_ELEMENTS = 1 << 28
"""Up to so many elements, all pieces begin together."""

_FIRST_PARTS = 5
"""Of more, a part goes ahead: the device works on it while the host deals with the others' models."""


def _parts(olds: Sequence[torch.Tensor]) -> list[slice]:
    ends = np.cumsum([old.numel() for old in olds])
    first = int(np.searchsorted(ends, ends[-1] // _FIRST_PARTS)) + 1
    if ends[-1] <= _WHOLE_ELEMENTS or first >= len(olds):
        return [slice(0, len(olds))]
    return [slice(0, first), slice(first, len(olds))]


class _Surveyed:
    """Some pieces whose samples are being counted."""

    def __init__(
        self, olds: Sequence[torch.Tensor], news: Sequence[torch.Tensor], dtype: DType
    ) -> None:
        """Begin to count."""
        from weightwire.kernels.triton.downloads import send_to_host
        from weightwire.kernels.triton.memories import Memories
        from weightwire.kernels.triton.survey import survey_memories

        self.memories = Memories(olds, news)
        self._batch = survey_memories(self.memories, dtype)
        self._changed = send_to_host(self._batch.n_changed.sum(dim=2))
        self._counts = send_to_host(self._batch.counts)

    @cached_property
    def counted(self) -> SurveyBatch:
        """What was found, in the host's memory."""
        return self._batch.on_host(self._counts.wait())

    def models(self, dtype: DType, n_threads: int) -> ModelBatch:
        """How to code them."""
        found = self.counted
        by_class, by_token = found.n_by_class.numpy(), found.n_changed.numpy()
        return build_models(found.base_key.numpy(), by_class, by_token, dtype, n_threads)

    def work(self, dtype: DType, models: ModelBatch) -> Work:
        """What the encoder is told of them."""
        from weightwire.kernels.triton.slabs import Work

        by_class = self.counted.n_by_class.numpy()
        listed = np.where(models.expected, by_class, self._changed.wait()).sum(axis=1)
        rates = listed / np.maximum(by_class.sum(axis=1), 1)
        chunk_log2s = models.chunk_log2.astype(np.int64)
        return Work(self.memories, dtype, _batch_arrays(models), chunk_log2s, rates)

    def rates(self) -> npt.NDArray[np.float64]:
        """How much of each piece's sample changed."""
        sampled = np.maximum(self.counted.n_by_class.numpy().sum(axis=1), 1)
        rates: npt.NDArray[np.float64] = self._changed.wait().sum(axis=1) / sampled
        return rates


def _encode_plain(surveyed: _Surveyed, dtype: DType, budget_bytes: int) -> list[DevicePiece]:
    from weightwire.kernels.triton.plain_encode import encode_plain_all

    memories = surveyed.memories
    coded = encode_plain_all(
        memories.olds, memories.news, dtype, surveyed.rates(), budget_bytes=budget_bytes
    )
    return [
        DevicePiece(old.numel(), streams, None, number)
        for number, (old, streams) in enumerate(zip(memories.olds, coded, strict=True))
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
    from weightwire.kernels.triton.models import arrays_of, joined

    runs: list[tuple[ModelBatch, list[int]]] = []
    for piece in pieces:
        if not isinstance(piece, DevicePiece) or piece.models is None:
            return arrays_of([each.model for each in pieces if each.model is not None])
        if not runs or runs[-1][0] is not piece.models:
            runs.append((piece.models, []))
        runs[-1][1].append(piece.number)
    return joined([_batch_arrays(models).some(_slice_of(at)) for models, at in runs])


def _slice_of(numbers: list[int]) -> slice | npt.NDArray[np.intp]:
    """Numbers that follow each other as a slice: what they choose need not be copied."""
    first, last = numbers[0], numbers[-1] + 1
    follow = numbers == list(range(first, last))
    return slice(first, last) if follow else np.array(numbers, dtype=np.intp)


def _batch_arrays(models: ModelBatch) -> ModelArrays:
    from weightwire.kernels.triton.models import ModelArrays

    return ModelArrays(
        models.base_keys, models.log2_weights, models.expected, models.n_tokens,
        models.first_token[:, :, None], models.frequencies,
    )  # fmt: skip
