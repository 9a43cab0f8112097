"""Trying again: what is repeated, how long, and what is known afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from fake_clock import FakeClock

from weightwire.errors import CommitUnknown, ObjectMissing, StoreRefused, StoreUnavailable
from weightwire.store.contract import ObjectInfo
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.testing.faults import FaultKind, FaultPlan
from weightwire.testing.faulty_store import FaultyStore

POLICY = RetryPolicy(n_attempts=4, first_delay_s=1.0, max_delay_s=3.0, deadline_s=100.0)
MINE = b"a record with my put id"
THEIRS = b"a record with another put id"
Step = Callable[[MemoryStore], object]


class ScriptedStore(MemoryStore):
    """Runs one step of a script before each operation; a step may act and may raise."""

    def __init__(self, *script: Step) -> None:
        super().__init__(FakeClock())
        self.script = list(script)
        self.n_calls = 0

    def _step(self) -> None:
        self.n_calls += 1
        if self.script:
            self.script.pop(0)(self)

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._step()
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._step()
        return super().create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._step()
        return super().read(key, start, stop)

    def delete(self, keys: Iterable[str]) -> None:
        self._step()
        super().delete(keys)


def fine(store: MemoryStore) -> None:
    """Nothing happens."""


def no_answer(store: MemoryStore) -> None:
    raise StoreUnavailable("no answer")


def refused(store: MemoryStore) -> None:
    raise StoreRefused("no rights")


def mine_lands_unheard(store: MemoryStore) -> None:
    MemoryStore.create(store, "log/1", MINE)
    raise StoreUnavailable("the reply was lost")


def theirs_lands_first(store: MemoryStore) -> None:
    MemoryStore.create(store, "log/1", THEIRS)
    raise StoreUnavailable("no answer")


def it_is_collected(store: MemoryStore) -> None:
    MemoryStore.delete(store, ["log/1"])


def retrying(store: MemoryStore, policy: RetryPolicy = POLICY) -> RetryingStore:
    return RetryingStore(store, FakeClock(), policy)


def test_an_error_before_the_effect_is_repeated() -> None:
    store = ScriptedStore(no_answer, no_answer)
    assert retrying(store).create("log/1", MINE) is True
    assert store.n_calls == 3


def test_a_create_whose_reply_was_lost_is_mine() -> None:
    store = ScriptedStore(mine_lands_unheard)
    assert retrying(store).create("log/1", MINE) is True


def test_a_create_that_lost_unheard_is_not_mine() -> None:
    store = ScriptedStore(theirs_lands_first)
    assert retrying(store).create("log/1", MINE) is False
    assert MemoryStore.read(store, "log/1") == THEIRS


def test_without_doubt_equal_bytes_of_another_do_not_count_as_mine() -> None:
    store = ScriptedStore()
    assert retrying(store).create("log/1", b"same") is True
    assert retrying(store).create("log/1", b"same") is False
    assert store.n_calls == 2


def test_a_read_back_without_an_answer_is_repeated() -> None:
    store = ScriptedStore(mine_lands_unheard, fine, no_answer)
    assert retrying(store).create("log/1", MINE) is True


def test_a_record_that_vanished_before_the_read_back_is_created_again() -> None:
    store = ScriptedStore(mine_lands_unheard, fine, it_is_collected)
    assert retrying(store).create("log/1", MINE) is True
    assert MemoryStore.read(store, "log/1") == MINE


def test_a_create_never_answered_is_unknown() -> None:
    store = ScriptedStore(*[no_answer] * 9)
    with pytest.raises(CommitUnknown, match="log/1"):
        retrying(store).create("log/1", MINE)
    assert store.n_calls == POLICY.n_attempts


def test_a_refusal_after_doubt_is_unknown_and_at_first_a_refusal() -> None:
    with pytest.raises(CommitUnknown):
        retrying(ScriptedStore(mine_lands_unheard, refused)).create("log/1", MINE)
    with pytest.raises(StoreRefused):
        retrying(ScriptedStore(refused)).create("log/1", MINE)


def test_only_unavailability_is_repeated() -> None:
    store = ScriptedStore(refused)
    with pytest.raises(StoreRefused):
        retrying(store).put("a", b"x")
    with pytest.raises(ObjectMissing):
        retrying(store).read("a")
    assert store.n_calls == 2


def test_reads_and_deletes_are_repeated() -> None:
    store = ScriptedStore(fine, no_answer, fine, no_answer)
    again = retrying(store)
    again.put("a", b"x")
    assert again.read("a") == b"x"
    again.delete(iter(["a"]))
    assert list(store.list("")) == []


def test_an_iterable_is_sent_again_and_an_iterator_is_not() -> None:
    store = ScriptedStore(no_answer)
    retrying(store).put("a", [b"x", b"y"])
    assert MemoryStore.read(store, "a") == b"xy"
    store.script = [no_answer]
    with pytest.raises(StoreUnavailable):
        retrying(store).put("b", iter([b"x", b"y"]))
    assert [info.key for info in store.list("")] == ["a"]


def test_a_put_never_answered_fails_after_the_last_attempt() -> None:
    store = ScriptedStore(*[no_answer] * 9)
    with pytest.raises(StoreUnavailable):
        retrying(store).put("a", b"x")
    assert store.n_calls == POLICY.n_attempts


def test_delays_double_up_to_a_most_and_are_drawn_from_zero() -> None:
    most = [1.0, 2.0, 3.0]
    seen: list[list[float]] = []
    for seed in range(200):
        clock = FakeClock(seed)
        with pytest.raises(StoreUnavailable):
            RetryingStore(ScriptedStore(*[no_answer] * 9), clock, POLICY).read("a")
        seen.append(clock.slept)
    for at, bound in enumerate(most):
        delays = [slept[at] for slept in seen]
        assert 0.0 <= min(delays) < 0.1 * bound
        assert 0.9 * bound < max(delays) < bound


def test_no_attempt_starts_after_the_deadline() -> None:
    policy = RetryPolicy(n_attempts=10_000, first_delay_s=1.0, max_delay_s=5.0, deadline_s=20.0)
    clock = FakeClock()
    start = clock.monotonic()
    with pytest.raises(StoreUnavailable):
        RetryingStore(ScriptedStore(*[no_answer] * 9999), clock, policy).read("a")
    assert sum(clock.slept) <= 20.0
    assert clock.monotonic() - start > 10.0


class BreakingList(MemoryStore):
    """Gives a few keys per listing, then breaks off."""

    def __init__(self, n_keys: int) -> None:
        super().__init__()
        self.n_keys = n_keys
        self.asked: list[str] = []

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self.asked.append(after)
        for n_given, info in enumerate(super().list(prefix, after)):
            if n_given == self.n_keys:
                raise StoreUnavailable("broke off")
            yield info


def test_a_listing_goes_on_after_the_last_key_it_gave() -> None:
    store = BreakingList(3)
    keys = [f"k{each:02d}" for each in range(20)]
    for key in keys:
        store.put(key, b"x")
    assert [info.key for info in retrying(store).list("k")] == keys
    assert store.asked == ["", *keys[2:19:3]]


def test_a_listing_without_progress_ends() -> None:
    store = BreakingList(0)
    store.put("k", b"x")
    with pytest.raises(StoreUnavailable):
        list(retrying(store).list("k"))
    assert len(store.asked) == POLICY.n_attempts


def test_racing_writers_with_lost_replies_agree_on_one_winner() -> None:
    odds = {FaultKind.CREATE_REPLY_LOST: 0.3, FaultKind.ERROR_BEFORE: 0.2}
    odds |= {FaultKind.DELAYED_EFFECT: 0.2, FaultKind.STUCK_READ: 0.2}
    for seed in range(300):
        clock, memory = FakeClock(seed), MemoryStore()
        faulty = FaultyStore(memory, random.Random(seed), FaultPlan(odds, max_delay=2), clock)
        store = RetryingStore(faulty, clock, RetryPolicy(n_attempts=8, deadline_s=1e6))
        outcomes = {data: outcome(store, data) for data in (MINE, THEIRS)}
        faulty.heal()
        (winner,) = [data for data in outcomes if memory.read("log/1") == data]
        assert outcomes[winner] in {"won", "unknown"}
        assert all(outcomes[data] != "won" for data in outcomes if data != winner)


def outcome(store: RetryingStore, data: bytes) -> str:
    try:
        return "won" if store.create("log/1", data) else "lost"
    except CommitUnknown:
        return "unknown"
