"""The store that does everything wrong does each thing wrong in its own way, and repeatably."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_clock import FakeClock

from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable, WeightwireError
from weightwire.store.memory import MemoryStore
from weightwire.testing.faults import FaultKind, FaultPlan, every_fault
from weightwire.testing.faulty_store import FaultyStore

DATA = bytes(range(200))
KEYS = [f"log/{each}" for each in range(5)]


def faulty(
    kind: FaultKind, n_faults: int | None = 1, seed: int = 0, **plan: float
) -> tuple[FaultyStore, MemoryStore, FakeClock]:
    """A store with some objects, in which one thing is bound to go wrong."""
    clock, memory = FakeClock(seed), MemoryStore()
    for key in KEYS:
        memory.put(key, DATA)
    faults = FaultPlan({kind: 1.0}, n_faults=n_faults, **plan)  # type: ignore[arg-type]
    return FaultyStore(memory, random.Random(seed), faults, clock), memory, clock


def keys_of(store: FaultyStore | MemoryStore) -> list[str]:
    return [info.key for info in store.list("")]


def unavailable(call: Callable[[], object]) -> None:
    with pytest.raises(StoreUnavailable):
        call()


def test_an_error_before_the_effect_has_no_effect() -> None:
    for verb in ("put", "create"):
        store, memory, _ = faulty(FaultKind.ERROR_BEFORE)
        unavailable(lambda v=verb, s=store: getattr(s, v)("new", DATA))
        assert keys_of(memory) == KEYS
    store, memory, _ = faulty(FaultKind.ERROR_BEFORE)
    unavailable(lambda: store.delete(KEYS))
    assert keys_of(store) == KEYS


def test_lost_replies_come_after_the_effect() -> None:
    store, memory, _ = faulty(FaultKind.PUT_REPLY_LOST)
    unavailable(lambda: store.put("new", iter([DATA])))
    assert memory.read("new") == DATA
    store, memory, _ = faulty(FaultKind.CREATE_REPLY_LOST)
    unavailable(lambda: store.create("new", DATA))
    assert store.create("new", b"other") is False
    store, memory, _ = faulty(FaultKind.DELETE_REPLY_LOST)
    unavailable(lambda: store.delete(KEYS))
    assert keys_of(memory) == []


def test_a_delayed_write_happens_some_operations_later() -> None:
    for seed in range(20):
        store, memory, _ = faulty(FaultKind.DELAYED_EFFECT, seed=seed, max_delay=5)
        unavailable(lambda s=store: s.put("new", [DATA]))
        assert keys_of(memory) == KEYS
        n_operations = 0
        while "new" not in keys_of(memory):
            store.read(KEYS[0])
            n_operations += 1
        assert 1 <= n_operations <= 6
        assert memory.read("new") == DATA


def test_a_delayed_create_does_not_undo_who_won_meanwhile() -> None:
    store, memory, _ = faulty(FaultKind.DELAYED_EFFECT)
    unavailable(lambda: store.create("new", b"late"))
    assert store.create("new", b"in time") is True
    store.heal()
    assert memory.read("new") == b"in time"


def test_healing_lets_what_is_on_its_way_arrive() -> None:
    store, memory, _ = faulty(FaultKind.DELAYED_EFFECT, n_faults=None)
    unavailable(lambda: store.create("new", DATA))
    unavailable(lambda: store.delete(KEYS))
    store.heal()
    assert keys_of(memory) == ["new"]
    assert store.create("newer", DATA) is True


def test_a_put_is_delivered_twice() -> None:
    store, memory, _ = faulty(FaultKind.DUPLICATE_DELIVERY)
    n_puts = []
    original = memory.put
    memory.put = lambda key, data: (n_puts.append(key), original(key, data))[1]  # type: ignore[method-assign]
    store.put("new", iter([DATA]))
    assert n_puts == ["new", "new"]
    assert memory.read("new") == DATA


def test_latency_takes_time_and_nothing_else() -> None:
    store, _, clock = faulty(FaultKind.LATENCY, max_latency_s=2.0)
    assert store.read(KEYS[0]) == DATA
    (slept,) = clock.slept
    assert 0.0 < slept < 2.0


def test_throttling_comes_in_bursts() -> None:
    lengths = set()
    for seed in range(50):
        store, _, _ = faulty(FaultKind.THROTTLING, seed=seed, max_burst=4)
        lengths.add(n_failures(store))
    assert lengths == {1, 2, 3, 4}


def n_failures(store: FaultyStore) -> int:
    for n_failed in range(100):
        try:
            store.read(KEYS[0])
        except StoreUnavailable:
            continue
        return n_failed
    raise AssertionError("it never ends")


def test_an_outage_lasts_until_its_time_is_over() -> None:
    store, _, clock = faulty(FaultKind.OUTAGE, max_outage_s=20.0)
    unavailable(lambda: store.read(KEYS[0]))
    unavailable(lambda: list(store.list("")))
    clock.sleep(20.0)
    assert store.read(KEYS[0]) == DATA


def test_a_permission_blip_is_a_refusal_that_passes() -> None:
    store, _, _ = faulty(FaultKind.PERMISSION_BLIP)
    with pytest.raises(StoreRefused):
        store.read(KEYS[0])
    assert store.read(KEYS[0]) == DATA


def test_a_stale_listing_misses_only_what_is_new() -> None:
    seen = set()
    for seed in range(50):
        store, _, _ = faulty(FaultKind.STALE_LIST, seed=seed)
        for each in range(3):
            store.create(f"new/{each}", DATA)
        store.put(KEYS[0], b"overwritten, not new")
        found = keys_of(store)
        assert found[: len(KEYS)] == KEYS
        seen.add(tuple(found[len(KEYS) :]))
    assert seen == {(), ("new/0",), ("new/0", "new/1")}


def test_a_listing_omits_one_object() -> None:
    omitted = set()
    for seed in range(50):
        store, _, _ = faulty(FaultKind.LIST_OMITS_ONE, seed=seed)
        (missing,) = set(KEYS) - set(keys_of(store))
        omitted.add(missing)
        assert keys_of(store) == KEYS
    assert omitted == set(KEYS)


def test_a_listing_breaks_off_after_some_objects() -> None:
    lengths = set()
    for seed in range(50):
        store, _, _ = faulty(FaultKind.LIST_ENDS_EARLY, seed=seed)
        found: list[str] = []
        with pytest.raises(StoreUnavailable):
            found.extend(info.key for info in store.list(""))
        assert found == KEYS[: len(found)]
        lengths.add(len(found))
    assert lengths == {0, 1, 2, 3, 4, 5}


def test_what_was_just_written_is_missing_once() -> None:
    store, _, _ = faulty(FaultKind.MISSING_ONCE, n_faults=None)
    store.put("new", DATA)
    assert store.read(KEYS[0]) == DATA
    with pytest.raises(ObjectMissing):
        store.read("new")
    assert store.read("new") == DATA


def test_a_stuck_read_takes_its_time_and_fails() -> None:
    store, _, clock = faulty(FaultKind.STUCK_READ, stuck_s=30.0)
    unavailable(lambda: store.read(KEYS[0]))
    assert clock.slept == [30.0]


def test_torn_and_empty_reads_are_short() -> None:
    store, _, _ = faulty(FaultKind.TORN_READ)
    torn = store.read(KEYS[0])
    assert DATA.startswith(torn)
    assert torn != DATA
    store, _, _ = faulty(FaultKind.EMPTY_READ)
    assert store.read(KEYS[0]) == b""


def test_a_flipped_bit_is_one_bit() -> None:
    for seed in range(20):
        store, _, _ = faulty(FaultKind.FLIPPED_BIT, seed=seed)
        found = store.read(KEYS[0])
        assert sum((a ^ b).bit_count() for a, b in zip(found, DATA, strict=True)) == 1


def test_the_wrong_object_is_another_one() -> None:
    store, memory, _ = faulty(FaultKind.WRONG_OBJECT)
    memory.put(KEYS[0], b"the right one")
    assert store.read(KEYS[0]) == DATA


def test_a_range_is_off_by_some_bytes() -> None:
    store, _, _ = faulty(FaultKind.RANGE_OFF)
    found = store.read(KEYS[0], 10, 20)
    assert found in [DATA[10 + n_off : 20 + n_off] for n_off in range(1, 9)]


def run_world(seed: int, odds: float) -> tuple[list[str], FaultyStore]:
    """Many operations on a store from hell; what each of them answered."""
    clock = FakeClock(seed)
    store = FaultyStore(MemoryStore(clock), random.Random(seed), every_fault(odds), clock)
    chance, answers = random.Random(seed + 1), []
    for _ in range(3000):
        key = f"k{chance.randrange(20)}"
        verb = chance.choice(["put", "create", "read", "list", "delete"])
        answers.append(f"{verb} {key} {answer(store, verb, key)}")
        clock.sleep(1.0)
    return answers, store


def answer(store: FaultyStore, verb: str, key: str) -> object:
    try:
        if verb == "list":
            return keys_of(store)
        if verb == "delete":
            return store.delete([key])
        return store.read(key) if verb == "read" else getattr(store, verb)(key, key.encode() * 9)
    except WeightwireError as error:
        return repr(error)


def test_every_kind_is_injected_in_a_long_run() -> None:
    _, store = run_world(7, 0.03)
    assert set(store.injected) == set(FaultKind)


def test_the_same_chance_gives_the_same_world() -> None:
    first, one = run_world(11, 0.05)
    second, two = run_world(11, 0.05)
    other, _ = run_world(12, 0.05)
    assert first == second
    assert one.injected == two.injected
    assert first != other


def test_a_healed_store_is_sound() -> None:
    _, store = run_world(13, 0.2)
    store.heal()
    n_before = store.injected.total()
    for key in KEYS:
        store.put(key, DATA)
        assert store.read(key) == DATA
    assert set(KEYS) <= set(keys_of(store))
    assert store.injected.total() == n_before


def test_no_faults_are_no_faults() -> None:
    answers, store = run_world(17, 0.0)
    assert not store.injected
    assert not [each for each in answers if "Unavailable" in each]
