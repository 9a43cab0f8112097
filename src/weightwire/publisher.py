"""The trainer's story: diff → encode → upload → commit → advance the baseline.

``publish`` returns when the state has been read, so the next optimizer step may begin; uploading
and committing go on behind it, and the future tells when the version exists. The baseline moves
only then. Whatever fails before that leaves it where it was, and the next publish is one
correct diff over everything that happened since.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from weightwire.clock import Clock, SystemClock
from weightwire.codec.index import PatchIndex
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.device_streams import reading
from weightwire.diff.memory import State, open_state
from weightwire.diff.moved import MoveGuard
from weightwire.diff.places import Outline
from weightwire.diff.redo import RedoLog
from weightwire.diff.state import StateReader
from weightwire.digest import digest_state
from weightwire.errors import (
    FencedWriter,
    StopError,
    TargetMismatch,
    WeightwireError,
)
from weightwire.events import Published
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.store.extras import AnchorPolicy, Extras
from weightwire.store.open import open_store
from weightwire.store.records import Commit
from weightwire.store.resume import Claim, take_over
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.store.run import Run, commit, create_identity
from weightwire.store.upload import NoUpload, UploadSink
from weightwire.store.validate import compare_with_full
from weightwire.trust.keys import SigningKey
from weightwire.trust.verify import require
from weightwire.turns import Background, Event, Mode, Pending, Turns, next_record
from weightwire.workers import failed, finished, threads

log = logging.getLogger("weightwire.publisher")


class Publisher(Turns):
    """Publishes versions of a state into a store; a context manager."""

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        state: State,
        *,
        mode: Mode = "sync",
        codec: str = "compact",
        key: SigningKey | None = None,
        baseline: Path | None = None,
        device_baseline: DeviceBaseline = None,
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
        background: Background = threads,
    ) -> None:
        """Open the run in ``store``, or begin one; take it over if another publisher has it.

        Args:
            state: a torch module, a mapping of names to tensors, a callable that gives pairs of name
                and tensor anew at every publish, or any of these through ``cast``.
            mode: ``observe`` measures and sends nothing; ``validate`` also decodes each patch as a
                receiver would and compares it with the full state.
            baseline: keep the last committed state in a file there instead of in memory.
            device_baseline: of tensors on a GPU, keep it there (True), in page-locked host memory
                (False), or so many bytes there and the rest on the host; by default on the GPU as
                long as a tenth of its memory stays free.
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
        super().__init__(overlap=overlap, clock=clock or SystemClock(), background=background)
        self._state, self._mode, self._codec = state, mode, codec
        self._skip_empty, self._n_threads = skip_empty, n_threads
        self._on_published = on_published
        self._baseline = Baseline(baseline, on_device=device_baseline)
        self._guard: MoveGuard | None = None
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

    def publish(self, *, step: int | None = None, wait: bool = True) -> Future[Published]:
        """Publish the state as it is now; the future resolves when the version exists.

        One version is under way at a time. While it is, this call waits; with ``wait=False`` it
        gives the future of that version instead, and a later publish covers what changed since.
        ``step`` is the trainer's own count; receivers are told it with the version.

        Raises:
            FencedWriter: another publisher took over this run.
            PublisherClosed: after ``close``.
            StopError: a state that cannot be read, a store that refuses.

        What may be tried again (``RetryError``) is raised by the future: the baseline is where it
        was, and the next publish covers everything.
        """
        return self._publish(step, wait=wait)

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

    def _prepare(self) -> None:
        self._guard = MoveGuard(self._state)

    def _read(self) -> Future[Published]:
        guard, self._guard = self._guard or MoveGuard(self._state), None
        self._settle()
        began = self._clock.monotonic()
        guard.wait_for_caller()
        live = open_state(self._state)
        if self._mode == "observe":
            return self._observe(live, guard, began)
        if self._head.needs_anchor:
            return self._read_whole(live, guard, began)
        return self._read_changes(live, guard, began)

    def _observe(self, live: StateReader, guard: MoveGuard, began: float) -> Future[Published]:
        """Compare with the last state seen, count, and send nothing."""
        if not self._baseline.specs:
            with reading(live, guard.moment):
                self._baseline.fill(live)
        redo, sink = RedoLog(), NoUpload()
        index = self._diff(live, guard, sink, redo)
        self._baseline.advance(redo, live.specs, live.ties)
        published = self._describe(index, live, began, n_bytes=sink.n_bytes)
        self._on_published(published)
        return finished(published)

    def _read_whole(self, live: StateReader, guard: MoveGuard, began: float) -> Future[Published]:
        """The first version, or a fresh start: everything is copied, and sent as an anchor."""
        digest = self._fill(live, guard)
        n_elements = Outline(live.specs, live.ties).n_elements
        published = Published(
            version=self._head.version + 1,
            epoch=self._head.epoch,
            digest=digest,
            n_elements=n_elements,
            n_changed=n_elements,
            n_bytes=self._baseline.n_bytes,
            n_state_bytes=self._baseline.n_bytes,
            read_s=self._clock.monotonic() - began,
            step=self._step,
        )
        return self._commits.submit(self._send_whole, published)

    def _fill(self, live: StateReader, guard: MoveGuard) -> str:
        with reading(live, guard.moment):
            self._baseline.fill(live)
            guard.check()
            return digest_state(self._baseline)[0]

    def _send_whole(self, published: Published) -> Published:
        began = self._clock.monotonic()
        put_id = self._clock.token()
        anchor = self._extras.upload_anchor(published.version, put_id, published.digest)
        record = replace(self._record(published, put_id), anchor=anchor)
        published = replace(published, n_bytes=anchor.n_bytes)
        outline = Outline(dict(self._baseline.specs), dict(self._baseline.ties))
        self._pending = Pending(record, RedoLog(), outline, published)
        return self._commit(began)

    def _read_changes(self, live: StateReader, guard: MoveGuard, began: float) -> Future[Published]:
        put_id = self._clock.token()
        folder = layout.patch_folder(self._head.version, self._head.version + 1, put_id)
        sink = UploadSink(self._run.store, folder, self._uploads)
        redo = RedoLog()
        try:
            index = self._diff(live, guard, sink, redo)
            guard.check()
        except BaseException:
            sink.abandon()
            redo.close()
            raise
        if index.base_digest != self._head.digest:
            return self._start_fresh(live, guard, sink, redo, began)
        published = self._describe(index, live, began)
        outline = Outline(dict(live.specs), dict(live.ties))
        pending = Pending(self._record(published, put_id), redo, outline, published)
        if self._mode != "validate":
            return self._commits.submit(self._send, pending, index, sink)
        return self._validate(pending, index, sink, live)

    def _diff(
        self, live: StateReader, guard: MoveGuard, sink: UploadSink | NoUpload, redo: RedoLog
    ) -> PatchIndex:
        with reading(live, guard.moment):
            self._baseline.join(live)
            return diff_states(
                self._baseline, live, sink, self._codec, n_threads=self._n_threads, log=redo
            )

    def _start_fresh(
        self, live: StateReader, guard: MoveGuard, sink: UploadSink, redo: RedoLog, began: float
    ) -> Future[Published]:
        """The baseline is not what was committed: memory or its file was damaged. Send everything."""
        log.error("the baseline is not version %d any more; sending an anchor", self._head.version)
        sink.abandon()
        redo.close()
        return self._read_whole(live, guard, began)

    def _validate(
        self, pending: Pending, index: PatchIndex, sink: UploadSink, live: StateReader
    ) -> Future[Published]:
        """Decode what was uploaded as a receiver would, while the state holds still."""
        try:
            self._finish_upload(pending, index, sink)
            compare_with_full(self._run.store, pending.record, self._baseline, live)
            pending.published = replace(pending.published, is_validated=True)
            self._pending = pending
            return finished(self._commit(self._clock.monotonic()))
        except (WeightwireError, OSError) as error:
            if isinstance(error, TargetMismatch):
                log.error("version %d is not published: %s", pending.record.version, error)
            return failed(error)

    def _send(self, pending: Pending, index: PatchIndex, sink: UploadSink) -> Published:
        began = self._clock.monotonic()
        try:
            self._finish_upload(pending, index, sink)
        except BaseException:
            pending.redo.close()
            raise
        self._pending = pending
        return self._commit(began)

    def _finish_upload(self, pending: Pending, index: PatchIndex, sink: UploadSink) -> None:
        if self._is_empty(index):
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

    def _advance(self, pending: Pending, record_sha256: str) -> None:
        self._baseline.advance(pending.redo, pending.outline.specs, pending.outline.ties)
        pending.redo.close()
        self._pending = None
        self._head = self._head.after(pending.record, record_sha256)
        self._extras.committed(self._head, pending.record)

    def _settle(self) -> None:
        if self._pending is not None:
            self._commit(self._clock.monotonic())

    def _wait_for_extras(self) -> None:
        if self._mode != "observe":
            self._extras.wait()

    def _close_extras(self) -> None:
        if self._mode != "observe":
            self._extras.close()

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
            step=self._step,
        )

    def _record(self, published: Published, put_id: str) -> Commit:
        return next_record(self._run.name, self._head, published, put_id, self._clock)
