"""The world can fail: each of these broken parts is caught, by the promise it breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weightwire import publisher as publishing
from weightwire import subscriber as subscribing
from weightwire.apply import staging, targets
from weightwire.apply.scrub import Scrub
from weightwire.diff.views import TensorView
from weightwire.model import Changes
from weightwire.publisher import Publisher
from weightwire.store import history, retention, run
from weightwire.store.records import commit_bytes, sha256
from weightwire.store.retry import RetryingStore
from weightwire.subscriber import Subscriber
from weightwire.testing.world import Violation, run_world

MAX_SEEDS = 150

Patch = pytest.MonkeyPatch


def test_live_damage_that_nobody_looks_for_is_noticed(monkeypatch: Patch) -> None:
    """A receiver that checks neither the base of a patch nor what lies idle."""
    monkeypatch.setattr(Scrub, "next", lambda *_: None)
    monkeypatch.setattr(staging, "proven_changes", lambda record, old: record.changes(old))
    assert_caught("damage is found")


def test_a_receiver_that_does_not_read_back_is_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(targets.MemoryTarget, "check", lambda *_: None)
    assert_caught("never a mixture")


def test_an_activation_that_adds_instead_of_overwriting_is_noticed(monkeypatch: Patch) -> None:
    def add(self: TensorView, start: int, changes: Changes, n_threads: int) -> None:
        bits = self.read(start, start + int(changes.positions.max()) + 1)
        total = bits[changes.positions] + changes.bits
        overwrite(self, start, replace(changes, bits=total.astype(bits.dtype)), n_threads)

    overwrite = TensorView.write
    monkeypatch.setattr(TensorView, "write", add)
    monkeypatch.setattr(targets, "check_written", lambda *_: None)
    assert_caught("never a mixture")


def test_a_receiver_that_hides_an_interrupted_activation_is_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Subscriber, "is_dirty", property(lambda _: False))
    assert_caught("never a mixture")


def test_a_repair_that_is_given_up_and_forgotten_is_noticed(monkeypatch: Patch) -> None:
    def stage(self: Subscriber) -> bool:
        self._is_dirty = False
        return honest(self)

    honest = Subscriber.stage
    monkeypatch.setattr(Subscriber, "stage", stage)
    monkeypatch.setattr(Scrub, "next", lambda *_: None)
    monkeypatch.setattr(staging, "proven_changes", lambda record, old: record.changes(old))
    assert_caught("never a mixture", "failures are typed", "damage is found")


def test_a_receiver_that_goes_back_is_noticed(monkeypatch: Patch) -> None:
    """It takes any version it can get while it is dirty."""

    def reach(self: Subscriber, wanted: Any, seen: Any, start: Any, fetcher: Any) -> Any:
        if start is not None or self.version < 0:
            return honest(self, wanted, seen, start, fetcher)
        oldest = min(seen.commits)
        return subscribing.reach(seen, None, oldest, fetcher, self._cache, self._progress)

    honest = Subscriber._reach
    monkeypatch.setattr(Subscriber, "_reach", reach)
    assert_caught("versions go forward")


def test_a_receipt_of_what_is_not_held_is_noticed(monkeypatch: Patch) -> None:
    def lie(store: Any, receipt: Any) -> None:
        write(store, replace(receipt, version=receipt.version + 1))

    write = subscribing.write_receipt
    monkeypatch.setattr(subscribing, "write_receipt", lie)
    assert_caught("receipts are true")


def test_a_publisher_that_advances_before_the_commit_is_noticed(monkeypatch: Patch) -> None:
    def commit(self: Publisher, began: float) -> Any:
        pending = self._pending
        if pending is not None and not pending.record.is_empty:
            raw = commit_bytes(pending.record, self._run.sign)
            self._advance(pending, sha256(raw))
            publishing.commit(self._run, pending.record)
            return pending.published
        return honest(self, began)

    honest = Publisher._commit
    monkeypatch.setattr(Publisher, "_commit", commit)
    assert_caught("one writer", "no lost update", "nothing committed is lost")


def test_a_publisher_that_takes_a_lost_race_for_a_win_is_noticed(monkeypatch: Patch) -> None:
    def create(self: RetryingStore, key: str, data: bytes) -> bool:
        return honest(self, key, data) or "-commit" in key

    honest = RetryingStore.create
    monkeypatch.setattr(RetryingStore, "create", create)
    assert_caught("no lost update", "one writer")


def test_a_publisher_that_writes_over_commits_is_noticed(monkeypatch: Patch) -> None:
    def create(self: RetryingStore, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True

    monkeypatch.setattr(RetryingStore, "create", create)
    assert_caught("one writer")


def test_a_publisher_that_ignores_the_boundary_is_noticed(monkeypatch: Patch) -> None:
    """It wakes below the boundary, finds its slot free, and believes it has published."""
    monkeypatch.setattr(run, "read_boundary", lambda _: 0)
    assert_caught("no lost update", "one writer", "fenced stays fenced")


def test_a_reader_that_ignores_the_boundary_is_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(history, "read_boundary", lambda _: 0)
    assert_caught("failures are typed", "nothing committed is lost", "recovers alone")


def test_a_collector_that_ignores_receipts_is_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(retention, "_receipt_bounds", lambda *_: iter(()))
    assert_caught("receipts are kept")


def test_a_collector_that_passes_the_newest_anchor_is_noticed(monkeypatch: Patch) -> None:
    far = retention.Bound(1 << 30, "no anchor is needed")
    monkeypatch.setattr(retention, "_anchor_bounds", lambda _: iter([far]))
    assert_caught("nothing committed is lost")


def test_an_error_of_someone_elses_type_is_noticed(monkeypatch: Patch) -> None:
    def read(self: RetryingStore, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and len(key) % 7 == 0:
            raise TimeoutError(key)
        return honest(self, key, start, stop)

    honest = RetryingStore.read
    monkeypatch.setattr(RetryingStore, "read", read)
    assert_caught("failures are typed")


def test_a_kernel_that_loses_a_change_is_noticed(monkeypatch: Patch) -> None:
    """Everything is proven by digest: a wrong digest of a part of the bits proves nothing."""

    def capture(self: Publisher, *arguments: Any) -> Any:
        live = arguments[0]
        for name, spec in live.specs.items():
            if spec.n_elements > 1:
                np.asarray(live.read(name, 0, 1))[:] ^= 1
        return honest(self, *arguments)

    honest = Publisher._read_changes
    monkeypatch.setattr(Publisher, "_read_changes", capture)
    assert_caught("bit-exact")


def assert_caught(*promises: str) -> None:
    """Some world must find it, and find it by one of these promises."""
    logging.disable(logging.CRITICAL)
    try:
        found = next(filter(None, map(_violation_of, range(MAX_SEEDS))), "")
    finally:
        logging.disable(logging.NOTSET)
    assert any(f": {promise}:" in found for promise in promises), found or "never caught"


def _violation_of(seed: int, run: Callable[[int], object] = run_world) -> str:
    try:
        run(seed)
    except Violation as violation:
        return str(violation)
    return ""
