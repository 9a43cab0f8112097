"""A run's log as it lies there, damage included: for people who look, not for readers who follow.

A reader stops at the first record it must not trust. Whoever wants to know how a run stands needs
the rest too, so here a record that cannot be used is an entry in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from weightwire import limits
from weightwire.errors import StoreRefused, StoreUnavailable, WeightwireError
from weightwire.store import layout
from weightwire.store.history import History
from weightwire.store.records import Commit, Offer, parse_commit, parse_offer, sha256
from weightwire.store.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class Damage:
    """One thing in a run that is not as it should be."""

    key: str
    """The object, or the folder of objects."""
    kind: str
    """The name of the error class that says what is wrong."""
    message: str
    version: int
    """The version it belongs to."""


@dataclass(frozen=True)
class Survey:
    """What one listing of the log and one read of each record showed."""

    history: History
    """The records that can be read; unlike a reader's history it may have holes and forks."""
    gone: frozenset[str]
    """Folders of anchors that are being removed."""
    damages: tuple[Damage, ...]
    versions: tuple[int, ...]
    """Those that have a commit record, readable or not."""
    n_older: int
    """Commits that were left out because only the newest were asked for."""

    @property
    def newest(self) -> int:
        """The highest version that has a commit record, readable or not; -1 if none."""
        return max(self.versions, default=-1)


def survey(run: Run, n_newest: int | None = None) -> Survey:
    """Look at the log once, and read the records of all versions, or of the newest few.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    keys = [info.key for info in run.store.list(layout.LOG)]
    entries = [entry for entry in map(layout.parse_entry, keys) if entry is not None]
    boundary = max((layout.parse_boundary(key) or 0 for key in keys), default=0)
    wanted = [entry for entry in entries if entry.version >= boundary]
    commits = [entry for entry in wanted if entry.kind == "commit"]
    first = _first(commits, n_newest)
    found = _Found({}, {}, {}, [])
    _read_all(run, [entry for entry in wanted if entry.version >= first], found)
    gone = frozenset(folder for folder in map(layout.parse_gone, keys) if folder is not None)
    return Survey(
        History(dict(sorted(found.commits.items())), found.hashes, found.offers, boundary),
        gone,
        tuple(found.damages),
        tuple(sorted(entry.version for entry in commits if entry.version >= first)),
        sum(entry.version < first for entry in commits),
    )


@dataclass(frozen=True)
class _Found:
    """Records as they come in."""

    commits: dict[int, Commit]
    hashes: dict[int, str]
    offers: dict[str, Offer]
    damages: list[Damage]


def _first(commits: list[layout.Entry], n_newest: int | None) -> int:
    versions = sorted(entry.version for entry in commits)
    if n_newest is None or len(versions) <= n_newest:
        return 0
    return versions[-n_newest]


def _read_all(run: Run, entries: list[layout.Entry], found: _Found) -> None:
    def read(entry: layout.Entry) -> bytes | WeightwireError:
        try:
            # One byte more than is allowed is enough to refuse it.
            return run.store.read(entry.key, 0, limits.MAX_RECORD_BYTES + 1)
        except (StoreUnavailable, StoreRefused):
            raise
        except WeightwireError as error:
            return error

    for entry, raw in zip(entries, _in_parallel(run, read, entries), strict=True):
        try:
            if isinstance(raw, WeightwireError):
                raise raw
            _take(run, entry, raw, found)
        except WeightwireError as error:
            found.damages.append(damage_of(error, entry.key, entry.version))


def _take(run: Run, entry: layout.Entry, raw: bytes, found: _Found) -> None:
    if entry.kind != "commit":
        offer = parse_offer(raw, entry.key, entry.version, run.name, run.verify)
        found.offers[entry.key] = offer
        return
    record = parse_commit(raw, entry.key, entry.version, run.name, run.verify)
    found.commits[entry.version] = record
    found.hashes[entry.version] = sha256(raw)


def _in_parallel(
    run: Run, read: Callable[[layout.Entry], T], entries: Iterable[layout.Entry]
) -> Iterator[T]:
    return map(read, entries) if run.executor is None else run.executor.map(read, entries)


def damage_of(error: Exception, key: str, version: int) -> Damage:
    """An error as an entry in a list."""
    return Damage(key, type(error).__name__, str(error), version)
