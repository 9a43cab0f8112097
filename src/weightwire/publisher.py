"""The trainer's story: diff → encode → upload → commit → advance the baseline.

``publish`` returns when the state has been read, so the next optimizer step may begin; uploading
and committing go on behind it, and the future tells when the version exists. The baseline moves
only then. Whatever fails before that leaves it where it was, and the next publish is one
correct diff over everything that happened since.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weightwire.clock import Clock, SystemClock
from weightwire.codec.index import PatchIndex
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.memory import State, open_state
from weightwire.diff.moved import MoveGuard
from weightwire.diff.redo import RedoLog
from weightwire.diff.state import StateReader
from weightwire.digest import digest_state
from weightwire.errors import (
    FencedWriter,
    PublisherClosed,
    RetryError,
    StopError,
    TargetMismatch,
    WeightwireError,
)
from weightwire.events import Published
from weightwire.model import TensorSpec
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.store.extras import AnchorPolicy, Extras
from weightwire.store.open import open_store
from weightwire.store.records import Commit
from weightwire.store.resume import Claim, Head, take_over
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.store.run import Run, commit, create_identity
from weightwire.store.upload import NoUpload, UploadSink
from weightwire.store.validate import compare_with_full
from weightwire.trust.keys import SigningKey
from weightwire.trust.verify import require
from weightwire.workers import failed, finished, flatten, threads

log = logging.getLogger("weightwire.publisher")

Mode = Literal["sync", "observe", "validate"]
Event = Callable[[Published], None]


@dataclass
class _Pending:
    """A version that was read, and is not known to be committed."""

    record: Commit
    index: PatchIndex | None
    redo: RedoLog
    specs: dict[str, TensorSpec]
    ties: dict[str, str]
    published: Published


class Publisher:
    """Publishes versions of a state into a store; a context manager."""

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        state: State | Callable[[], Any],
        *,
        mode: Mode = "sync",
        codec: str = "compact",
        key: SigningKey | None = None,
        baseline: Path | None = None,
        anchors: AnchorPolicy | None = None,
        skips: tuple[int, ...] = (8, 64),
        companions: Path | None = None,
        claim: Claim = "at once",
        skip_empty: bool = False,
        overlap: bool = False,
        n_threads: int | None = None,
        on_published: Event = lambda _: None,
        retry: RetryPolicy | None = None,
        clock: Clock | None = None,
        background: Callable[[int, str], Executor] = threads,
    ) -> None:
        """Open the run in ``store``, or begin one; take it over if another publisher has it.

        Args:
            state: a torch module, a mapping of names to tensors, or a callable that gives pairs of
                name and tensor anew at every publish.
            mode: ``observe`` measures and sends nothing; ``validate`` also decodes each patch as a
                receiver would and compares it with the full state.
            baseline: keep the last committed state in a file there instead of in memory.
            companions: a folder with config and tokenizer files for the anchors.
            claim: fence an older publisher at once, with an empty version, or with the first version
                that is published: for a publisher that lives for one version only.
            skip_empty: publish no version where nothing changed, instead of an empty one.
            overlap: return from ``publish`` at once and read the state behind the caller's back;
                ``wait_until_read`` must then come before the state's next change.

        Raises:
            StoreUnavailable, StoreRefused, NotARun: the store's own errors.
            UntrustedHistory: the run in the store was not signed by ``key``.
        """
        self._clock = clock or SystemClock()
        self._state, self._mode, self._codec = state, mode, codec
        self._skip_empty, self._overlap, self._n_threads = skip_empty, overlap, n_threads
        self._on_published = on_published
        self._baseline = Baseline(baseline)
        self._uploads = background(4, "upload")
        self._commits = background(1, "commit")
        self._reads = background(1, "read")
        self._extras_worker = background(1, "extras")
        self._last: Future[Published] | None = None
        self._pending: _Pending | None = None
        self._fenced: FencedWriter | None = None
        self._is_closed = False
        self._guard: MoveGuard | None = None
        self._reading: Future[Future[Published]] | None = None
        self._head = Head()
        if mode == "observe":
            return
        self._run = self._open(store, key, retry or RetryPolicy())
        self._extras = Extras(
            self._run,
            self._baseline,
            anchors or AnchorPolicy(),
            skips,
            companions,
            self._clock,
            self._extras_worker,
            self._uploads,
        )
        self._head = take_over(self._run, self._baseline, self._clock, self._uploads, claim=claim)
        self._extras.begin(self._head)

    @property
    def version(self) -> int:
        """The newest version this publisher knows to be committed; -1 before the first."""
        return self._head.version

    @property
    def epoch(self) -> int:
        """This publisher's epoch; every later one has a higher."""
        return self._head.epoch

    @property
    def is_fenced(self) -> bool:
        """Whether another publisher took over."""
        return self._fenced is not None

    def publish(self, *, wait: bool = True) -> Future[Published]:
        """Publish the state as it is now; the future resolves when the version exists.

        One version is under way at a time. While it is, this call waits; with ``wait=False`` it
        gives the future of that version instead, and a later publish covers what changed since.

        Raises:
            FencedWriter: another publisher took over this run.
            PublisherClosed: after ``close``.
            StopError: a state that cannot be read, a store that refuses.

        What may be tried again (``RetryError``) is raised by the future: the baseline is where it
        was, and the next publish covers everything.
        """
        if self._is_closed:
            raise PublisherClosed("this publisher was closed; make a new one")
        if not wait and self._last is not None and not self._last.done():
            return self._last
        self._wait_for_last()
        if self._fenced is not None:
            raise self._fenced
        if not self._overlap:
            self._last = self._try_to_read()
            return self._last
        self._guard = MoveGuard(self._state)
        self._reading = self._reads.submit(self._try_to_read)
        self._last = flatten(self._reading)
        return self._last

    def wait_until_read(self) -> None:
        """Wait until the state may change again; only ``overlap`` makes this necessary."""
        if self._reading is not None:
            self._reading.exception()

    def wait(self) -> None:
        """Wait for the version under way and for anchors and skip patches in the making.

        Raises:
            WeightwireError: what the last publish failed with.
        """
        if self._last is not None:
            self._last.result()
        if self._mode != "observe":
            self._extras.wait()

    def close(self) -> None:
        """Finish what is under way, then let go of threads and memory."""
        self._is_closed = True
        self._wait_for_last()
        try:
            self._settle()
        except WeightwireError as error:
            log.error("nobody answers for the last version; it may or may not exist: %s", error)
        if self._mode != "observe":
            self._extras.close()
        for executor in (self._reads, self._commits, self._uploads, self._extras_worker):
            executor.shutdown(wait=True)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        key: SigningKey | None,
        retry: RetryPolicy,
    ) -> Run:
        objects = RetryingStore(open_store(store), self._clock, retry)
        return Run(
            objects,
            create_identity(objects, self._clock),
            sign=key.sign if key else None,
            verify=require(key.public) if key else None,
            executor=self._uploads,
        )

    def _wait_for_last(self) -> None:
        if self._last is not None:
            self._last.exception()

    def _try_to_read(self) -> Future[Published]:
        """What may be tried again belongs to the future; a trainer need not stop for it."""
        try:
            return self._read()
        except RetryError as error:
            log.warning("nothing was published: %s", error)
            return failed(error)

    def _read(self) -> Future[Published]:
        """Everything that looks at the live state; the rest happens behind the caller's back."""
        guard = self._guard or MoveGuard(self._state)
        self._guard = None
        self._settle()
        began = self._clock.monotonic()
        live = open_state(self._state() if _is_callable(self._state) else self._state)
        if self._mode == "observe":
            return self._observe(live, began)
        if self._head.needs_anchor:
            return self._read_whole(live, guard, began)
        return self._read_changes(live, guard, began)

    def _observe(self, live: StateReader, began: float) -> Future[Published]:
        """Compare with the last state seen, count, and send nothing."""
        if not self._baseline.specs:
            self._baseline.fill(live)
        redo, sink = RedoLog(), NoUpload()
        index = diff_states(
            self._baseline, live, sink, self._codec, n_threads=self._n_threads, log=redo
        )
        self._baseline.advance(redo, live.specs, live.ties)
        published = self._describe(index, live, began, n_bytes=sink.n_bytes)
        self._on_published(published)
        return finished(published)

    def _read_whole(self, live: StateReader, guard: MoveGuard, began: float) -> Future[Published]:
        """The first version, or a fresh start: everything is copied, and sent as an anchor."""
        self._baseline.fill(live)
        guard.check()
        digest, _ = digest_state(self._baseline)
        n_elements = sum(spec.n_elements for spec in live.specs.values())
        published = Published(
            version=self._head.version + 1,
            epoch=self._head.epoch,
            digest=digest,
            n_elements=n_elements,
            n_changed=n_elements,
            n_bytes=self._baseline.n_bytes,
            n_state_bytes=self._baseline.n_bytes,
            read_s=self._clock.monotonic() - began,
        )
        return self._commits.submit(self._send_whole, published)

    def _send_whole(self, published: Published) -> Published:
        began = self._clock.monotonic()
        put_id = self._clock.token()
        anchor = self._extras.upload_anchor(published.version, put_id, published.digest)
        record = replace(self._record(published, put_id), anchor=anchor)
        published = replace(published, n_bytes=anchor.n_bytes)
        specs, ties = dict(self._baseline.specs), dict(self._baseline.ties)
        self._pending = _Pending(record, None, RedoLog(), specs, ties, published)
        return self._commit(began)

    def _read_changes(self, live: StateReader, guard: MoveGuard, began: float) -> Future[Published]:
        put_id = self._clock.token()
        folder = layout.patch_folder(self._head.version, self._head.version + 1, put_id)
        sink = UploadSink(self._run.store, folder, self._uploads)
        redo = RedoLog()
        try:
            index = diff_states(
                self._baseline, live, sink, self._codec, n_threads=self._n_threads, log=redo
            )
            guard.check()
        except BaseException:
            sink.abandon()
            redo.close()
            raise
        if index.base_digest != self._head.digest:
            return self._start_fresh(live, guard, sink, redo, began)
        published = self._describe(index, live, began)
        specs, ties = dict(live.specs), dict(live.ties)
        pending = _Pending(self._record(published, put_id), index, redo, specs, ties, published)
        if self._mode != "validate":
            return self._commits.submit(self._send, pending, sink)
        return self._validate(pending, sink, live)

    def _start_fresh(
        self, live: StateReader, guard: MoveGuard, sink: UploadSink, redo: RedoLog, began: float
    ) -> Future[Published]:
        """The baseline is not what was committed: memory or its file was damaged. Send everything."""
        log.error("the baseline is not version %d any more; sending an anchor", self._head.version)
        sink.abandon()
        redo.close()
        return self._read_whole(live, guard, began)

    def _validate(
        self, pending: _Pending, sink: UploadSink, live: StateReader
    ) -> Future[Published]:
        """Decode what was uploaded as a receiver would, while the state holds still."""
        try:
            self._finish_upload(pending, sink)
            compare_with_full(self._run.store, pending.record, self._baseline, live)
            pending.published = replace(pending.published, is_validated=True)
            self._pending = pending
            return finished(self._commit(self._clock.monotonic()))
        except (WeightwireError, OSError) as error:
            if isinstance(error, TargetMismatch):
                log.error("version %d is not published: %s", pending.record.version, error)
            return failed(error)

    def _send(self, pending: _Pending, sink: UploadSink) -> Published:
        began = self._clock.monotonic()
        try:
            self._finish_upload(pending, sink)
        except BaseException:
            pending.redo.close()
            raise
        self._pending = pending
        return self._commit(began)

    def _finish_upload(self, pending: _Pending, sink: UploadSink) -> None:
        index = pending.index
        if index is None or self._is_empty(index):
            sink.abandon()
            return
        patch = sink.finish(index, self._head.version)
        pending.record = replace(pending.record, patch=patch)
        pending.published = replace(pending.published, n_bytes=patch.n_bytes)

    def _commit(self, began: float) -> Published:
        """The moment a version begins to exist; then, and only then, the baseline moves."""
        pending = self._pending
        if pending is None:
            raise StopError("there is nothing to commit")
        if self._skip_empty and pending.record.is_empty:
            self._pending = None
            return replace(pending.published, version=-1)
        try:
            # Whatever else it raises, the record may be there: the next publish sends it again.
            record_sha256 = commit(self._run, pending.record)
        except FencedWriter as error:
            self._fenced, self._pending = error, None
            raise
        self._advance(pending, record_sha256)
        done = replace(pending.published, commit_s=self._clock.monotonic() - began)
        self._on_published(done)
        return done

    def _advance(self, pending: _Pending, record_sha256: str) -> None:
        self._baseline.advance(pending.redo, pending.specs, pending.ties)
        pending.redo.close()
        self._pending = None
        self._head = self._head.after(pending.record, record_sha256)
        self._extras.committed(self._head, pending.record)

    def _settle(self) -> None:
        """Find out what became of a commit that nobody answered."""
        if self._pending is not None:
            self._commit(self._clock.monotonic())

    def _is_empty(self, index: PatchIndex) -> bool:
        same_bits = index.target_digest == index.base_digest
        return same_bits and dict(index.tied) == dict(self._baseline.ties)

    def _describe(
        self, index: PatchIndex, live: StateReader, began: float, n_bytes: int = 0
    ) -> Published:
        return Published(
            version=self._head.version + 1 if self._mode != "observe" else -1,
            epoch=self._head.epoch,
            digest=index.target_digest,
            n_elements=index.n_elements,
            n_changed=index.n_changed,
            n_bytes=n_bytes,
            n_state_bytes=sum(spec.n_bytes for spec in live.specs.values()),
            read_s=self._clock.monotonic() - began,
        )

    def _record(self, published: Published, put_id: str) -> Commit:
        """The next commit, still without a patch or an anchor."""
        return Commit(
            run=self._run.name,
            version=published.version,
            epoch=published.epoch,
            put_id=put_id,
            previous=self._head.record_sha256,
            time_ms=int(self._clock.now() * 1000),
            digest=published.digest,
            n_elements=published.n_elements,
            n_state_bytes=published.n_state_bytes,
            patch=None,
            anchor=None,
        )


def _is_callable(state: object) -> bool:
    """A module can be called too, but not to give its tensors."""
    return callable(state) and not hasattr(state, "state_dict")
