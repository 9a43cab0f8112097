"""Pieces that lie on a GPU, coded there: the mirror of ``codec.piece`` for many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from weightwire.codec.classes import UNUSED_MODEL
from weightwire.codec.model_build import build_models
from weightwire.codec.piece import CODECS, UNCOUNTED, EncodedPiece, thread_count
from weightwire.errors import CorruptStream, StopError
from weightwire.kernels.contract import DENSE, PLAIN_CHUNK, ClassModel, Streams
from weightwire.kernels.model_batch import ModelBatch, batch_of, joined
from weightwire.model import DType

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges
    from weightwire.kernels.triton.memories import Memories
    from weightwire.kernels.triton.slabs import Work


class DevicePiece(NamedTuple):
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
    given: torch.cuda.Event | None = None,
) -> list[DevicePiece]:
    """Code what changes in pieces of one element type.

    Args:
        olds: flat memory of each piece before, all on one device.
        news: after.
        dtype: the type of all elements.
        codec: "compact" or "plain".
        budget_bytes: what may be allocated meanwhile.
        n_threads: most threads of the host to use; by default one for each of its processors.
        given: when both states were there, in the current stream; by default now. Samples of them are
            looked at beside what the stream was told since.

    Raises:
        StopError: there is no codec of this name.
    """
    import torch

    if codec not in CODECS:
        raise StopError(f"no codec {codec!r}; choose one of: {', '.join(CODECS)}")
    if not olds:
        return []
    # Triton launches on the current device, wherever the memory is.
    with torch.cuda.device_of(olds[0]):
        if codec == "plain":
            return _encode_plain(olds, news, dtype, budget_bytes)
        return _encode(olds, news, dtype, budget_bytes, thread_count(n_threads), given)


def _encode(
    olds: Sequence[torch.Tensor],
    news: Sequence[torch.Tensor],
    dtype: DType,
    budget_bytes: int,
    n_threads: int,
    given: torch.cuda.Event | None,
) -> list[DevicePiece]:
    from weightwire.kernels.triton.downloads import mark
    from weightwire.kernels.triton.encode import encode_compact_all

    batches: list[ModelBatch] = []
    sizes: list[int] = []

    def works() -> Iterator[Work]:
        surveys = _Surveys(olds, news, dtype, given or mark(olds[0].device))
        for number in range(len(surveys)):
            work = surveys.work(number, n_threads)
            batches.append(work.models)
            sizes.extend(work.memories.sizes.tolist())
            yield work
        # All is begun: there is time.
        batches[:] = [joined(batches)]

    coded = list(encode_compact_all(works(), budget_bytes=budget_bytes))
    return list(map(DevicePiece, sizes, coded, repeat(batches[0]), count()))


_WHOLE_ELEMENTS = 1 << 28
"""Up to so many elements, all pieces begin together."""

_FIRST_SHARE = 0.54
"""Of more, so much goes ahead: the device works on it while the host deals with the others' models."""


def _parts(olds: Sequence[torch.Tensor]) -> list[slice]:
    ends = np.cumsum([old.numel() for old in olds])
    first = int(np.searchsorted(ends, _FIRST_SHARE * ends[-1])) + 1
    if ends[-1] <= _WHOLE_ELEMENTS or first >= len(olds):
        return [slice(0, len(olds))]
    return [slice(0, first), slice(first, len(olds))]


class _Surveys:
    """Parts of all pieces, whose samples are counted one after the other."""

    def __init__(
        self,
        olds: Sequence[torch.Tensor],
        news: Sequence[torch.Tensor],
        dtype: DType,
        given: torch.cuda.Event | None,
    ) -> None:
        self._olds, self._news, self._dtype, self._given = olds, news, dtype, given
        self._parts = _parts(olds)
        self._begun: list[_Surveyed] = []

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self, number: int) -> None:
        """Begin to count a part, unless that was done."""
        from weightwire.kernels.triton.memories import Memories

        if number == len(self._begun) < len(self):
            part = self._parts[number]
            memories = Memories(self._olds[part], self._news[part])
            self._begun.append(_Surveyed(memories, self._dtype, self._given))

    def work(self, number: int, n_threads: int) -> Work:
        """What the encoder is told of a part; the next one is counted meanwhile."""
        self.begin(number)
        work = self._begun[number].work(self._dtype, n_threads)
        is_last = number == len(self) - 1
        return replace(work, is_last=is_last, meanwhile=partial(self.begin, number + 1))


