"""One run from many ranks: each diffs and uploads its own shard, rank 0 makes the one commit.

No rank ever holds more of the model than its shard, a baseline of it and a few pieces. A version
exists for all ranks or for none: whoever fails is named on every rank, baselines stay where they
were, and the next publish is one correct diff.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightwire.clock import Clock, SystemClock
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import PartDiff
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.device_streams import reading
from weightwire.diff.frozen import Frozen
from weightwire.diff.memory import State
from weightwire.diff.moved import MoveGuard
from weightwire.diff.places import Found
from weightwire.diff.redo import RedoLog
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_tensors
from weightwire.errors import ExtraMissing, FencedWriter, StopError
from weightwire.events import Published
from weightwire.store import layout as names
from weightwire.store.contract import ObjectStore
from weightwire.store.extras import AnchorPolicy, guarded, offer_of
from weightwire.store.open import open_store
from weightwire.store.records import AnchorRef, Commit
from weightwire.store.resume import Claim, Head
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.store.run import announce
from weightwire.store.upload import NoUpload, UploadSink
from weightwire.trainers.lead import Judgement, Lead, Plan, Ready
from weightwire.trainers.open_shards import open_shards
from weightwire.trainers.ranks import Ranks, agree
from weightwire.trainers.shards import Layout, Shards, Standing
from weightwire.trainers.spread_anchor import SpreadAnchor
from weightwire.trust.keys import SigningKey
from weightwire.turns import Background, Event, Mode, Pending, Turns
from weightwire.workers import finished, forget_frames, threads

log = logging.getLogger("weightwire.publisher")

_N_BUCKET_NAMES = 10_000_000
"""Names of seven digits, shared out among the ranks."""
_UNKNOWN = Published(-1, 0, "", 0, 0, 0, 0, 0.0)


class ShardedPublisher(Turns):
    """Publishes a sharded state; made, used and closed on every rank alike."""

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        state: State,
        *,
        ranks: Ranks | None = None,
        mode: Mode = "sync",
        codec: str = "compact",
        key: SigningKey | None = None,
        baseline: Path | None = None,
        device_baseline: DeviceBaseline = None,
        anchors: AnchorPolicy | None = None,
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
        """Open the run in ``store`` on every rank; rank 0 takes it over.

        Args:
            state: a module or mapping whose tensors may be DTensors, or ``cast`` of one.
            ranks: how the ranks talk; by default all of ``torch.distributed``, over gloo groups of
                its own, so that training may use any backend.
            baseline: a folder in which each rank keeps its part; without it, the first version
                after a restart is an anchor.
            on_published: called on rank 0.

        The other options are those of ``Publisher``. There are no skip patches.

        Raises:
            StopError: a mode that needs the whole state; the store's own errors, on every rank.
            RankFailed, RankLost: another rank could not open the store, or is gone.
        """
        super().__init__(overlap=overlap, clock=clock or SystemClock(), background=background)
        if mode == "validate":
            raise StopError("mode 'validate' needs the whole state on one rank; use 'sync'")
        self._ranks = ranks or _torch_ranks()
        self._state, self._mode, self._codec = state, mode, codec
        self._skip_empty, self._n_threads = skip_empty, n_threads
        self._companions, self._on_published = companions, on_published
        folder = baseline / self._my_name if baseline else None
        self._baseline = Baseline(folder, on_device=device_baseline)
        self._base: Standing | None = None
        self._told: Layout | None = None
        self._opened: Shards | Exception = StopError("nothing was opened yet")
        self._next: Standing | None = None
        self._guard = MoveGuard({})
        self._anchor_job: Future[None] | None = None
        policy = anchors or AnchorPolicy()
        self._lead = Lead(self._ranks.n_ranks, codec, policy, self._clock)
        if mode == "sync":
            self._open(store, key, claim, retry or RetryPolicy())

    def publish(self, *, step: int | None = None) -> Future[Published]:
        """Publish the state as it is now, on every rank; the future resolves when the version exists.

        Every rank calls this, with the same ``step``. It waits for the version under way.

        Raises:
            FencedWriter: another publisher took over this run.
            PublisherClosed: after ``close``.
            StopError: a state that cannot be read or is sharded in a way that is not supported.
            RankLost: a rank is gone: restart the trainer.

        What may be tried again (``RetryError``) is raised by the future, on every rank: baselines
        are where they were, and the next publish covers everything.
        """
        return self._publish(step)

    def __enter__(self) -> ShardedPublisher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks are elsewhere: nothing can be settled with them.
        self._is_closed = True
        self._wait_for_last()
        self._let_go()

    @property
    def _my_name(self) -> str:
        return f"rank-{self._ranks.rank:05d}-of-{self._ranks.n_ranks:05d}"

    @property
    def _is_lead(self) -> bool:
        return self._ranks.rank == 0

    def _open(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        key: SigningKey | None,
        claim: Claim,
        retry: RetryPolicy,
    ) -> None:
        def work() -> None:
            self._store = RetryingStore(open_store(store), self._clock, retry)

        self._head = agree(
            self._ranks, work, lambda _: self._lead.open(self._store, key, claim, self._uploads)
        )

    def _prepare(self) -> None:
        """Opening may redistribute a tensor among the ranks: with training's own groups."""
        try:
            self._opened = open_shards(self._state, self._ranks)
            self._guard = MoveGuard(self._opened.watched)
        except Exception as error:  # told to everyone by the next round
            forget_frames(error)
            self._opened = error

    def _read(self) -> Future[Published]:
        self._settle()
        began = self._clock.monotonic()
        plan = agree(self._ranks, self._ready, self._lead.plan)
        shards = self._shards()
        self._told = shards.layout
        if self._mode == "observe":
            return self._observe(shards, plan, began)
        if plan.is_whole:
            return self._read_whole(shards, plan, began)
        return self._read_changes(shards, plan, began)

    def _ready(self) -> Ready:
        shards = self._shards()
        self._guard.wait_for_caller()
        has_base = dict(self._baseline.specs) == dict(shards.local.specs)
        return Ready(None if shards.layout == self._told else shards.layout, has_base)

    def _shards(self) -> Shards:
        if isinstance(self._opened, Exception):
            raise self._opened
        return self._opened

    def _observe(self, shards: Shards, plan: Plan, began: float) -> Future[Published]:
        """Compare with the last state seen, count, and send nothing."""
        if plan.is_whole:
            with reading(shards.local, self._guard.moment):
                self._baseline.fill(shards.local)
            self._base, plan = shards.standing, replace(plan, fresh=frozenset())
        sink, redo = NoUpload(), RedoLog()
        diff = self._diff(shards, plan, sink, redo)
        found = self._judged(shards, diff, began, in_store=False)
        diff.finish(found.changed)
        n_bytes = agree(self._ranks, lambda: sink.n_bytes, _total)
        self._baseline.advance(redo, shards.local.specs, {})
        self._base = shards.standing
        self._lead.observed()
        published = replace(found.published, n_bytes=n_bytes)
        self._tell(published)
        return finished(published)

    def _read_changes(self, shards: Shards, plan: Plan, began: float) -> Future[Published]:
        version = self._head.version
        folder = names.patch_folder(version, version + 1, plan.put_id)
        sink, redo = UploadSink(self._store, folder, self._uploads), RedoLog()
        diff = self._diff(shards, plan, sink, redo)
        try:
            found = self._judged(shards, diff, began, in_store=True)
        except BaseException:
            sink.abandon()
            redo.close()
            raise
        if found.is_sound:
            return self._commits.submit(self._send, shards, plan, diff, sink, redo, found)
        log.error("the baselines are not version %d any more; sending an anchor", version)
        sink.abandon()
        redo.close()
        return self._read_whole(shards, plan, began)

    def _diff(
        self, shards: Shards, plan: Plan, sink: UploadSink | NoUpload, redo: RedoLog
    ) -> PartDiff:
        base = self._base or shards.standing
        return PartDiff(
            self._baseline,
            shards.local,
            shards.places(base.outline, plan.fresh),
            sink,
            self._codec,
            n_threads=self._n_threads,
            log=redo,
            base_starts=base.starts,
            first_bucket=self._ranks.rank * (_N_BUCKET_NAMES // self._ranks.n_ranks),
        )

    def _judged(self, shards: Shards, diff: PartDiff, began: float, *, in_store: bool) -> Judgement:
        def compare() -> Found:
            with reading(shards.local, self._guard.moment):
                self._baseline.join(shards.local)
                found = diff.run()
            self._guard.check()
            return found

        judge = self._lead.judge
        return agree(
            self._ranks,
            compare,
            lambda founds: judge(founds, self._so_far(began), in_store=in_store),
        )

    def _so_far(self, began: float) -> Published:
        return replace(_UNKNOWN, read_s=self._clock.monotonic() - began, step=self._step)

    def _send(
        self,
        shards: Shards,
        plan: Plan,
        diff: PartDiff,
        sink: UploadSink,
        redo: RedoLog,
        found: Judgement,
    ) -> Published:
        began = self._clock.monotonic()

        def finish() -> Any:
            buckets = diff.finish(found.changed)
            sink.drain()
            return buckets

        try:
            record = agree(
                self._ranks,
                finish,
                lambda all_: self._lead.finish_patch(all_, sink, found.published, plan.put_id),
            )
        except BaseException:
            sink.abandon()
            redo.close()
            raise
        n_bytes = record.patch.n_bytes if record.patch else 0
        return self._commit(record, shards, redo, replace(found.published, n_bytes=n_bytes), began)

    def _read_whole(self, shards: Shards, plan: Plan, began: float) -> Future[Published]:
        """The first version, or a fresh start: every rank copies its part, rank 0 sends an anchor."""

        def fill() -> dict[str, TensorDigest]:
            with reading(shards.local, self._guard.moment):
                self._baseline.fill(shards.local)
                self._guard.check()
                return digest_tensors(self._baseline, shards.starts)

        published = agree(
            self._ranks, fill, lambda all_: self._lead.whole(all_, self._so_far(began))
        )
        return self._commits.submit(self._send_whole, shards, plan, published)

    def _send_whole(self, shards: Shards, plan: Plan, published: Published) -> Published:
        began = self._clock.monotonic()
        folder = names.anchor_folder(published.version, plan.put_id)

        def stream() -> AnchorRef | None:
            # Behind anchors in the making, in the same order on every rank.
            job = self._streaming(self._baseline, shards.standing, folder, published.digest)
            return self._extras_worker.submit(job).result()

        def decide(refs: list[AnchorRef | None]) -> Commit:
            if refs[0] is None:
                raise StopError("rank 0 made no anchor")
            return self._lead.with_anchor(refs[0], published, plan.put_id)

        record = agree(self._ranks, stream, decide)
        n_bytes = record.anchor.n_bytes if record.anchor else 0
        return self._commit(record, shards, RedoLog(), replace(published, n_bytes=n_bytes), began)

    def _streaming(
        self, local: StateReader, standing: Standing, folder: str, digest: str
    ) -> Callable[[], AnchorRef | None]:
        """A job for the extras' thread, with what is known now: the next version may know better."""
        ownership = self._lead.ownership if self._is_lead else None
        spread = SpreadAnchor(self._ranks, local, standing.starts, ownership)
        return lambda: spread.stream(self._store, folder, digest, self._companions)

    def _commit(
        self, record: Commit, shards: Shards, redo: RedoLog, published: Published, began: float
    ) -> Published:
        if self._skip_empty and record.is_empty:
            redo.close()
            return replace(published, version=-1)
        self._pending = Pending(record, redo, shards.outline, published)
        self._next = shards.standing
        self._settle()
        done = replace(published, commit_s=self._clock.monotonic() - began)
        self._tell(done)
        return done

    def _settle(self) -> None:
        """Make the pending version exist, or learn that it does; then every baseline moves."""
        pending = self._pending
        if pending is None:
            return
        try:
            # Whatever else it raises, the record may be there: the next publish sends it again.
            head = agree(self._ranks, _nothing, lambda _: self._lead.commit(pending.record))
        except FencedWriter as error:
            self._fenced, self._pending = error, None
            pending.redo.close()
            raise
        is_due = agree(
            self._ranks,
            lambda: self._advance(pending),
            lambda _: self._lead.committed(head, pending.record, is_busy=self._is_making_anchor),
        )
        self._head, self._base, self._pending = head, self._next, None
        pending.redo.close()
        if is_due:
            self._start_anchor(head)

    def _advance(self, pending: Pending) -> None:
        """Safe to repeat: if another rank cannot, all of them do it again."""
        if self._next is not None:
            self._baseline.advance(pending.redo, self._next.local_specs, {})

    @property
    def _is_making_anchor(self) -> bool:
        return self._anchor_job is not None and not self._anchor_job.done()

    def _start_anchor(self, head: Head) -> None:
        """Rank 0 said so: whether the last one is through must not be asked on each rank."""
        if self._base is None:
            return
        put_id, frozen = self._clock.token(), self._baseline.freeze()
        folder = names.anchor_folder(head.version, put_id)
        stream = self._streaming(frozen, self._base, folder, head.digest)
        self._anchor_job = self._extras_worker.submit(
            guarded, self._make_anchor, frozen, stream, head, put_id
        )

    def _make_anchor(
        self, frozen: Frozen, stream: Callable[[], AnchorRef | None], head: Head, put_id: str
    ) -> None:
        with frozen:
            ref = stream()
        if ref is not None and self._lead.run is not None:
            run = self._lead.run
            announce(run, offer_of(run, head, put_id, self._clock, anchor=ref))
            self._lead.anchored(head.version)

    def _wait_for_extras(self) -> None:
        if self._anchor_job is not None:
            self._anchor_job.exception()

    def _close_extras(self) -> None:
        self._wait_for_extras()

    def _tell(self, published: Published) -> None:
        if self._is_lead:
            self._on_published(published)


def _total(sizes: list[int]) -> int:
    return sum(sizes)


def _nothing() -> None:
    """Some rounds ask nothing of the ranks but to be there."""


def _torch_ranks() -> Ranks:
    try:
        from weightwire.trainers.torch_ranks import TorchRanks
    except ImportError as error:
        raise ExtraMissing(
            "shards need torch: pip install 'weightwire[torch]', or pass ranks="
        ) from error
    return TorchRanks()
