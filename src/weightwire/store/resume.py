"""How a publisher takes over a run: fence whoever had it, then get its last committed state back."""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from weightwire.clock import Clock
from weightwire.diff.baseline import Baseline
from weightwire.digest import digest_state
from weightwire.errors import FencedWriter, ResyncError, StoreUnavailable
from weightwire.store.cache import Cache
from weightwire.store.fetch import Fetcher
from weightwire.store.history import History, HistoryReader
from weightwire.store.plan import Held
from weightwire.store.records import Commit
from weightwire.store.route import Start, reach
from weightwire.store.run import Run, commit

log = logging.getLogger("weightwire.store")
Claim = Literal["at once", "with the first version"]
"""When a new publisher fences the one before it."""

_N_TRIES = 16
"""Publishers that may start at the same moment before one of them gives up."""


@dataclass(frozen=True)
class Head:
    """The newest version a publisher knows to be committed, and what follows from it."""

    version: int = -1
    epoch: int = 1
    digest: str = ""
    record_sha256: str = ""
    needs_anchor: bool = True
    """Nothing is known to diff against: the next version is sent whole."""
    anchor_version: int = -1
    """The newest anchor when this publisher began."""
    n_chain_bytes: int = 0
    """Patches between the two."""

    def after(self, record: Commit, record_sha256: str) -> Head:
        """The head once ``record`` is committed."""
        return replace(
            self,
            version=record.version,
            digest=record.digest,
            record_sha256=record_sha256,
            needs_anchor=False,
        )


def take_over(
    run: Run,
    baseline: Baseline | None,
    clock: Clock,
    executor: Executor,
    *,
    claim: Claim = "at once",
) -> Head:
    """Become the run's publisher, with the baseline, if there is one, at its newest version.

    "with the first version" commits nothing now: the head's epoch is the next one, and the first
    commit carries it. The log is the lock either way: until then the old publisher may go on, and
    if it does, that commit finds its place taken and *this* publisher is the fenced one.

    Raises:
        FencedWriter: others take over faster than we can.
        UntrustedHistory, StoreUnavailable, StoreRefused, RetryError: the log cannot be read.
    """
    history = HistoryReader(run).refresh(-1)
    if history.unreadable and history.highest > max(history.commits, default=-1):
        return _past_damage(history)
    newest = history.newest
    if newest is None:
        return Head()
    if claim == "at once":
        head, history = _claim(run, clock, history)
    else:
        head = _unclaimed(newest, history)
    if baseline is None:
        return replace(head, needs_anchor=True)
    try:
        _restore(run, history, baseline, executor)
    except StoreUnavailable:
        raise
    except ResyncError as error:
        log.error("version %d cannot be rebuilt, sending an anchor: %s", head.version, error)
        head = replace(head, needs_anchor=True)
    return head


def _past_damage(history: History) -> Head:
    """The newest records cannot be read: nobody can continue them, but one can start afresh.

    The first version carries the claim, and names no record before it. The epoch is higher than
    any that can be hidden there.
    """
    epoch = max((record.epoch for record in history.commits.values()), default=0)
    log.error("the record of version %d is damaged: starting afresh", history.highest)
    return Head(history.highest, epoch + len(history.unreadable) + 1)


def _claim(run: Run, clock: Clock, history: History) -> tuple[Head, History]:
    """Commit an empty version of a higher epoch: from then on the old publisher is fenced."""
    for _ in range(_N_TRIES):
        newest = history.newest
        if newest is None:
            return Head(), history
        record = replace(
            newest,
            version=newest.version + 1,
            epoch=newest.epoch + 1,
            put_id=clock.token(),
            previous=history.hashes[newest.version],
            time_ms=int(clock.now() * 1000),
            patch=None,
            anchor=None,
        )
        try:
            record_sha256 = commit(run, record)
        except FencedWriter:
            history = HistoryReader(run).refresh(-1)  # someone was faster; look again
            continue
        return _head(record, record_sha256, history), history
    raise FencedWriter(f"{_N_TRIES} times another publisher took over first; is one in a loop?")


def _unclaimed(newest: Commit, history: History) -> Head:
    """The head to commit on top of, with an epoch that no record has yet."""
    head = _head(newest, history.hashes[newest.version], history)
    return replace(head, epoch=newest.epoch + 1)


def _head(record: Commit, record_sha256: str, history: History) -> Head:
    anchors = [v for v, c in history.commits.items() if c.anchor]
    anchors += [offer.version for offer in history.offers.values() if offer.anchor]
    newest_anchor = max(anchors, default=-1)
    n_bytes = sum(
        c.patch.n_bytes for v, c in history.commits.items() if c.patch and v > newest_anchor
    )
    return Head(
        record.version,
        record.epoch,
        record.digest,
        record_sha256,
        needs_anchor=False,
        anchor_version=newest_anchor,
        n_chain_bytes=n_bytes,
    )


def _restore(run: Run, history: History, baseline: Baseline, executor: Executor) -> None:
    newest = history.newest
    if newest is None:
        return
    start = _start_from(baseline, history)
    if start is not None and start.held.digest == newest.digest:
        return
    with closing(Cache()) as cache:
        fetcher = Fetcher(run.store, cache, executor)
        with closing(reach(history, start, newest.version, fetcher, cache)) as reached:
            baseline.fill(reached.staging)


def _start_from(baseline: Baseline, history: History) -> Start | None:
    """What an earlier process left in the baseline's file, if it is a version of this run."""
    if not baseline.specs:
        return None
    digest, digests = digest_state(baseline)
    version = history.version_of(digest)
    return None if version is None else Start(Held(version, digest), baseline, digests)
