"""Two states in, one patch out, in bounded memory: the sender's side of everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightwire.codec.index import BucketEntry, PatchIndex
from weightwire.codec.piece import CODECS, encode_piece, thread_count
from weightwire.codec.record import (
    Kind,
    Record,
    RecordHead,
    device_record,
    full_record,
    patch_record,
)
from weightwire.codec.writer import BucketSink, PatchWriter
from weightwire.diff.change_log import ChangeLog, CodedLog
from weightwire.diff.device_diff import DeviceCoded, DeviceDiff, Span
from weightwire.diff.places import Found, Outline, Place, index_of, whole_places
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_bits, digest_tensor, piece_ranges
from weightwire.errors import StopError
from weightwire.model import Bits, Changes, TensorSpec
from weightwire.workers import threads

if TYPE_CHECKING:
    from weightwire.codec.device_pieces import DevicePiece

Progress = Callable[[int], None]
"""Called with the number of target bytes dealt with since the last call."""

_NOTHING = TensorDigest()
_NO_PROGRESS: Progress = lambda _: None  # noqa: E731

_MAX_CODERS = 3
"""Pieces coded at once: hides what is serial in each, and bounds memory to four pairs of pieces."""


@dataclass(frozen=True)
class _Piece:
    """One piece of one tensor of both states; ``old`` is None where the base has no match."""

    spec: TensorSpec
    place: Place
    start: int
    old: Bits | None
    new: Bits


@dataclass(frozen=True)
class _Coded:
    """A record on its way from a coder to the writer, with what a log wants of it."""

    spec: TensorSpec
    record: Record
    changes: Changes | None
    piece: DevicePiece | None = None
    """Where it was coded on a device."""


@dataclass
class _Tensor:
    """What is known of a tensor while its pieces go by."""

    name: str
    has_base: bool
    base: TensorDigest = _NOTHING
    target: TensorDigest = _NOTHING
    is_changed: bool = False


def diff_states(
    base: StateReader,
    target: StateReader,
    sink: BucketSink,
    codec: str = "compact",
    *,
    n_threads: int | None = None,
    progress: Progress = _NO_PROGRESS,
    log: ChangeLog | None = None,
) -> PatchIndex:
    """Write the buckets of the patch from ``base`` to ``target``, and give its index.

    ``log`` is told of every piece's changes, from the calling thread, as the pieces are coded.

    Raises:
        StopError: a codec or element type that does not exist.
    """
    places = whole_places(base.specs, target.specs)
    part = PartDiff(base, target, places, sink, codec, n_threads=n_threads, log=log)
    found = part.run(progress)
    whole = Outline(base.specs, base.ties), Outline(target.specs, target.ties)
    return index_of(found, *whole, codec, part.finish(found.changed))


class PartDiff:
    """One comparison: pieces in state order, records to the writer, digests by tensor.

    Of a state that is spread over ranks each compares its part: ``run``, then learns from the others
    which tensors changed anywhere, then ``finish``.
    """

    def __init__(
        self,
        base: StateReader,
        target: StateReader,
        places: Mapping[str, Place],
        sink: BucketSink,
        codec: str,
        *,
        n_threads: int | None = None,
        log: ChangeLog | None = None,
        base_starts: Mapping[str, int] | None = None,
        first_bucket: int = 0,
    ) -> None:
        """Compare tensors that lie at ``places``; those of the base begin at ``base_starts``, or 0.

        Raises:
            StopError: no codec of this name.
        """
        if codec not in CODECS:
            raise StopError(f"no codec {codec!r}; choose one of: {', '.join(CODECS)}")
        self._base, self._target, self._places = base, target, places
        self._writer = PatchWriter(
            sink, codec, first_bucket=first_bucket, n_threads=thread_count(n_threads)
        )
        self._codec, self._log = codec, log
        self._base_specs, self._target_specs = base.specs, target.specs
        self._base_starts = base_starts or {}
        self._device = DeviceDiff(base, target, codec, n_threads=thread_count(n_threads))
        n_pieces = sum(len(piece_ranges(spec)) for spec in self._target_specs.values())
        self._n_coders = max(1, min(thread_count(n_threads), n_pieces, _MAX_CODERS))
        self._n_threads = thread_count(n_threads) // self._n_coders
        self._base_digests: dict[str, TensorDigest] = {}
        self._target_digests: dict[str, TensorDigest] = {}
        self._changed: set[str] = set()
        self._n_changed = 0
        self._held: dict[str, list[Record]] = {}

    def run(self, progress: Progress = _NO_PROGRESS) -> Found:
        """Compare everything; tensors with a change are written at once, the others held back."""
        tensor: _Tensor | None = None
        for coded in self._coded():
            head = coded.record.head
            if tensor is None or tensor.name != head.spec.name:
                self._close(tensor)
                tensor = _Tensor(head.spec.name, has_base=head.kind is not Kind.FULL)
            self._take(coded.record, tensor)
            self._tell(coded)
            progress(head.n_elements * head.spec.dtype.n_bytes)
        self._close(tensor)
        self._digest_unmatched()
        changed = frozenset(self._changed)
        return Found(self._base_digests, self._target_digests, changed, self._n_changed)

    def finish(self, changed: Iterable[str]) -> tuple[BucketEntry, ...]:
        """Write what was held back of tensors that changed elsewhere; gives all buckets."""
        wanted = set(changed)
        for name in [name for name in self._held if name in wanted]:
            self._release(name)
        return self._writer.close()

    def _coded(self) -> Iterator[_Coded]:
        """Records in state order: those of pieces on a device by the window, the others around them."""
        if self._log is None or isinstance(self._log, CodedLog):
            self._device.look_for(n for n, p in self._places.items() if p.base_shape is not None)
        if not self._device.devices:
            yield from self._coded_on_host(self._plan())
            return
        for spans, found in self._device.windows(self._plan()):
            on_host = [span for span in spans if (span.spec.name, span.start) not in found]
            others = self._coded_on_host(on_host)
            for span in spans:
                coded = found.pop((span.spec.name, span.start), None)
                yield next(others) if coded is None else self._recorded(span, coded)

    def _coded_on_host(self, spans: Iterable[Span]) -> Iterator[_Coded]:
        """One thread reads ahead, a few code: memory stays at their pieces."""
        if self._n_coders * self._n_threads == 1:
            for span in spans:
                yield self._code(self._read(span))
            return
        waiting: deque[Future[_Coded]] = deque()
        with (
            threads(1, "read") as reader,
            threads(self._n_coders, "code") as coders,
        ):
            for span in spans:
                waiting.append(coders.submit(self._code_read, reader.submit(self._read, span)))
                if len(waiting) > self._n_coders:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _plan(self) -> Iterator[Span]:
        for spec in self._target_specs.values():
            place = self._places[spec.name]
            for start, stop in piece_ranges(spec):
                has_base = place.base_shape is not None
                yield Span(spec, start, stop, place.start + start, has_base)

    def _read(self, span: Span) -> _Piece:
        name, start, stop = span.spec.name, span.start, span.stop
        old = self._base.read(name, start, stop) if span.has_base else None
        new = self._target.read(name, start, stop)
        return _Piece(span.spec, self._places[name], start, old, new)

    def _recorded(self, span: Span, coded: DeviceCoded) -> _Coded:
        place = self._places[span.spec.name]
        head = _head(place, span.first_index, span.stop - span.start, coded.target)
        record = device_record(replace(head, base_digest=coded.base), coded.piece, coded.model)
        return _Coded(span.spec, record, None, coded.piece)

    def _tell(self, coded: _Coded) -> None:
        if self._log is None:
            return
        head = coded.record.head
        here = self._places[head.spec.name].head_here(head, coded.spec)
        if coded.changes is not None:
            self._log.add(here, coded.changes)
        elif coded.piece is not None and isinstance(self._log, CodedLog):
            self._log.add_coded(here, coded.piece)

    def _take(self, record: Record, tensor: _Tensor) -> None:
        tensor.base += record.head.base_digest
        tensor.target += record.head.target_digest
        tensor.is_changed |= bool(record.head.n_changed) or record.head.is_fresh
        self._n_changed += record.head.n_changed
        self._held.setdefault(tensor.name, []).append(record)
        if tensor.is_changed:
            self._release(tensor.name)

    def _code_read(self, reading: Future[_Piece]) -> _Coded:
        return self._code(reading.result())

    def _code(self, piece: _Piece) -> _Coded:
        place, first = piece.place, piece.place.start + piece.start
        target = digest_bits(piece.new, first, n_threads=self._n_threads)
        head = _head(place, first, len(piece.new), target)
        if piece.old is None:
            return self._code_full(head, piece)
        return self._code_patch(head, piece.old, piece)

    def _code_full(self, head: RecordHead, piece: _Piece) -> _Coded:
        record = full_record(head, piece.new)
        # Read back from the record, which is a copy: the live tensor may move before the log is used.
        return _Coded(piece.spec, record, None if self._log is None else record.changes(None))

    def _code_patch(self, head: RecordHead, old: Bits, piece: _Piece) -> _Coded:
        base = digest_bits(old, head.start, n_threads=self._n_threads)
        coded = encode_piece(
            old,
            piece.new,
            piece.spec.dtype,
            self._codec,
            n_threads=self._n_threads,
            keep_changes=self._log is not None,
        )
        record = patch_record(replace(head, base_digest=base), coded)
        return _Coded(piece.spec, record, coded.streams.changes)

    def _release(self, name: str) -> None:
        """Pieces without a change are held until one of their tensor's has one."""
        for record in self._held.pop(name, ()):
            self._writer.add(record)

    def _close(self, tensor: _Tensor | None) -> None:
        if tensor is None:
            return
        self._target_digests[tensor.name] = tensor.target
        if tensor.has_base:
            self._base_digests[tensor.name] = tensor.base
        if tensor.is_changed:
            self._changed.add(tensor.name)

    def _digest_unmatched(self) -> None:
        """Tensors of the base that no target tensor was compared with still count in its digest."""
        for name in self._base_specs:
            if name not in self._base_digests:
                start = self._base_starts.get(name, 0)
                self._base_digests[name] = digest_tensor(self._base, name, first_index=start)


def _head(place: Place, first: int, n_elements: int, target: TensorDigest) -> RecordHead:
    """Of a piece that has no base yet."""
    return RecordHead(
        spec=place.spec,
        kind=Kind.FULL,
        start=first,
        n_elements=n_elements,
        n_changed=n_elements,
        base_digest=TensorDigest(),
        target_digest=target,
        base_shape=place.spec.shape if place.base_shape is None else place.base_shape,
    )
