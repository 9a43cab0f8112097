"""A run's log: who it is, what was committed, and how one more version comes to exist.

The log is the lock. A version exists when its commit record could be created under its one name;
whoever creates it has won, everyone else for whom that name was the next one has lost and sees
who won. A new publisher's first act is to commit a version with a higher epoch: from then on the
old one's next commit must fail, however long it slept.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import dataclass

from weightwire import limits
from weightwire.clock import Clock
from weightwire.errors import CommitUnknown, FencedWriter, NotARun, ObjectMissing, RetryError
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.store.records import (
    Commit,
    Offer,
    RunIdentity,
    Sign,
    Verify,
    commit_bytes,
    identity_bytes,
    offer_bytes,
    parse_commit,
    parse_identity,
    sha256,
)

log = logging.getLogger("weightwire.store")
_N_TRIES = 3


@dataclass(frozen=True)
class Run:
    """An opened run: its store, its identity, and who may sign and what must be signed."""

    store: ObjectStore
    identity: RunIdentity
    sign: Sign | None = None
    verify: Verify | None = None
    executor: Executor | None = None
    """For requests that may go out at once; without it they go one after another."""

    @property
    def name(self) -> str:
        """The run's random identity."""
        return self.identity.run


def find_identity(store: ObjectStore) -> RunIdentity | None:
    """The run in this store, or None if nothing was ever published there.

    Raises:
        NotARun, UnsupportedVersion, RetryError: something else stands in its place.
    """
    try:
        return parse_identity(store.read(layout.RUN), layout.RUN)
    except ObjectMissing:
        return None


def require_identity(store: ObjectStore) -> RunIdentity:
    """The run in this store.

    Raises:
        NotARun: nothing was ever published there.
    """
    identity = find_identity(store)
    if identity is None:
        raise NotARun("no run in this store: nothing was published there, or the address is wrong")
    return identity


def create_identity(store: ObjectStore, clock: Clock) -> RunIdentity:
    """The run in this store, made now if there is none; one of several callers wins."""
    mine = RunIdentity(clock.token(), int(clock.now() * 1000))
    if store.create(layout.RUN, identity_bytes(mine)):
        return mine
    return require_identity(store)


def commit(run: Run, record: Commit) -> str:
    """Make a version exist; gives the SHA-256 of its record.

    Raises:
        FencedWriter: another publisher made this version, or it was collected long ago.
        CommitUnknown: sent, and no answer; sending the same record again settles it.
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    raw = commit_bytes(record, run.sign)
    key = layout.commit_key(record.version)
    if not run.store.create(key, raw):
        _require_mine(run, record, raw)
    # A writer that slept through a collection finds its slot free again: see retention.
    if read_boundary(run.store) > record.version:
        run.store.delete([key])
        raise _collected(record)
    return sha256(raw)


def _require_mine(run: Run, record: Commit, raw: bytes) -> None:
    """The slot is taken: by this very record, whose reply was lost, or by someone else's."""
    key = layout.commit_key(record.version)
    for _ in range(_N_TRIES):
        try:
            there = run.store.read(key, 0, limits.MAX_RECORD_BYTES + 1)
        except ObjectMissing:
            if read_boundary(run.store) > record.version:
                raise _collected(record) from None
            raise CommitUnknown(f"{key}: it was there, and is not found; ask again") from None
        if there == raw:
            return
        try:
            raise _fenced(run, record, there)
        except RetryError as error:
            log.warning("%s cannot be read: %s", key, error)
    raise FencedWriter(
        f"version {record.version} has a record that cannot be read: nobody can continue it; start"
        " a new publisher, which begins afresh"
    )


def _collected(mine: Commit) -> FencedWriter:
    return FencedWriter(
        f"version {mine.version} was committed by another publisher and collected since;"
        " this publisher is fenced: start a new one"
    )


def _fenced(run: Run, mine: Commit, there: bytes) -> FencedWriter:
    winner = parse_commit(
        there, layout.commit_key(mine.version), mine.version, run.name, run.verify
    )
    return FencedWriter(
        f"version {mine.version} was committed by the publisher of epoch {winner.epoch}, this one is"
        f" of epoch {mine.epoch}: another publisher took over this run"
    )


def announce(run: Run, offer: Offer) -> None:
    """Tell readers of another way to a version.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    if offer.patch is None:
        key = layout.anchor_offer_key(offer.version, offer.put_id)
    else:
        key = layout.skip_offer_key(offer.patch.base_version, offer.version, offer.put_id)
    run.store.put(key, offer_bytes(offer, run.sign))


def read_boundary(store: ObjectStore) -> int:
    """The first version that was not collected."""
    found = [layout.parse_boundary(info.key) for info in store.list(layout.boundary_prefix())]
    return max((version for version in found if version is not None), default=0)
