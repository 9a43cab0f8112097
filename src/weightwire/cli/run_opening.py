"""Opening a run for commands that look at it or tidy it up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightwire.clock import Clock, SystemClock
from weightwire.store.contract import ObjectStore
from weightwire.store.open import open_store
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.store.run import Run, require_identity
from weightwire.trust.keys import PublicKey
from weightwire.trust.verify import require
from weightwire.workers import threads

_N_THREADS = 16
"""Requests that wait for the store at the same time."""


@contextmanager
def open_run(
    store: str | ObjectStore, key: str | None = None, clock: Clock | None = None
) -> Iterator[Run]:
    """The run in a store, with threads for many small requests.

    Raises:
        NotARun: nothing was published there.
        StopError: not a public key.
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    objects = RetryingStore(open_store(store), clock or SystemClock(), RetryPolicy())
    verify = require(PublicKey.parse(key)) if key else None
    executor = threads(_N_THREADS, "read")
    try:
        yield Run(objects, require_identity(objects), verify=verify, executor=executor)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
