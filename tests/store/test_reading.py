"""Objects known by length and hash: nothing else gets through."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
from fake_clock import FakeClock

from weightwire.errors import HashMismatch, ObjectMissing, RetryError, TruncatedFile
from weightwire.store.counting import CountingStore, StoreCounts
from weightwire.store.memory import MemoryStore
from weightwire.store.reading import read_checked
from weightwire.testing.faults import FaultKind, FaultPlan
from weightwire.testing.faulty_store import FaultyStore

PART = 100
SIZES = (0, 1, 99, 100, 101, 199, 200, 201, 1234)


@pytest.fixture(params=["in line", "side by side"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    with ThreadPoolExecutor(4) as threads:
        yield None if request.param == "in line" else threads


def sample(n_bytes: int) -> tuple[bytes, str]:
    data = random.Random(n_bytes).randbytes(n_bytes)
    return data, hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("n_bytes", SIZES)
def test_sound_objects_of_any_size_are_read(n_bytes: int, executor: Executor | None) -> None:
    store, (data, sha256) = MemoryStore(), sample(n_bytes)
    store.put("a", data)
    assert read_checked(store, "a", n_bytes, sha256, executor=executor, part_bytes=PART) == data


@pytest.mark.parametrize("n_bytes", SIZES)
def test_a_longer_object_is_found_out(n_bytes: int, executor: Executor | None) -> None:
    store, (data, sha256) = MemoryStore(), sample(n_bytes)
    store.put("a", data + b"!")
    with pytest.raises(HashMismatch, match="longer"):
        read_checked(store, "a", n_bytes, sha256, executor=executor, part_bytes=PART)


@pytest.mark.parametrize("n_bytes", SIZES[1:])
def test_a_shorter_object_is_found_out(n_bytes: int, executor: Executor | None) -> None:
    store, (data, sha256) = MemoryStore(), sample(n_bytes)
    for n_left in {0, n_bytes // 2, n_bytes - 1}:
        store.put("a", data[:n_left])
        with pytest.raises(TruncatedFile):
            read_checked(store, "a", n_bytes, sha256, executor=executor, part_bytes=PART)


@pytest.mark.parametrize("n_bytes", SIZES[1:])
def test_a_flipped_bit_anywhere_is_found_out(n_bytes: int, executor: Executor | None) -> None:
    store, (data, sha256) = MemoryStore(), sample(n_bytes)
    for position in range(0, n_bytes, 37):
        store.put("a", data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(HashMismatch, match="SHA-256"):
            read_checked(store, "a", n_bytes, sha256, executor=executor, part_bytes=PART)


def test_a_missing_object_is_missing(executor: Executor | None) -> None:
    with pytest.raises(ObjectMissing):
        read_checked(MemoryStore(), "a", 1234, "0" * 64, executor=executor, part_bytes=PART)


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.TORN_READ,
        FaultKind.EMPTY_READ,
        FaultKind.FLIPPED_BIT,
        FaultKind.WRONG_OBJECT,
        FaultKind.RANGE_OFF,
    ],
)
def test_no_fault_of_a_read_gets_through(kind: FaultKind) -> None:
    for seed in range(100):
        memory, (data, sha256) = MemoryStore(), sample(1234)
        memory.put("a", data)
        memory.put("other", sample(1235)[0])
        plan = FaultPlan({kind: 0.5}, n_faults=1)
        store = FaultyStore(memory, random.Random(seed), plan, FakeClock())
        try:
            assert read_checked(store, "a", len(data), sha256, part_bytes=PART) == data
            assert not store.injected
        except RetryError:
            assert store.injected == {kind: 1}


def test_parts_are_read_once_and_one_byte_more_at_most(executor: Executor | None) -> None:
    store, (data, sha256) = CountingStore(MemoryStore()), sample(1234)
    store.put("a", data + bytes(5000))
    with pytest.raises(HashMismatch):
        read_checked(store, "a", 1234, sha256, executor=executor, part_bytes=PART)
    counts = store.snapshot()
    assert counts.n_read == 13
    assert counts.n_bytes_down == 1235


def test_every_verb_and_byte_is_counted() -> None:
    store = CountingStore(MemoryStore())
    store.put("a", b"123")
    store.put("b", iter([b"45", b"6"]))
    store.create("c", b"78")
    store.create("c", b"78")
    store.read("a", 1)
    with pytest.raises(ObjectMissing):
        store.read("nothing")
    assert len(list(store.list(""))) == 3
    store.delete(["a"])
    assert store.snapshot() == StoreCounts(2, 2, 2, 1, 1, 10, 2)


def test_counting_loses_nothing_between_threads() -> None:
    store = CountingStore(MemoryStore())
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda each: store.put(f"k{each}", b"xy"), range(2000)))
    assert store.snapshot() == StoreCounts(n_put=2000, n_bytes_up=4000)