class _Surveyed:
    """Some pieces whose samples are being counted."""

    def __init__(self, memories: Memories, dtype: DType, given: torch.cuda.Event | None) -> None:
        """Begin to count, beside what was begun since both states were ``given``."""
        from weightwire.kernels.triton.downloads import beside, send_to_host
        from weightwire.kernels.triton.survey import survey_memories

        self._memories = memories
        with beside(memories.device, given, "survey", is_urgent=True):
            self._batch = survey_memories(memories, dtype)
            self._counts = send_to_host(self._batch.counts)

    def work(self, dtype: DType, n_threads: int) -> Work:
        """What the encoder is told of them; waits for the counts."""
        from weightwire.kernels.triton.slabs import Work

        found = self._batch.on_host(self._counts.wait())
        by_class, by_token = found.n_by_class.numpy(), found.n_changed.numpy()
        keys = found.base_key.numpy()
        models, n_listed = build_models(keys, by_class, by_token, dtype, n_threads)
        rates = n_listed / np.maximum(by_class.sum(axis=1), 1)
        return Work(self._memories, dtype, models, rates)


def _encode_plain(
    olds: Sequence[torch.Tensor], news: Sequence[torch.Tensor], dtype: DType, budget_bytes: int
) -> list[DevicePiece]:
    from weightwire.kernels.triton.downloads import to_host
    from weightwire.kernels.triton.memories import Memories
    from weightwire.kernels.triton.plain_encode import encode_plain_all
    from weightwire.kernels.triton.survey import survey_memories

    memories = Memories(olds, news)
    found = survey_memories(memories, dtype)
    changed, sampled = to_host(_sums(found.n_changed, found.n_by_class))
    rates = changed / np.maximum(sampled, 1)
    coded = encode_plain_all(memories, dtype, rates, budget_bytes=budget_bytes)
    return [
        DevicePiece(old.numel(), streams, None, number)
        for number, (old, streams) in enumerate(zip(olds, coded, strict=True))
    ]


def _sums(*by_piece: torch.Tensor) -> torch.Tensor:
    """Each one's sums over everything but pieces."""
    import torch

    return torch.stack([values.flatten(1).sum(dim=1) for values in by_piece])


def decode_pieces(
    olds: Sequence[torch.Tensor], pieces: Sequence[EncodedPiece | DevicePiece], dtype: DType
) -> list[DeviceChanges]:
    """The changes that pieces of one codec stand for, beside the old bits; writes nothing.

    Raises:
        CorruptStream: streams that no encoder writes.
        StopError: pieces of different codecs, or one without all of its old bits.
    """
    import torch

    if not olds:
        return []
    is_plain = {_is_plain(piece) for piece in pieces}
    if len(is_plain) > 1:
        raise StopError("pieces of both codecs; decode them apart")
    decode = _decode_plain if is_plain.pop() else _decode
    with torch.cuda.device_of(olds[0]):
        found = decode(olds, pieces, dtype)
    for changes, piece in zip(found, pieces, strict=True):
        announced = piece.streams.n_changed
        if announced not in (changes.n_changed, UNCOUNTED):
            raise CorruptStream(
                f"{changes.n_changed} changes decoded where {announced} were announced"
            )
    return found


def _is_plain(piece: EncodedPiece | DevicePiece) -> bool:
    return (piece.models if type(piece) is DevicePiece else piece.model) is None


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

    n_elements = [piece.n_elements for piece in pieces]
    streams = [piece.streams for piece in pieces]
    return decode_compact_all(Work(olds, n_elements, streams, _models(pieces), dtype))


def _models(pieces: Sequence[EncodedPiece | DevicePiece]) -> ModelBatch:
    """All models in one; those of pieces that were coded together are so already."""
    on_device = [piece for piece in pieces if type(piece) is DevicePiece]
    if len(on_device) < len(pieces):
        models = [piece.model for piece in pieces if piece.model is not None]
        return batch_of(models, [piece.chunk_log2 for piece in pieces])
    return joined([models.some(at) for models, at in runs_of(on_device)])


def runs_of(
    pieces: Sequence[DevicePiece],
) -> list[tuple[ModelBatch, slice | npt.NDArray[np.intp]]]:
    """Where the models of compact pieces are: in which batches, and there at which numbers."""
    _, _, batches, numbers = zip(*pieces, strict=True)
    owners = np.fromiter(map(id, batches), dtype=np.int64, count=len(pieces))
    at = np.array(numbers, dtype=np.intp)
    borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(pieces)]
    return [(batches[first], _slice_of(at[first:stop])) for first, stop in pairwise(borders)]


def _slice_of(numbers: npt.NDArray[np.intp]) -> slice | npt.NDArray[np.intp]:
    """Numbers that follow each other as a slice: what they choose need not be copied."""
    first = int(numbers[0])
    follow = np.array_equal(numbers, np.arange(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if follow else numbers
