"""What simulated worlds found, each as the smallest case that shows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import weightwire as ww
from weightwire.apply.targets import Ready
from weightwire.errors import CommitUnknown, HashMismatch, NoWay, ObjectMissing, TargetMismatch
from weightwire.store.cache import Cache
from weightwire.store.memory import MemoryStore
from weightwire.store.records import RunIdentity, identity_bytes, parse_identity
from weightwire.store.retry import RetryPolicy
from weightwire.testing.world.fragile import Interrupted
from weightwire.workers import InlineExecutor

State = dict[str, np.ndarray]

NO_RETRY = RetryPolicy(n_attempts=1)


def inline(n_threads: int, name: str) -> Executor:
    return InlineExecutor()


def publisher_of(store: MemoryStore, state: State) -> ww.Publisher:
    never = ww.AnchorPolicy(every=1000, chain_share=1000.0)
    return ww.Publisher(store, state, anchors=never, skips=(), retry=NO_RETRY, background=inline)


def subscriber_of(store: MemoryStore, target: object, **options: object) -> ww.Subscriber:
    return ww.Subscriber(store, target, retry=NO_RETRY, background=inline, **options)  # type: ignore[arg-type]


def small_state() -> State:
    return {"a": np.arange(64, dtype=np.float32), "b": np.arange(64, dtype=np.float32) + 100}


def assert_holds(live: State, wanted: State) -> None:
    for name, array in wanted.items():
        assert live[name].dtype == array.dtype
        assert live[name].tobytes() == array.tobytes(), name


def test_an_alias_follows_when_an_anchor_replaces_the_tensor_it_shared() -> None:
    """A receiver's tied names pointed at the old tensor after its type had to change."""
    store, state = MemoryStore(), small_state()
    state["tied"] = state["a"]
    publisher_of(store, state).publish().result()
    shared = np.zeros(64, dtype=np.float16)
    live: State = {"a": shared, "tied": shared}
    subscriber_of(store, live).update()
    assert_holds(live, state)


def test_an_alias_follows_when_it_is_tied_to_another_tensor() -> None:
    """The patch said so; a receiver whose alias shared the old tensor's storage kept it there."""
    store, state = MemoryStore(), small_state()
    state["tied"] = state["a"]
    publisher, live = publisher_of(store, state), {}
    publisher.publish().result()
    subscriber = subscriber_of(store, live)
    subscriber.update()
    state["tied"] = state["b"]
    state["a"][0] += 1
    publisher.publish().result()
    subscriber.update()
    assert_holds(live, state)


@pytest.mark.parametrize("first", ["a", "other"])
def test_a_name_the_run_does_not_have_may_share_storage(first: str) -> None:
    """It came first in the receiver's model, and was taken for the tensor: KeyError while writing."""
    store, state = MemoryStore(), small_state()
    publisher = publisher_of(store, state)
    publisher.publish().result()
    shared = np.zeros(64, dtype=np.float32)
    live: State = {first: shared, "a": shared, "other": shared, "b": np.zeros(64, np.float32)}
    subscriber = subscriber_of(store, live)
    subscriber.update()
    state["a"][3] += 1
    publisher.publish().result()
    subscriber.update()
    assert_holds(live, state)


def test_a_tie_that_is_dissolved_leaves_both_tensors_right() -> None:
    """The alias became a tensor of its own, and came first in the receiver's model."""
    store = MemoryStore()
    tied = np.arange(64, dtype=np.float32)
    state: State = {"tied": tied, "a": tied}
    live: State = {}
    publisher = publisher_of(store, state)
    publisher.publish().result()
    subscriber = subscriber_of(store, live)
    subscriber.update()
    state["a"] = tied.copy()
    state["a"][5] = -1
    state["tied"][7] = -2
    publisher.publish().result()
    subscriber.update()
    assert_holds(live, state)


def test_a_damaged_copy_of_a_tied_tensor_is_found() -> None:
    """The run has one tensor under two names, the receiver two: both are looked at."""
    store, state = MemoryStore(), small_state()
    state["tied"] = state["a"]
    publisher_of(store, state).publish().result()
    live: State = {name: np.zeros(64, np.float32) for name in state}
    subscriber = subscriber_of(store, live, scrub_versions=1)
    subscriber.update()
    live["tied"][9] = 5
    subscriber.update()
    assert_holds(live, state)
    assert subscriber.n_heals == 1


def test_a_write_to_a_copy_of_a_tied_tensor_that_is_lost_is_noticed() -> None:
    """After an anchor the digest was read back, and the digest counts tied names once."""
    store, state = MemoryStore(), small_state()
    state["tied"] = state["a"]
    publisher_of(store, state).publish().result()
    live: State = {name: np.zeros(64, np.float32) for name in state}
    subscriber = subscriber_of(store, live)
    activate, left = subscriber._target.activate, iter([True])

    def lose_a_write(ready: Ready) -> None:
        activate(ready)
        if next(left, False):
            live["tied"][9] = 0

    subscriber._target.activate = lose_a_write  # type: ignore[method-assign]
    with suppress(TargetMismatch):
        subscriber.update()
        assert_holds(live, state)
    assert next(left, None) is None
    subscriber.update()
    assert not subscriber.is_dirty
    assert_holds(live, state)


