"""The tool that dies everywhere: it counts exactly, stays dead, and never tests nothing in silence."""

from __future__ import annotations

import pytest

from weightwire.errors import StopError
from weightwire.store.memory import MemoryStore
from weightwire.testing.crash_points import Crash, CrashingStore, Fuse, enumerate_crashes


def keys(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list("")]


def write_two(store: MemoryStore, fuse: Fuse) -> None:
    crashing = CrashingStore(store, fuse)
    crashing.put("one", b"1")
    crashing.create("two", b"2")


def test_every_effect_is_died_at_before_and_after() -> None:
    found = [
        (crash.number, crash.when, crash.effect, keys(crash.world))
        for crash in enumerate_crashes(MemoryStore, write_two)
    ]
    assert found == [
        (0, "before", "put one", []),
        (0, "after", "put one", ["one"]),
        (1, "before", "create two", ["one"]),
        (1, "after", "create two", ["one", "two"]),
    ]


def test_a_dead_process_does_nothing_more() -> None:
    store = MemoryStore()
    crashing = CrashingStore(store, Fuse(0, "after"))
    with pytest.raises(Crash):
        crashing.put("one", b"1")
    for act in (
        lambda: crashing.put("two", b"2"),
        lambda: crashing.create("two", b"2"),
        lambda: crashing.read("one"),
        lambda: list(crashing.list("")),
        lambda: crashing.delete(["one"]),
    ):
        with pytest.raises(Crash):
            act()
    assert keys(store) == ["one"]


def test_objects_are_deleted_one_by_one() -> None:
    def begin() -> MemoryStore:
        store = MemoryStore()
        for key in ("a", "b", "c"):
            store.put(key, b"")
        return store

    def delete(store: MemoryStore, fuse: Fuse) -> None:
        CrashingStore(store, fuse).delete(["a", "b", "c"])

    left = [keys(crash.world) for crash in enumerate_crashes(begin, delete, whens=("after",))]
    assert left == [["b", "c"], ["c"], []]


def test_an_effect_that_fails_is_died_after_all_the_same() -> None:
    def fail(world: list[int], fuse: Fuse) -> None:
        with pytest.raises(ValueError, match="no number"):
            fuse.effect("fail", lambda: int("no number"))

    assert len(list(enumerate_crashes(list, fail))) == 2


def test_an_action_without_effects_is_refused() -> None:
    with pytest.raises(StopError, match="no effect"):
        list(enumerate_crashes(MemoryStore, lambda *_: None))


def test_an_action_that_does_something_else_each_time_is_refused() -> None:
    counts = iter([3, 3, 1, 1, 1, 1])

    def moody(store: MemoryStore, fuse: Fuse) -> None:
        for number in range(next(counts)):
            fuse.effect(str(number), lambda: None)

    with pytest.raises(StopError, match="did not die"):
        list(enumerate_crashes(MemoryStore, moody))
