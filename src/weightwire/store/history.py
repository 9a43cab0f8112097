"""What a reader knows of a run: records it has seen and checked, and the ways between versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from weightwire import limits
from weightwire.errors import (
    ForkedHistory,
    LimitExceeded,
    NotARun,
    ObjectMissing,
    RetryError,
    RolledBack,
    StoreUnavailable,
    UnsupportedVersion,
    UntrustedHistory,
)
from weightwire.store import layout
from weightwire.store.records import Commit, Offer, parse_commit, parse_offer, sha256
from weightwire.store.run import Run, read_boundary

log = logging.getLogger("weightwire.store")
_N_TRIES = 3
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class History:
    """The committed versions a reader may use, as of one look at the log."""

    commits: Mapping[int, Commit] = field(default_factory=dict)
    hashes: Mapping[int, str] = field(default_factory=dict)
    """SHA-256 of each commit record."""
    offers: Mapping[str, Offer] = field(default_factory=dict)
    """By key."""
    boundary: int = 0
    unreadable: frozenset[int] = frozenset()
    """Versions whose records are there and damaged: nobody can tell what they were."""

    @property
    def highest(self) -> int:
        """The last version that has a record, readable or not; -1 if there is none."""
        return max((*self.commits, *self.unreadable), default=-1)

    def version_of(self, digest: str) -> int | None:
        """The newest version with these bits, if one has them."""
        return max(
            (v for v, commit in self.commits.items() if commit.digest == digest), default=None
        )

    def vouches_for(self, version: int, digest: str) -> bool:
        """Whether a version is known to have these bits.

        Its own record says so or, where that is damaged or was collected, one that starts from it:
        whoever holds the version goes on by the latter, and needs the former for nothing.
        """
        own = self.commits.get(version)
        if own is not None:
            return own.digest == digest
        after = self.commits.get(version + 1)
        if after is not None and after.is_empty:
            return after.digest == digest
        return (version, digest) in self._bases()

    def _bases(self) -> Iterator[tuple[int, str]]:
        """What patches start from; offers from below the boundary are going, or gone."""
        for commit in self.commits.values():
            if commit.patch is not None:
                yield commit.patch.base_version, commit.patch.base_digest
        for offer in self.offers.values():
            if offer.patch is not None and offer.patch.base_version >= self.boundary:
                yield offer.patch.base_version, offer.patch.base_digest

    @property
    def newest(self) -> Commit | None:
        """The head of the run."""
        return self.commits[max(self.commits)] if self.commits else None


class _Unreadable:
    """Stands for a record that is there and damaged."""


_UNREADABLE = _Unreadable()


class HistoryReader:
    """Looks at the log again and again, fetching only what it has not seen.

    A record that stays damaged is gone around, like any other damaged object: its version cannot
    be told, but later ones can be reached by skips and anchors.

    Records never change, so each is fetched once. The boundary is read *after* the records: a
    record below it was collected, or written by a publisher that slept through the collection,
    and must not be trusted.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._history = History()
        self._floor: tuple[int, str] | None = None

    @property
    def history(self) -> History:
        """What was seen so far."""
        return self._history

    def remember(self, version: int, record_sha256: str) -> None:
        """Never accept a history in which this version is not there, or is another one."""
        if self._floor is None or version >= self._floor[0]:
            self._floor = (version, record_sha256)

    def refresh(self, since: int) -> History:
        """Look for records of versions after ``since``, and forget what was collected.

        Raises:
            UntrustedHistory: records that do not follow one another, are gone, or go back.
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        for _ in range(_N_TRIES - 1):
            try:
                return self._look(since)
            except UntrustedHistory as error:
                # Versions may be committed and collected while a listing is under way.
                log.info("looking again: %s", error)
        return self._look(since)

    def _look(self, since: int) -> History:
        known = self._history
        entries = list(self._entries(since))
        listed = {entry.version for entry in entries if entry.kind == "commit"}
        unseen = self._unlisted(since, listed)
        asked = sorted({*(listed - known.commits.keys()), *unseen})
        answers = dict(zip(asked, self._map(self._read_commit, asked), strict=True))
        found = {v: answer for v, answer in answers.items() if isinstance(answer, tuple)}
        unreadable = {v for v, answer in answers.items() if answer is _UNREADABLE}
        gone = {version for version in unseen if answers[version] is None}
        records = {v: (c, known.hashes[v]) for v, c in known.commits.items() if v not in gone}
        records.update(found)
        offers = {**known.offers, **dict(self._fetch_offers(entries))}
        boundary = max(known.boundary, read_boundary(self._run.store))
        history = _assemble(records, offers, boundary, unreadable)
        self._check(history, gone)
        self._history = history
        return history

    def _unlisted(self, since: int, listed: set[int]) -> list[int]:
        """Versions a listing ought to show and does not: it may be stale, so they are asked for."""
        known = {version for version in self._history.commits if version > since}
        if self._floor is not None and self._floor[0] > since:
            known.add(self._floor[0])
        there = listed | known
        holes = range(min(there), max(there)) if there else ()
        n_most = limits.MAX_UNLISTED
        return sorted((known | set(islice(holes, n_most))) - listed)[-n_most:]

    def _entries(self, since: int) -> Iterator[layout.Entry]:
        for info in self._run.store.list(layout.LOG, layout.after_version(since)):
            entry = layout.parse_entry(info.key)
            if entry is not None:
                yield entry

    def _fetch_offers(self, entries: Iterable[layout.Entry]) -> Iterator[tuple[str, Offer]]:
        known = self._history.offers
        wanted = [e for e in entries if e.kind != "commit" and e.key not in known]
        for entry, found in zip(wanted, self._map(self._read_offer, wanted), strict=True):
            if found is not None:
                yield entry.key, found

    def _read_commit(self, version: int) -> tuple[Commit, str] | _Unreadable | None:
        """A record and its hash, None if there is none; damaged ones are read a few times."""
        key, run = layout.commit_key(version), self._run
        for _ in range(_N_TRIES):
            try:
                raw = run.store.read(key, 0, limits.MAX_RECORD_BYTES + 1)
                return parse_commit(raw, key, version, run.name, run.verify), sha256(raw)
            except ObjectMissing:
                return None
            except StoreUnavailable:
                raise
            except RetryError as error:
                log.warning("%s cannot be read: %s", key, error)
        return _UNREADABLE

    def _read_offer(self, entry: layout.Entry) -> Offer | None:
        """An offer that cannot be read is a way that is not taken."""
        run = self._run
        try:
            raw = run.store.read(entry.key, 0, limits.MAX_RECORD_BYTES + 1)
            return parse_offer(raw, entry.key, entry.version, run.name, run.verify)
        except (ObjectMissing, RetryError, LimitExceeded, NotARun, UnsupportedVersion) as error:
            log.warning("%s is passed over: %s", entry.key, error)
            return None

    def _map(self, read: Callable[[S], T], wanted: list[S]) -> Iterator[T]:
        executor = self._run.executor
        return map(read, wanted) if executor is None else executor.map(read, wanted)

    def _check(self, history: History, gone: set[int]) -> None:
        """Records follow one another without gaps, and none that was there is missing."""
        lost = [version for version in gone if version >= history.boundary]
        if lost:
            raise self._lost(lost, history.highest)
        if self._history.commits and history.highest < 0:
            raise RolledBack("the log is empty, and was not: an old copy is being served")
        previous: Commit | None = None
        for record in history.commits.values():
            if previous is not None:
                _check_order(previous, record)
            self._check_previous(history, record)
            previous = record
        self._check_floor(history)

    def _lost(self, lost: list[int], newest: int) -> UntrustedHistory:
        inside = [version for version in lost if version < newest]
        if inside and not self._history.commits.keys() & set(inside):
            return ForkedHistory(f"version {inside[0]} is missing in the middle of the log")
        return RolledBack(
            f"the newest version is {newest}, version {max(lost)} was seen here before: the log was"
            " cut, or an old copy is being served"
        )

    def _check_previous(self, history: History, record: Commit) -> None:
        before = history.hashes.get(record.version - 1)
        if before is None and self._floor and self._floor[0] == record.version - 1:
            before = self._floor[1]
        if record.previous == "" and record.anchor is not None:
            return  # a fresh start: it continues nothing, and everyone loads it whole
        if before is not None and record.previous != before:
            raise ForkedHistory(
                f"version {record.version} was not committed on top of the version"
                f" {record.version - 1} seen here: the log was changed"
            )

    def _check_floor(self, history: History) -> None:
        if self._floor is None:
            return
        version, wanted = self._floor
        found = history.hashes.get(version)
        if found is not None and found != wanted:
            raise ForkedHistory(
                f"version {version} is not the one seen here before: the log was changed"
            )
        if history.highest < version:
            raise RolledBack(
                f"the newest version is {history.highest}, version {version} was seen here before:"
                " the log was cut, or an old copy is being served"
            )


def _assemble(
    records: Mapping[int, tuple[Commit, str]],
    offers: Mapping[str, Offer],
    boundary: int,
    unreadable: set[int],
) -> History:
    kept = {v: record for v, record in sorted(records.items()) if v >= boundary}
    commits = {v: commit for v, (commit, _) in kept.items()}
    return History(
        commits,
        {v: record_sha256 for v, (_, record_sha256) in kept.items()},
        {k: o for k, o in offers.items() if _is_usable(o, commits, boundary)},
        boundary,
        frozenset(version for version in unreadable if version >= boundary),
    )


def _check_order(previous: Commit, record: Commit) -> None:
    if record.epoch < previous.epoch:
        raise ForkedHistory(
            f"version {record.version} is of epoch {record.epoch}, version {previous.version} before"
            f" it of epoch {previous.epoch}: two publishers' histories are mixed"
        )


def _is_usable(offer: Offer, commits: Mapping[int, Commit], boundary: int) -> bool:
    """Only ways to bits that a commit vouches for."""
    target = commits.get(offer.version)
    if target is None or offer.version < boundary or offer.digest != target.digest:
        return False
    base = offer.patch and commits.get(offer.patch.base_version)
    return not (offer.patch and base and base.digest != offer.patch.base_digest)
