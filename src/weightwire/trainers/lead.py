"""What rank 0 does for all ranks: it knows the run, and decides from what the others found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from weightwire.clock import Clock
from weightwire.codec.index import BucketEntry, PatchIndex
from weightwire.diff.places import Found, Outline, index_of
from weightwire.digest import TensorDigest
from weightwire.errors import StopError
from weightwire.events import Published
from weightwire.store.contract import ObjectStore
from weightwire.store.extras import AnchorPolicy, AnchorSchedule
from weightwire.store.records import AnchorRef, Commit
from weightwire.store.resume import Claim, Head, take_over
from weightwire.store.run import Run, commit, create_identity
from weightwire.store.upload import UploadSink
from weightwire.trainers.shards import Layout, Ownership, own
from weightwire.trust.keys import SigningKey
from weightwire.trust.verify import require
from weightwire.turns import next_record


@dataclass(frozen=True)
class Ready:
    """What a rank says before a version is made."""

    layout: Layout | None
    """None where it is the one rank 0 knows."""
    has_base: bool
    """Its baseline has the same elements, so it may be what was committed last."""


@dataclass(frozen=True)
class Plan:
    """What all ranks do next."""

    put_id: str
    is_whole: bool
    fresh: frozenset[str]
    """Tensors whose elements changed hands, and which are sent whole."""


@dataclass(frozen=True)
class Judgement:
    """What the ranks' findings amount to."""

    is_sound: bool
    """The baselines are what was committed last; else everything is sent anew."""
    changed: frozenset[str]
    published: Published


class Lead:
    """Rank 0's own part of a publisher: the run, its head, who owns what, when anchors are due."""

    def __init__(self, n_ranks: int, codec: str, anchors: AnchorPolicy, clock: Clock) -> None:
        self.head = Head()
        self.run: Run | None = None
        self._codec, self._clock = codec, clock
        self._schedule = AnchorSchedule(anchors)
        self._layouts: list[Layout | None] = [None] * n_ranks
        self._base: Ownership | None = None
        self._target: Ownership | None = None
        self._index: PatchIndex | None = None

    def open(
        self, store: ObjectStore, key: SigningKey | None, claim: Claim, executor: Executor
    ) -> Head:
        """Open the run or begin one, and take it over.

        Raises:
            StoreUnavailable, StoreRefused, NotARun, UntrustedHistory: the store's own errors.
        """
        self.run = Run(
            store,
            create_identity(store, self._clock),
            sign=key.sign if key else None,
            verify=require(key.public) if key else None,
            executor=executor,
        )
        self.head = take_over(self.run, None, self._clock, executor, claim=claim)
        self._schedule.begin(self.head)
        return self.head

    @property
    def ownership(self) -> Ownership:
        """Who owns what of the version being made.

        Raises:
            StopError: nothing was planned yet.
        """
        if self._target is None:
            raise StopError("no rank has said yet what it holds")
        return self._target

    def plan(self, answers: Sequence[Ready]) -> Plan:
        """What to do, from what every rank is ready for.

        Raises:
            UnsupportedLayout: the ranks' parts do not make a whole.
        """
        self._layouts = [
            answer.layout or known for answer, known in zip(answers, self._layouts, strict=True)
        ]
        target = own([layout for layout in self._layouts if layout is not None])
        may_resume = bool(self.head.digest) and all(answer.has_base for answer in answers)
        if self._base is None and may_resume:
            self._base = target  # what their files hold; the digest will tell
        self._target = target
        is_lost = self.run is not None and self.head.needs_anchor and not may_resume
        fresh = target.moved_since(self._base) if self._base else frozenset[str]()
        return Plan(self._clock.token(), self._base is None or is_lost, fresh)

    def judge(self, founds: Sequence[Found], published: Published, *, in_store: bool) -> Judgement:
        """Add up what the ranks found, and see whether it starts where the run ends."""
        found = reduce(add, founds)
        base = self._base.outline if self._base else self.ownership.outline
        index = index_of(found, base, self.ownership.outline, self._codec, ())
        self._index = index
        done = replace(
            published,
            version=self.head.version + 1 if in_store else -1,
            epoch=self.head.epoch,
            digest=index.target_digest,
            n_elements=index.n_elements,
            n_changed=index.n_changed,
            n_state_bytes=self.ownership.outline.n_bytes,
        )
        is_sound = not in_store or index.base_digest == self.head.digest
        return Judgement(is_sound, found.changed, done)

    def whole(
        self, digests: Sequence[Mapping[str, TensorDigest]], published: Published
    ) -> Published:
        """Describe a version that is sent whole."""
        outline = self.ownership.outline
        found = reduce(add, (Found({}, each, frozenset(), 0) for each in digests))
        return replace(
            published,
            version=self.head.version + 1,
            epoch=self.head.epoch,
            digest=outline.digest(found.target),
            n_elements=outline.n_elements,
            n_changed=outline.n_elements,
            n_bytes=outline.n_bytes,
            n_state_bytes=outline.n_bytes,
        )

    def finish_patch(
        self,
        buckets: Sequence[tuple[BucketEntry, ...]],
        sink: UploadSink,
        published: Published,
        put_id: str,
    ) -> Commit:
        """Send the index over all ranks' buckets, in their order; gives the record to commit.

        Raises:
            StoreUnavailable, StoreRefused: it could not be sent.
        """
        record = self._next(published, put_id)
        if self._index is None or self._is_empty(self._index):
            return record
        index = replace(self._index, buckets=tuple(entry for each in buckets for entry in each))
        return replace(record, patch=sink.finish(index, self.head.version))

    def with_anchor(self, anchor: AnchorRef, published: Published, put_id: str) -> Commit:
        """The record of a version that is an anchor."""
        return replace(self._next(published, put_id), anchor=anchor)

    def commit(self, record: Commit) -> Head:
        """Make the version exist, or find that it does.

        Raises:
            FencedWriter, CommitUnknown, StoreUnavailable, StoreRefused: see ``store.run.commit``.
        """
        return self.head.after(record, commit(self._required_run, record))

    def committed(self, head: Head, record: Commit, *, is_busy: bool) -> bool:
        """Every rank's baseline stands at this version; gives whether an anchor is due."""
        self.head, self._base = head, self._target
        if record.anchor is not None:
            self._schedule.anchored(record.version)
            return False
        return self._schedule.is_due(record) and not is_busy

    def observed(self) -> None:
        """The same, where nothing is committed."""
        self._base = self._target

    def anchored(self, version: int) -> None:
        """An anchor of this version was announced."""
        self._schedule.anchored(version)

    @property
    def _required_run(self) -> Run:
        if self.run is None:
            raise StopError("this publisher observes: it has no run")
        return self.run

    def _next(self, published: Published, put_id: str) -> Commit:
        return next_record(self._required_run.name, self.head, published, put_id, self._clock)

    def _is_empty(self, index: PatchIndex) -> bool:
        base = self._base.outline if self._base else Outline({}, {})
        return index.target_digest == index.base_digest and dict(index.tied) == dict(base.ties)
