"""Anchors and skip patches: other ways to a version, made off the training path."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from weightwire.clock import Clock
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.frozen import Frozen
from weightwire.digest import digest_state
from weightwire.errors import WeightwireError
from weightwire.store import layout
from weightwire.store.anchor import write_anchor
from weightwire.store.records import AnchorRef, Commit, Offer, PatchRef
from weightwire.store.resume import Head
from weightwire.store.run import Run, announce
from weightwire.store.upload import UploadSink

log = logging.getLogger("weightwire.publisher")


@dataclass(frozen=True)
class AnchorPolicy:
    """When the full state is uploaded again."""

    every: int = 64
    """After so many versions, …"""
    chain_share: float = 1.0
    """… or when the patches since the last one cost this share of an anchor."""

    def is_due(self, n_versions: int, n_chain_bytes: int, n_state_bytes: int) -> bool:
        """Whether so many versions and bytes of patches since the last anchor are enough."""
        return n_versions >= self.every or n_chain_bytes > self.chain_share * n_state_bytes


class AnchorSchedule:
    """Counts what was committed since the last anchor."""

    def __init__(self, policy: AnchorPolicy) -> None:
        self._policy = policy
        self._version, self._n_chain_bytes = -1, 0

    def begin(self, head: Head) -> None:
        """Learn where the publisher starts."""
        self._version, self._n_chain_bytes = head.anchor_version, head.n_chain_bytes

    def anchored(self, version: int) -> None:
        """There is an anchor of this version."""
        self._version, self._n_chain_bytes = version, 0

    def is_due(self, record: Commit) -> bool:
        """Whether a version that was just committed should have an anchor."""
        self._n_chain_bytes += record.patch.n_bytes if record.patch else 0
        n_versions = record.version - self._version
        return self._policy.is_due(n_versions, self._n_chain_bytes, record.n_state_bytes)


def offer_of(
    run: Run,
    head: Head,
    put_id: str,
    clock: Clock,
    *,
    patch: PatchRef | None = None,
    anchor: AnchorRef | None = None,
) -> Offer:
    """Another way to a committed version, as it is announced."""
    return Offer(
        run=run.name,
        version=head.version,
        epoch=head.epoch,
        put_id=put_id,
        time_ms=int(clock.now() * 1000),
        digest=head.digest,
        patch=patch,
        anchor=anchor,
    )


class Extras:
    """Makes anchors and skip patches in a thread of its own, from frozen views of the baseline."""

    def __init__(
        self,
        run: Run,
        baseline: Baseline,
        policy: AnchorPolicy,
        skips: tuple[int, ...],
        companions: Path | None,
        clock: Clock,
        worker: Executor,
        uploads: Executor,
    ) -> None:
        self._run, self._baseline, self._schedule = run, baseline, AnchorSchedule(policy)
        self._skips, self._companions = tuple(sorted(skips)), companions
        self._clock, self._worker, self._uploads = clock, worker, uploads
        self._frozen: dict[int, tuple[Frozen, Head]] = {}
        self._jobs: list[Future[None]] = []
        self._anchor_job: Future[None] | None = None

    def begin(self, head: Head) -> None:
        """Learn where the publisher starts."""
        self._schedule.begin(head)
        self._freeze(head)

    def upload_anchor(self, version: int, put_id: str, digest: str) -> AnchorRef:
        """Send the baseline whole, now; its record is the caller's business.

        Raises:
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        folder = layout.anchor_folder(version, put_id)
        return write_anchor(self._run.store, folder, self._baseline, digest, self._companions)

    def committed(self, head: Head, record: Commit) -> None:
        """A version exists and the baseline stands at it: see what is due."""
        self._jobs = [job for job in self._jobs if not job.done()]
        if record.anchor is not None:
            self._schedule.anchored(record.version)
            self._forget(lambda _: True)
        elif self._schedule.is_due(record) and not self._is_making_anchor:
            self._anchor_job = self._later(self._make_anchor, self._baseline.freeze(), head)
        self._make_skips(head)
        self._freeze(head)

    def wait(self) -> None:
        """Wait for everything in the making; what failed was logged and is not missed."""
        for job in list(self._jobs):
            job.exception()

    def close(self) -> None:
        """Finish, and let go of frozen views."""
        self.wait()
        self._forget(lambda _: True)

    @property
    def _is_making_anchor(self) -> bool:
        return self._anchor_job is not None and not self._anchor_job.done()

    def _later(self, job: Callable[..., None], *arguments: object) -> Future[None]:
        future = self._worker.submit(guarded, job, *arguments)
        self._jobs.append(future)
        return future

    def _make_anchor(self, frozen: Frozen, head: Head) -> None:
        with frozen:
            # Old versions are collected because this one is there: it must be what it says.
            if digest_state(frozen)[0] != head.digest:
                log.error("the baseline is not version %d any more: no anchor of it", head.version)
                return
            put_id = self._clock.token()
            folder = layout.anchor_folder(head.version, put_id)
            ref = write_anchor(self._run.store, folder, frozen, head.digest, self._companions)
            announce(self._run, offer_of(self._run, head, put_id, self._clock, anchor=ref))
            self._schedule.anchored(head.version)

    def _make_skips(self, head: Head) -> None:
        for span in self._skips:
            start = head.version - span
            if head.version % span == 0 and start in self._frozen:
                old, base = self._frozen[start]
                if base.digest != head.digest:
                    self._later(self._make_skip, old, base, self._baseline.freeze(), head)

    def _make_skip(self, old: Frozen, base: Head, new: Frozen, head: Head) -> None:
        with new:
            put_id = self._clock.token()
            folder = layout.patch_folder(base.version, head.version, put_id)
            sink = UploadSink(self._run.store, folder, self._uploads)
            index = diff_states(old, new, sink, "compact", n_threads=1)
            if (index.base_digest, index.target_digest) != (base.digest, head.digest):
                sink.abandon()
                log.error("a skip patch to version %d came out wrong: dropped", head.version)
                return
            patch = sink.finish(index, base.version)
            announce(self._run, offer_of(self._run, head, put_id, self._clock, patch=patch))

    def _freeze(self, head: Head) -> None:
        """Keep this version's bits if a skip patch will start from it; drop those no longer needed."""
        if any(head.version % span == 0 for span in self._skips) and head.digest:
            self._frozen[head.version] = (self._baseline.freeze(), head)
        self._forget(
            lambda version: (
                not any(
                    version % span == 0 and version + span > head.version for span in self._skips
                )
            )
        )

    def _forget(self, is_unneeded: Callable[[int], bool]) -> None:
        for version in [version for version in self._frozen if is_unneeded(version)]:
            frozen, _ = self._frozen.pop(version)
            # Jobs run in order: whoever still reads it comes before.
            self._jobs.append(self._worker.submit(frozen.close))


def guarded(job: Callable[..., None], *arguments: object) -> None:
    """Extras are never worth a failed publish."""
    try:
        job(*arguments)
    except (WeightwireError, OSError) as error:
        log.warning("an anchor or skip patch was not made: %s", error)