def test_copies_of_tied_tensors_are_known_after_a_version_without_changes() -> None:
    """A way without patches forgot the run's ties, and with them to look at the copies."""
    store, state = MemoryStore(), small_state()
    state["tied"] = state["a"]
    publisher = publisher_of(store, state)
    publisher.publish().result()
    live: State = {name: np.zeros(64, np.float32) for name in state}
    subscriber = subscriber_of(store, live, scrub_versions=1)
    subscriber.update()
    publisher.publish().result()
    assert subscriber.update().version == 1  # type: ignore[union-attr]
    live["tied"][9] = 5
    subscriber.update()
    assert_holds(live, state)


def test_a_dirty_receiver_waits_rather_than_go_back() -> None:
    """Its only way was an anchor of an older version."""
    store, state = MemoryStore(), small_state()
    publisher, live = publisher_of(store, state), {}
    publisher.publish().result()
    subscriber = subscriber_of(store, live)
    subscriber.update()
    for _ in range(2):
        state["a"][0] += 1
        publisher.publish().result()
        subscriber.update()
    store.delete([info.key for info in store.list("patches/")])
    subscriber._holding.found_damage()
    with pytest.raises(NoWay):
        subscriber.update()
    assert subscriber.version == 2
    assert subscriber.is_dirty


def test_one_wrong_bit_in_a_record_never_asks_for_a_person() -> None:
    """In its format's name it looked like something else; in its version, like a newer release."""
    identity = RunIdentity("ab" * 16, 1)
    raw = identity_bytes(identity)
    for at, bit in itertools.product(range(len(raw)), range(8)):
        wrong = raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]
        with pytest.raises(ww.errors.RetryError):
            parse_identity(wrong, "here")
    with pytest.raises(HashMismatch):
        parse_identity(raw.replace(b'"format_version":1', b'"format_version":2'), "here")


def test_a_damaged_memory_of_the_newest_version_is_none(tmp_path: Path) -> None:
    """One wrong bit in the cache's ``seen.json`` was taken for a forked history, for ever."""
    cache = Cache(tmp_path)
    cache.remember_seen("ab" * 16, 7, "cd" * 32)
    assert Cache(tmp_path).seen() == ("ab" * 16, 7, "cd" * 32)
    path = tmp_path / "seen.json"
    path.write_bytes(path.read_bytes().replace(b"cdcd", b"cded", 1))
    assert Cache(tmp_path).seen() is None


class Forgetful(MemoryStore):
    """Does not find a commit record when it is first asked for it."""

    n_misses = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key.endswith("-commit.json") and self.n_misses:
            self.n_misses -= 1
            raise ObjectMissing(key)
        return super().read(key, start, stop)

    def create(self, key: str, data: bytes) -> bool:
        is_new = super().create(key, data)
        if is_new and key.endswith("-commit.json") and self.loses_answers:
            raise ww.errors.StoreUnavailable(key)
        return is_new

    loses_answers = False


def test_a_record_that_is_not_found_once_fences_nobody() -> None:
    """The commit was there and was ours; the publisher took it for collected, and stopped."""
    store, state = Forgetful(), small_state()
    publisher = publisher_of(store, state)
    store.loses_answers = True
    with pytest.raises(CommitUnknown):
        publisher.publish().result()
    store.loses_answers, store.n_misses = False, 1
    with pytest.raises(CommitUnknown):
        publisher.publish().result()
    state["a"][0] += 1
    assert publisher.publish().result().version == 1


def test_an_interrupted_activation_stays_dirty_until_it_is_repaired() -> None:
    """Staging the repair, or giving it up, made the receiver say it was sound."""
    store, state = MemoryStore(), small_state()
    publisher_of(store, state).publish().result()
    live: State = {}
    subscriber = subscriber_of(store, live)
    subscriber.update()
    subscriber._target.activate = interrupt(subscriber._target.activate)  # type: ignore[method-assign]
    state["a"][0] += 1
    publisher_of(store, state).publish().result()
    with pytest.raises(Interrupted):
        subscriber.update()
    subscriber.stage()
    assert subscriber.is_dirty
    subscriber.abort()
    assert subscriber.is_dirty
    subscriber.update()
    assert not subscriber.is_dirty
    assert_holds(live, state)


def interrupt(activate: Callable[[object], None]) -> Callable[[object], None]:
    """Raise the first time, then go on as before."""
    left = iter([True])

    def once(ready: object) -> None:
        if next(left, False):
            raise Interrupted
        activate(ready)

    return once
