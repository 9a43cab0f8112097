"""Receipts: read as written, believed only where the digest proves them, harmless when hostile."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from sample_logs import SampleRun

from hand_clock import HandClock
from weightwire import limits
from weightwire.codec.index import seal
from weightwire.errors import (
    HashMismatch,
    LimitExceeded,
    MalformedHeader,
    NotARun,
    StopError,
    StoreUnavailable,
    UnsupportedVersion,
    UntrustedHistory,
)
from weightwire.store import layout
from weightwire.store.history import History, HistoryReader
from weightwire.store.memory import MemoryStore
from weightwire.store.receipts import (
    Receipt,
    is_proven,
    list_receipts,
    parse_receipt,
    read_receipts,
    receipt_bytes,
    write_receipt,
)

RECEIPT = Receipt(
    worker="gpu-3.rack_1",
    run="a" * 32,
    version=41,
    digest="c" * 32,
    epoch=2,
    state="active",
    time_ms=1_700_000_000_000,
    lag=1,
    n_bytes=12_345,
    fetch_s=1.25,
    decode_s=0.1,
    activate_s=0.003,
    verify_s=0.0,
    n_heals=0,
)


def test_a_receipt_is_read_as_it_was_written() -> None:
    store = MemoryStore()
    write_receipt(store, RECEIPT)
    write_receipt(store, replace(RECEIPT, worker="b", state="dirty", fetch_s=3))
    assert read_receipts(store) == [replace(RECEIPT, worker="b", state="dirty", fetch_s=3), RECEIPT]


def test_a_worker_has_one_receipt_its_last() -> None:
    store = MemoryStore()
    write_receipt(store, RECEIPT)
    write_receipt(store, replace(RECEIPT, version=42))
    assert [receipt.version for receipt in read_receipts(store)] == [42]


def test_a_worker_name_that_is_a_path_is_refused() -> None:
    with pytest.raises(StopError, match="worker name"):
        write_receipt(MemoryStore(), replace(RECEIPT, worker="../run"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ((b'"version":41', b'"version":42'), HashMismatch),
        ((b"weightwire.receipt", b"weightwire.commit"), HashMismatch),
        ((b'"format_version":1', b'"format_version":2'), HashMismatch),
        ((b"}\n", b""), MalformedHeader),
    ],
)
def test_a_receipt_that_is_not_what_was_written_is_refused(
    change: tuple[bytes, bytes], error: type[Exception]
) -> None:
    raw = receipt_bytes(RECEIPT).replace(*change)
    with pytest.raises(error):
        parse_receipt(raw, "here", RECEIPT.worker)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ((b"weightwire.receipt", b"weightwire.commit"), NotARun),
        ((b'"format_version":1', b'"format_version":2'), UnsupportedVersion),
    ],
)
def test_only_an_intact_object_is_said_to_be_something_else(
    change: tuple[bytes, bytes], error: type[Exception]
) -> None:
    raw = receipt_bytes(RECEIPT).replace(*change)
    with pytest.raises(error):
        parse_receipt(seal(raw[: raw.rindex(b',"sha256"')] + b"}"), "here", RECEIPT.worker)


def test_a_receipt_under_another_name_is_refused() -> None:
    with pytest.raises(UntrustedHistory, match="the receipt of 'gpu-3"):
        parse_receipt(receipt_bytes(RECEIPT), "here", "gpu-4")


@pytest.mark.parametrize(
    "lie",
    [
        {"version": -1},
        {"version": 1.5},
        {"version": True},
        {"digest": "zz"},
        {"run": ""},
        {"state": "A" * 100},
        {"fetch_s": -0.5},
        {"decode_s": "1"},
        {"activate_s": float("nan")},
        {"verify_s": float("inf")},
        {"n_heals": 1 << 70},
    ],
)
def test_a_field_that_lies_is_refused(lie: dict[str, object]) -> None:
    raw = receipt_bytes(replace(RECEIPT, **lie))  # type: ignore[arg-type]
    with pytest.raises(MalformedHeader):
        parse_receipt(raw, "here", RECEIPT.worker)


def test_damaged_and_hostile_receipts_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    write_receipt(store, RECEIPT)
    hostile = {
        "empty": b"",
        "deep": b"[" * 100_000,
        "huge": b" " * (limits.MAX_RECORD_BYTES + 10),
        "moved": receipt_bytes(RECEIPT),
        "other": b'{"format":"x"}',
        "newer": receipt_bytes(RECEIPT).replace(b'"format_version":1', b'"format_version":9'),
        "not-text": b"\xff\xfe",
    }
    for name, raw in hostile.items():
        store.put(layout.receipt_key(name), raw)
    store.put(f"{layout.RECEIPTS}sub/folder.json", receipt_bytes(RECEIPT))
    with caplog.at_level(logging.WARNING):
        assert read_receipts(store) == [RECEIPT]
    assert len(caplog.records) == len(hostile) + 1


def test_a_flood_of_receipts_is_read_up_to_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for number in range(20):
        write_receipt(store, replace(RECEIPT, worker=f"w{number}"))
    monkeypatch.setattr(limits, "MAX_RECEIPTS", 5)
    assert len(read_receipts(store)) == 5


def test_a_receipt_of_any_length_costs_a_bounded_read() -> None:
    with pytest.raises(LimitExceeded):
        parse_receipt(b" " * (limits.MAX_RECORD_BYTES + 1), "here", "w")


def test_a_store_without_an_answer_is_not_a_store_without_receipts() -> None:
    class Silent(MemoryStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            raise StoreUnavailable(f"{key} from {start} to {stop}: no answer")

    store = Silent()
    write_receipt(store, RECEIPT)
    with pytest.raises(StoreUnavailable):
        read_receipts(store)


def test_listing_gives_the_stores_time_not_the_workers() -> None:
    clock = HandClock(5_000.0)
    store = MemoryStore(clock)
    write_receipt(store, RECEIPT)
    assert [info.modified for info, _ in list_receipts(store)] == [5_000.0]


def test_a_version_is_what_the_digest_proves() -> None:
    run = SampleRun().commit_many(4)
    history = HistoryReader(run.run).refresh(-1)
    held = replace(RECEIPT, run=run.run.name, version=2, digest=run.commits[2].digest)
    assert is_proven(held, history)
    assert not is_proven(replace(held, version=3), history)
    assert not is_proven(replace(held, version=9), history)
    assert not is_proven(replace(held, digest="0" * 32), history)
    assert not is_proven(replace(held, run="b" * 32), history)
    assert not is_proven(held, History())


def test_a_version_whose_record_is_damaged_is_what_the_next_one_starts_from() -> None:
    run = SampleRun().commit_many(4)
    run.store.put(layout.commit_key(2), b"damaged")
    history = HistoryReader(run.run).refresh(-1)
    assert history.unreadable == {2}
    held = replace(RECEIPT, run=run.run.name, version=2, digest=run.commits[2].digest)
    assert is_proven(held, history)
    assert not is_proven(replace(held, digest="0" * 32), history)
    assert not is_proven(replace(held, digest=run.commits[1].digest), history)
    assert not is_proven(replace(held, run="b" * 32), history)


def test_a_version_whose_record_is_damaged_is_what_an_empty_one_after_it_repeats() -> None:
    run = SampleRun().commit_many(3)
    newest = run.commits[2]
    claim = replace(newest, version=3, epoch=2, previous=run.previous, patch=None, put_id="e" * 32)
    run.commit_record(claim)
    run.store.put(layout.commit_key(2), b"damaged")
    history = HistoryReader(run.run).refresh(-1)
    held = replace(RECEIPT, run=run.run.name, version=2, digest=newest.digest)
    assert is_proven(held, history)
    assert not is_proven(replace(held, digest="0" * 32), history)


def test_a_version_that_nothing_readable_starts_from_is_not_proven() -> None:
    run = SampleRun().commit_many(5)
    for version in (2, 3):
        run.store.put(layout.commit_key(version), b"damaged")
    held = replace(RECEIPT, run=run.run.name, version=2, digest=run.commits[2].digest)
    assert not is_proven(held, HistoryReader(run.run).refresh(-1))
    run.offer_skip(2, 4)
    assert is_proven(held, HistoryReader(run.run).refresh(-1))
