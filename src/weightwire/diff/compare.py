"""Two states in, one patch out, in bounded memory: the sender's side of everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from weightwire.codec.index import PatchIndex
from weightwire.codec.piece import CODECS, encode_piece, thread_count
from weightwire.codec.record import Kind, Record, RecordHead, full_record, patch_record
from weightwire.codec.writer import BucketSink, PatchWriter
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, combine, digest_bits, digest_tensor, piece_ranges
from weightwire.errors import StopError
from weightwire.model import Bits, Changes, TensorSpec

Progress = Callable[[int], None]
"""Called with the number of target bytes dealt with since the last call."""

_NOTHING = TensorDigest()

_MAX_CODERS = 3
"""Pieces coded at once: hides what is serial in each, and bounds memory to four pairs of pieces."""


class ChangeLog(Protocol):
    """Told what every piece of the target differs in, in state order, from one thread.

    A publisher advances its copy of the base with it, without a second pass over memory. ``add`` is
    called once for each piece of each target tensor, those without a change and those of empty
    tensors included: they may still be reshaped, and their heads hold digests. Tensors that are
    removed or tied have no pieces. A diff that raises may have told any part of it: what was added
    counts only once ``diff_states`` has returned.
    """

    def add(self, head: RecordHead, changes: Changes) -> None:
        """Take one piece's changes: positions from ``head.start`` on, and the new bits there.

        For a FULL record, which has no base, that is every element. The arrays are the log's to
        keep: none of them is live memory.
        """


@dataclass(frozen=True)
class _Piece:
    """One piece of one tensor of both states; ``old`` is None where the base has no match."""

    spec: TensorSpec
    base_shape: tuple[int, ...] | None
    start: int
    old: Bits | None
    new: Bits


@dataclass(frozen=True)
class _Coded:
    """A record on its way from a coder to the writer, with its changes where a log wants them."""

    record: Record
    changes: Changes | None


@dataclass
class _Tensor:
    """What is known of a tensor while its pieces go by."""

    spec: TensorSpec
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
    progress: Progress = lambda _: None,
    log: ChangeLog | None = None,
) -> PatchIndex:
    """Write the buckets of the patch from ``base`` to ``target``, and give its index.

    ``log`` is told of every piece's changes, from the calling thread, as the pieces are coded.

    Raises:
        StopError: a codec or element type that does not exist.
    """
    if codec not in CODECS:
        raise StopError(f"no codec {codec!r}; choose one of: {', '.join(CODECS)}")
    return _Diff(base, target, PatchWriter(sink, codec), codec, n_threads, log).run(progress)


class _Diff:
    """One run of the diff: pieces in state order, records to the writer, digests by tensor."""

    def __init__(
        self,
        base: StateReader,
        target: StateReader,
        writer: PatchWriter,
        codec: str,
        n_threads: int | None,
        log: ChangeLog | None,
    ) -> None:
        self._base, self._target = base, target
        self._writer, self._codec, self._log = writer, codec, log
        self._base_specs, self._target_specs = base.specs, target.specs
        n_pieces = sum(len(piece_ranges(spec)) for spec in self._target_specs.values())
        self._n_coders = max(1, min(thread_count(n_threads), n_pieces, _MAX_CODERS))
        self._n_threads = thread_count(n_threads) // self._n_coders
        self._base_digests: dict[str, TensorDigest] = {}
        self._target_digests: dict[str, TensorDigest] = {}
        self._unchanged: dict[str, str] = {}
        self._held: list[Record] = []

    def run(self, progress: Progress) -> PatchIndex:
        tensor: _Tensor | None = None
        for coded in self._coded():
            head = coded.record.head
            if head.start == 0:
                self._close(tensor)
                tensor = _Tensor(head.spec, has_base=head.kind is not Kind.FULL)
            if tensor is not None:
                self._take(coded.record, tensor)
            if self._log is not None and coded.changes is not None:
                self._log.add(head, coded.changes)
            progress(head.n_elements * head.spec.dtype.n_bytes)
        self._close(tensor)
        self._digest_unmatched()
        return self._finish()

    def _coded(self) -> Iterator[_Coded]:
        """Records in state order. One thread reads ahead, a few code: memory stays at their pieces."""
        if self._n_coders * self._n_threads == 1:
            for read in self._plan():
                yield self._code(read())
            return
        waiting: deque[Future[_Coded]] = deque()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="weightwire-read") as reader,
            ThreadPoolExecutor(self._n_coders, thread_name_prefix="weightwire-code") as coders,
        ):
            for read in self._plan():
                waiting.append(coders.submit(self._code_read, reader.submit(read)))
                if len(waiting) > self._n_coders:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _plan(self) -> Iterator[Callable[[], _Piece]]:
        for name, spec in self._target_specs.items():
            base = self._base_specs.get(name)
            patchable = base and (base.dtype, base.n_elements) == (spec.dtype, spec.n_elements)
            base_shape = base.shape if base and patchable else None
            for start, stop in piece_ranges(spec):
                yield lambda a=spec, b=base_shape, c=start, d=stop: self._read(a, b, c, d)  # type: ignore[misc]

    def _read(
        self, spec: TensorSpec, base_shape: tuple[int, ...] | None, start: int, stop: int
    ) -> _Piece:
        old = None if base_shape is None else self._base.read(spec.name, start, stop)
        return _Piece(spec, base_shape, start, old, self._target.read(spec.name, start, stop))

    def _take(self, record: Record, tensor: _Tensor) -> None:
        tensor.base += record.head.base_digest
        tensor.target += record.head.target_digest
        tensor.is_changed |= bool(record.head.n_changed) or record.head.is_fresh
        self._held.append(record)
        if tensor.is_changed:
            self._release()

    def _code_read(self, reading: Future[_Piece]) -> _Coded:
        return self._code(reading.result())

    def _code(self, piece: _Piece) -> _Coded:
        target = digest_bits(piece.new, piece.start, n_threads=self._n_threads)
        head = RecordHead(
            spec=piece.spec,
            kind=Kind.FULL,
            start=piece.start,
            n_elements=len(piece.new),
            n_changed=len(piece.new),
            base_digest=TensorDigest(),
            target_digest=target,
            base_shape=piece.spec.shape if piece.base_shape is None else piece.base_shape,
        )
        if piece.old is None or piece.base_shape is None:
            return self._code_full(head, piece.new)
        return self._code_patch(head, piece.old, piece)

    def _code_full(self, head: RecordHead, new: Bits) -> _Coded:
        record = full_record(head, new)
        # Read back from the record, which is a copy: the live tensor may move before the log is used.
        return _Coded(record, None if self._log is None else record.changes(None))

    def _code_patch(self, head: RecordHead, old: Bits, piece: _Piece) -> _Coded:
        base = digest_bits(old, piece.start, n_threads=self._n_threads)
        coded = encode_piece(
            old,
            piece.new,
            piece.spec.dtype,
            self._codec,
            n_threads=self._n_threads,
            keep_changes=self._log is not None,
        )
        return _Coded(patch_record(replace(head, base_digest=base), coded), coded.streams.changes)

    def _release(self) -> None:
        """Pieces without a change are held until one of their tensor's has one."""
        for record in self._held:
            self._writer.add(record)
        self._held.clear()

    def _close(self, tensor: _Tensor | None) -> None:
        if tensor is None:
            return
        name = tensor.spec.name
        self._target_digests[name] = tensor.target
        if tensor.has_base:
            self._base_digests[name] = tensor.base
        if not tensor.is_changed:
            self._unchanged[name] = str(tensor.target)
            self._held.clear()

    def _digest_unmatched(self) -> None:
        """Tensors of the base that no target tensor was compared with still count in its digest."""
        for name in self._base_specs:
            if name not in self._base_digests:
                self._base_digests[name] = digest_tensor(self._base, name)

    def _finish(self) -> PatchIndex:
        ties = dict(self._target.ties)
        return self._writer.finish(
            base_digest=combine((self._base_specs[n], d) for n, d in self._base_digests.items()),
            target_digest=combine(
                (self._target_specs[n], d) for n, d in self._target_digests.items()
            ),
            n_tensors=len(self._target_specs),
            n_elements=sum(spec.n_elements for spec in self._target_specs.values()),
            unchanged=self._unchanged,
            removed=[n for n in self._base_specs if n not in self._target_specs and n not in ties],
            tied=ties,
        )
