"""The field's further cases: failures, restarts, damage and crowds, from Publisher to Subscribers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_worlds import Engine, Meddled, Trainer, bits_in, bits_of, zeros

import weightwire as ww
from weightwire.checkpoint import Checkpoint
from weightwire.clock import SystemClock
from weightwire.errors import DuplicateTensor, ForkedHistory, RetryError
from weightwire.store import layout
from weightwire.store.memory import MemoryStore
from weightwire.store.retention import Retention, collect
from weightwire.store.run import Run, require_identity


def test_a_duplicate_name_is_refused_and_nothing_is_published() -> None:
    store, tensor = MemoryStore(), np.ones(5, np.float32)
    pairs = [("a", tensor), ("b", tensor + 1), ("a", tensor + 2)]
    publisher = ww.Publisher(store, lambda: pairs)
    with pytest.raises(DuplicateTensor):
        publisher.publish()
    assert [info.key for info in store.list(layout.LOG)] == []
    pairs.pop()
    assert publisher.publish().result().version == 0
    publisher.close()


def test_two_optimizer_steps_between_publishes_are_one_exact_difference() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    for n_steps in (2, 3, 7):
        for _ in range(n_steps):
            trainer.train()
        trainer.publish()
        engine.update()
        assert engine.holds(trainer.state)
    engine.close()


@pytest.mark.parametrize("part", ["bucket", "patch.json", "commit"])
def test_a_failed_upload_costs_nothing_but_time(part: str) -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    store.is_down = lambda verb, key: verb in ("put", "create") and part in key
    trainer.train()
    with pytest.raises(RetryError):
        trainer.publish()
    assert engine.update() is None
    store.is_down = lambda *_: False
    trainer.step()
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def test_one_failing_receiver_of_three_does_not_hold_up_the_others() -> None:
    store, broken = MemoryStore(), Meddled()
    trainer = Trainer(store)
    broken.inner = store
    trainer.publish()
    engines = [Engine(store, trainer.state, worker="a"), Engine(store, trainer.state, worker="b")]
    failing = Engine(broken, trainer.state, worker="c")
    broken.is_down = lambda *_: True
    for _ in range(3):
        trainer.step()
        for engine in engines:
            engine.update()
            assert engine.holds(trainer.state)
        with pytest.raises(RetryError):
            failing.update()
    broken.is_down = lambda *_: False
    failing.update()
    assert failing.holds(trainer.state)
    for engine in (*engines, failing):
        engine.close()


def test_a_version_that_is_held_is_not_applied_again() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.step(2)
    engine = Engine(store, trainer.state)
    assert engine.update() is not None
    for _ in range(3):
        assert engine.subscriber.stage() is False
        assert engine.update() is None
        assert engine.holds(trainer.state)
    engine.close()


def test_a_record_that_a_listing_leaves_out_is_asked_for() -> None:
    """Versions are seen out of order: the one in the middle is not shown, and yet is taken first."""
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    trainer.step(3)
    store.hide_in_lists = lambda key: key == layout.commit_key(2)
    updated = engine.update()
    assert updated is not None
    assert (updated.version, updated.n_steps) == (3, 3)
    assert engine.holds(trainer.state)
    engine.close()


def test_no_patch_is_taken_over_a_record_that_is_missing() -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    before = bits_of(engine.live)
    trainer.step(3)
    store.hide = lambda key: key == layout.commit_key(2)
    with pytest.raises(ForkedHistory):
        engine.update()
    assert bits_of(engine.live) == before
    assert engine.subscriber.version == 0
    store.hide = lambda _: False
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def test_a_cache_of_another_run_with_the_same_version_numbers_is_not_used(tmp_path: Path) -> None:
    store, cache = MemoryStore(), tmp_path / "cache"
    old = Trainer(store)
    old.step(3)
    engine = Engine(store, old.state, cache=cache)
    engine.update()
    engine.close()
    store.delete([info.key for info in store.list("")])
    new = Trainer(store)
    for name in new.state:
        bits_in(new.state[name])[...] ^= 3
    new.step(3)
    assert new.publisher.version == old.publisher.version
    engine = Engine(store, new.state, cache=cache)
    engine.update()
    assert engine.holds(new.state)
    engine.close()


@pytest.mark.parametrize("n_behind", [1, 2, 5, 9])
def test_a_receiver_that_is_far_behind_catches_up(n_behind: int) -> None:
    store = MemoryStore()
    trainer = Trainer(store, skips=(4,))
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    trainer.step(n_behind)
    updated = engine.update()
    assert engine.holds(trainer.state)
    assert updated is not None
    assert updated.n_steps <= min(n_behind, 2 + n_behind % 4 + 1)
    engine.close()


def test_a_receiver_whose_chain_was_pruned_starts_from_an_anchor() -> None:
    store = MemoryStore()
    trainer = Trainer(store, anchors=ww.AnchorPolicy(every=3))
    trainer.publish()
    engine = Engine(store, trainer.state, receipts=False)
    engine.update()
    trainer.step(7)
    run = Run(store, require_identity(store))
    collected = collect(run, Retention(keep_versions=1, keep_anchors=1), SystemClock())
    assert 1 in collected.versions
    updated = engine.update()
    assert updated is not None
    assert updated.was_whole
    assert engine.holds(trainer.state)
    engine.close()


def test_a_restarted_trainer_goes_on_where_the_last_commit_was() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.step(3)
    engine = Engine(store, trainer.state)
    engine.update()
    trainer.train()  # lost with the process: never published
    restarted = Trainer(store, {name: tensor.copy() for name, tensor in trainer.state.items()})
    published = restarted.step()
    assert published.n_bytes < published.n_state_bytes // 2, "a restart must not cost a whole state"
    engine.update()
    assert engine.holds(restarted.state)
    engine.close()


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]


OBJECTS = {
    "bucket": lambda key: "bucket" in key,
    "patch index": lambda key: key.endswith("patch.json"),
    "anchor manifest": lambda key: key.endswith("anchor.json"),
    "anchor weights": lambda key: key.endswith("model.safetensors"),
    "commit": lambda key: key == layout.commit_key(1),
}


@pytest.mark.parametrize("harm", [truncate, flip], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_damaged_object_is_noticed_before_a_weight_changes(
    kind: str, harm: Callable[[bytes], bytes]
) -> None:
    """Damaged for good: a typed failure or another way; repaired: exact."""
    store = Meddled()
    trainer = Trainer(store)
    trainer.step(2)
    engine = Engine(store, trainer.state)
    store.spoil = lambda key, data: harm(data) if OBJECTS[kind](key) else data
    try:
        engine.update()
        assert engine.subscriber.digest == ww.digest(engine.live)
    except ww.errors.WeightwireError:
        assert bits_of(engine.live) == bits_of(zeros(trainer.state))
    store.spoil = lambda _, data: data
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_that_is_damaged_once_on_its_way_is_fetched_again(kind: str) -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.step(2)
    engine = Engine(store, trainer.state)
    met: list[str] = []

    def spoil_once(key: str, data: bytes) -> bytes:
        if OBJECTS[kind](key) and not met:
            met.append(key)
            return flip(data)
        return data

    store.spoil = spoil_once
    engine.update()
    assert met
    assert engine.holds(trainer.state)
    engine.close()


@pytest.mark.parametrize("where", ["changed tensor", "unchanged tensor"])
def test_live_weights_that_something_else_changed_are_found_and_repaired(where: str) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state, scrub_versions=2)
    engine.update()
    bits_in(engine.live["layer" if where == "changed tensor" else "norm"])[11] ^= 4
    for number in range(3):
        bits_in(trainer.state["layer"])[number] ^= 1
        trainer.publish()
        engine.update()
    assert engine.subscriber.n_heals <= 1
    assert engine.holds(trainer.state)
    engine.close()


def test_two_ranks_on_one_host_may_share_a_cache(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.step(2)
    engines = [
        ww.Subscriber(store, zeros(trainer.state), worker=f"r{n}", cache=tmp_path) for n in range(2)
    ]
    failures: list[Any] = []

    def run(subscriber: ww.Subscriber) -> None:
        for _ in range(50):
            try:
                subscriber.update()
            except Exception as error:
                failures.append(error)

    for _ in range(6):
        threads = [threading.Thread(target=run, args=(each,)) for each in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert {each.digest for each in engines} == {ww.digest(trainer.state)}
        trainer.step()
    for each in engines:
        each.close()


def test_a_rank_may_take_its_time_between_fetching_and_writing(tmp_path: Path) -> None:
    """Another rank on the host goes on to newer anchors, and tidies the cache they share."""
    store = MemoryStore()
    trainer = Trainer(store, anchors=ww.AnchorPolicy(every=1), skips=())
    trainer.publish()
    slow, fast = (
        ww.Subscriber(store, tmp_path / name, worker=name, cache=tmp_path / "cache")
        for name in ("slow", "fast")
    )
    before = bits_of(trainer.state)
    assert slow.stage()
    rng = np.random.default_rng(1)
    for _ in range(3):
        for tensor in trainer.state.values():
            bits_in(tensor)[...] ^= rng.integers(1, 200, tensor.size, np.uint8)
        trainer.publish()
    updated = fast.update()
    assert updated is not None
    assert updated.n_steps == 1, "it went on by a newer anchor"
    slow.activate()
    with Checkpoint.open(tmp_path / "slow") as checkpoint:
        for name, spec in checkpoint.specs.items():
            assert checkpoint.read(name, 0, spec.n_elements).tobytes() == before[name][2]
    for each in (slow, fast):
        each.close()
