"""What goes to a store and comes back is counted, verb by verb."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from weightwire.errors import ObjectMissing
from weightwire.store.counting import CountingStore, StoreCounts
from weightwire.store.memory import MemoryStore


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
