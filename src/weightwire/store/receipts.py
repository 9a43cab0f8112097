"""What receivers say they hold: one small object per worker, written over and over.

A receipt is a claim, not a fact, and anyone who can write to the store can write one. It counts only
where the log knows its digest to be that of the version it names: a worker that reports success and
moved nothing is seen to hold what it holds.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from weightwire import limits
from weightwire.container.fields import HEX_128, Fields
from weightwire.errors import (
    LimitExceeded,
    NotARun,
    ObjectMissing,
    RetryError,
    StoreUnavailable,
    UnsupportedVersion,
    UntrustedHistory,
)
from weightwire.events import Updated
from weightwire.store import layout
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.store.history import History
from weightwire.store.records import opened, sealed

log = logging.getLogger("weightwire.store")

_STATE = re.compile(r"[a-z][a-z-]{0,31}")


@dataclass(frozen=True)
class Receipt:
    """What one receiver holds, and what it took to get there."""

    worker: str
    run: str
    version: int
    digest: str
    epoch: int
    state: str
    """"active", or "dirty" if the weights may be a mixture."""
    time_ms: int
    lag: int
    """Versions between this one and the newest when it was written."""
    n_bytes: int
    """Fetched for this version."""
    fetch_s: float
    decode_s: float
    activate_s: float
    verify_s: float
    n_heals: int
    """How often the live weights were found wrong and repaired."""


def receipt_of(
    updated: Updated, *, worker: str, run: str, epoch: int, state: str, time_ms: int, n_heals: int
) -> Receipt:
    """What a worker says of a version it activated and read back."""
    return Receipt(
        worker=worker,
        run=run,
        version=updated.version,
        digest=updated.digest,
        epoch=epoch,
        state=state,
        time_ms=time_ms,
        lag=updated.lag,
        n_bytes=updated.n_bytes,
        fetch_s=updated.fetch_s,
        decode_s=updated.stage_s - updated.fetch_s,
        activate_s=updated.activate_s,
        verify_s=updated.verify_s,
        n_heals=n_heals,
    )


def default_worker() -> str:
    """A name for this process among a run's receivers."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{platform.node() or 'worker'}-{os.getpid()}")


def receipt_bytes(receipt: Receipt) -> bytes:
    """``receipts/<worker>.json``: sealed, not signed, for workers have no key."""
    body: dict[str, object] = {
        "worker": receipt.worker,
        "run": receipt.run,
        "version": receipt.version,
        "digest": receipt.digest,
        "epoch": receipt.epoch,
        "state": receipt.state,
        "time_ms": receipt.time_ms,
        "lag": receipt.lag,
        "n_bytes": receipt.n_bytes,
        "fetch_s": receipt.fetch_s,
        "decode_s": receipt.decode_s,
        "activate_s": receipt.activate_s,
        "verify_s": receipt.verify_s,
        "n_heals": receipt.n_heals,
    }
    return sealed("weightwire.receipt", body, None)


def parse_receipt(raw: bytes, where: str, worker: str) -> Receipt:
    """The mirror of ``receipt_bytes``; must be the receipt of this worker.

    Raises:
        UntrustedHistory: the receipt of another worker.
        NotARun, UnsupportedVersion, LimitExceeded, RetryError: not what we wrote.
    """
    fields = opened("weightwire.receipt", raw, where, None)
    if fields.raw("worker") != worker:
        raise UntrustedHistory(f"{where}: the receipt of {fields.raw('worker')!r:.80}")
    return Receipt(
        worker=worker,
        run=fields.text("run", HEX_128),
        version=fields.count("version"),
        digest=fields.text("digest", HEX_128),
        epoch=fields.count("epoch"),
        state=fields.text("state", _STATE),
        time_ms=fields.count("time_ms"),
        lag=fields.count("lag"),
        n_bytes=fields.count("n_bytes"),
        fetch_s=_seconds(fields, "fetch_s"),
        decode_s=_seconds(fields, "decode_s"),
        activate_s=_seconds(fields, "activate_s"),
        verify_s=_seconds(fields, "verify_s"),
        n_heals=fields.count("n_heals"),
    )


def write_receipt(store: ObjectStore, receipt: Receipt) -> None:
    """Say what this worker holds, in place of what it said before.

    Raises:
        StopError: a worker name that is no file name everywhere.
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    store.put(layout.receipt_key(receipt.worker), receipt_bytes(receipt))


def read_receipts(store: ObjectStore) -> list[Receipt]:
    """Every receipt that can be read, by worker; others are passed over with a line in the log.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    return [receipt for _, receipt in list_receipts(store)]


def list_receipts(store: ObjectStore) -> Iterator[tuple[ObjectInfo, Receipt]]:
    """Receipts with the store's word on when each was written: workers' clocks go wrong.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    for info in islice(store.list(layout.RECEIPTS), limits.MAX_RECEIPTS):
        receipt = _read(store, info.key)
        if receipt is not None:
            yield info, receipt


def is_proven(receipt: Receipt, history: History) -> bool:
    """Whether the version a receipt names is the one its digest proves."""
    newest = history.newest
    is_of_run = newest is not None and newest.run == receipt.run
    return is_of_run and history.vouches_for(receipt.version, receipt.digest)


def _read(store: ObjectStore, key: str) -> Receipt | None:
    worker = key.removeprefix(layout.RECEIPTS).removesuffix(".json")
    try:
        # One byte more than is allowed is enough to refuse it: a stranger may have written it.
        raw = store.read(key, 0, limits.MAX_RECORD_BYTES + 1)
        return parse_receipt(raw, key, worker)
    except StoreUnavailable:
        raise
    except ObjectMissing:
        return None
    except (RetryError, LimitExceeded, NotARun, UnsupportedVersion, UntrustedHistory) as error:
        log.warning("a receipt is passed over: %s", error)
        return None


def _seconds(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if value < 0:
        raise fields.wrong(name)
    return value
