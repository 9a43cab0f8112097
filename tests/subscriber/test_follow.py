from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_following import Training

import weightwire as ww
from sample_training import bits_of, inline, zeros_like
from weightwire.checkpoint import Checkpoint
from weightwire.clock import SystemClock
from weightwire.errors import (
    FrozenHistory,
    NotARun,
    StopError,
    UnsignedRecord,
    UnsupportedLayout,
)
from weightwire.events import Updated
from weightwire.publisher import Publisher
from weightwire.store import layout
from weightwire.store.counting import CountingStore
from weightwire.store.history import HistoryReader
from weightwire.store.memory import MemoryStore
from weightwire.store.receipts import is_proven, read_receipts
from weightwire.store.run import Run, require_identity
from weightwire.subscriber import Polling, State, Subscriber
from weightwire.trust.keys import SigningKey


def test_receiver_loads_the_anchor_then_follows_patch_by_patch(training: Training) -> None:
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    first = sub.update()
    assert first is not None
    assert first.was_whole
    for version in range(1, 6):
        training.publish()
        done = sub.update()
        assert done is not None
        assert (done.version, done.was_whole, done.n_steps) == (version, False, 1)
        assert bits_of(live) == bits_of(training.state)
    assert sub.update() is None


def test_staging_writes_nothing_and_activation_writes_it_all(training: Training) -> None:
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    before = bits_of(live)
    training.publish(3)
    assert sub.stage()
    assert (sub.state, sub.version, bits_of(live)) == (State.STAGED, 0, before)
    sub.activate()
    assert (sub.state, sub.version) == (State.IDLE, 3)
    assert bits_of(live) == bits_of(training.state)


def test_weights_are_written_in_place_where_the_engine_keeps_them(training: Training) -> None:
    live = zeros_like(training.state)
    kept = dict(live)
    sub = training.subscriber(live)
    sub.update()
    training.publish()
    sub.update()
    assert all(live[name] is tensor for name, tensor in kept.items())


def test_module_is_updated_in_place() -> None:
    model, copy = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    store = MemoryStore()
    with Publisher(store, model) as pub, torch.no_grad():
        pub.publish().result()
        sub = Subscriber(store, copy)
        sub.update()
        model.weight[3, 4] = float("nan")
        pub.publish().result()
        sub.update()
        sub.close()
    assert bits_of(copy) == bits_of(model)


def test_model_of_another_shape_is_refused_by_name_before_any_write(training: Training) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.zeros(3, 3))

    other = Other()
    with pytest.raises(UnsupportedLayout, match=r"'steps'.*no such tensor"):
        training.subscriber(other).update()
    assert not other.embed.any()


def test_receiver_far_behind_takes_the_cheapest_way() -> None:
    training = Training(skips=(8,))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish(17)
    done = sub.update()
    assert done is not None
    assert (done.version, done.n_steps) == (17, 3)
    assert bits_of(live) == bits_of(training.state)


def test_late_joiner_starts_from_the_newest_anchor() -> None:
    training = Training(anchors=ww.AnchorPolicy(every=4), skips=())
    training.publish(6)
    live = zeros_like(training.state)
    done = training.subscriber(live).update()
    assert done is not None
    assert (done.version, done.n_steps) == (6, 3)
    assert bits_of(live) == bits_of(training.state)


def test_activation_may_be_repeated(training: Training) -> None:
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish()
    sub.stage()
    staged = sub._staged
    assert staged is not None
    sub._target.activate(staged.ready)
    sub.activate()
    assert bits_of(live) == bits_of(training.state)


def test_aborting_gives_back_the_state_before(training: Training) -> None:
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.stage()
    sub.abort()
    assert sub.state is State.EMPTY
    sub.update()
    training.publish()
    sub.stage()
    sub.abort()
    assert (sub.state, sub.version) == (State.IDLE, 0)
    with pytest.raises(StopError, match="nothing is staged"):
        sub.activate()
    sub.update()
    assert bits_of(live) == bits_of(training.state)


def test_restarted_worker_resumes_from_its_cache(training: Training, tmp_path: Path) -> None:
    live = zeros_like(training.state)
    with training.subscriber(live, cache=tmp_path) as sub:
        sub.update()
        training.publish(3)
        sub.update()
    counting = CountingStore(training.store)  # type: ignore[arg-type]
    again = zeros_like(training.state)
    with training.subscriber(again, counting, cache=tmp_path) as sub:
        done = sub.update()
        assert done is not None
        assert bits_of(again) == bits_of(training.state)
    assert done.n_bytes < 3000  # the anchor's manifest, and no weights


def test_folder_is_kept_current_and_recognised_after_a_restart(
    training: Training, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    with training.subscriber(out) as sub:
        sub.update()
        training.publish()
        sub.update()
    training.publish()
    with training.subscriber(out) as sub:
        done = sub.update()
        assert done is not None
        assert (done.was_whole, done.n_steps) == (False, 1)
    with Checkpoint.open(out) as checkpoint:
        assert ww.digest(checkpoint) == ww.digest(training.state)


def test_watching_waits_until_a_version_is_pushed(training: Training) -> None:
    live = zeros_like(training.state)
    sub = Subscriber(training.store, live, polling=Polling(first_s=60, max_s=60))
    sub.update()
    assert not sub.watch(timeout_s=0)
    seen: list[bool] = []
    watcher = threading.Thread(target=lambda: seen.append(sub.watch()))
    watcher.start()
    training.publish()
    while watcher.is_alive():
        sub.notify()
        watcher.join(0.01)
    assert seen == [True]
    sub.close()


class StoppedClock(SystemClock):
    """Sleeping moves it, and nothing else does."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        del wake
        self.at += max(seconds, 1e-3)


def test_waiting_in_short_pieces_still_looks_ever_more_seldom(training: Training) -> None:
    counting, clock = CountingStore(training.store), StoppedClock()  # type: ignore[arg-type]
    sub = training.subscriber(
        zeros_like(training.state), counting, clock=clock, polling=Polling(1.0, 64.0, 2.0)
    )
    sub.update()
    before = counting.snapshot().n_list
    while clock.at < 640:
        assert not sub.watch(timeout_s=1.0)
    n_looks = (counting.snapshot().n_list - before) // 2
    assert 10 <= n_looks <= 30
    training.publish()
    sub.notify()
    assert sub.watch(timeout_s=0.0)


def test_following_gives_every_update_until_told_to_stop(training: Training) -> None:
    live = zeros_like(training.state)
    stop = threading.Event()
    seen: list[int] = []
    with Subscriber(training.store, live, polling=Polling(first_s=0.001, max_s=0.001)) as sub:
        for updated in sub.follow(stop):
            seen.append(updated.version)
            if len(seen) == 3:
                stop.set()
            else:
                training.publish()
    assert seen == [0, 1, 2]


def test_receipts_say_what_is_held_and_the_log_proves_it(training: Training) -> None:
    seen: list[Updated] = []
    sub = training.subscriber(zeros_like(training.state), worker="gpu-7", on_updated=seen.append)
    sub.update()
    training.publish()
    sub.update()
    [receipt] = read_receipts(training.store)  # type: ignore[arg-type]
    run = Run(training.store, require_identity(training.store))  # type: ignore[arg-type]
    assert (receipt.worker, receipt.version, receipt.lag) == ("gpu-7", 1, 0)
    assert is_proven(receipt, HistoryReader(run).refresh(-1))
    assert [updated.version for updated in seen] == [0, 1]


def test_unsigned_run_is_refused_by_who_pinned_a_key(training: Training) -> None:
    key = SigningKey.generate().public
    with pytest.raises(UnsignedRecord):
        training.subscriber({}, key=key).update()


def test_signed_run_is_followed_by_who_pinned_its_key() -> None:
    key = SigningKey.generate()
    training = Training(key=key)
    live = zeros_like(training.state)
    training.subscriber(live, key=str(key.public)).update()
    assert bits_of(live) == bits_of(training.state)


def test_silent_publisher_raises_an_alarm(training: Training) -> None:
    sub = training.subscriber({}, max_silence_s=0.0)
    with pytest.raises(FrozenHistory):
        sub.update()


def test_empty_store_is_no_run() -> None:
    with pytest.raises(NotARun):
        Subscriber(MemoryStore(), {})


def test_names_the_run_does_not_have_are_left_alone(training: Training) -> None:
    live = {**zeros_like(training.state), "kv_cache": np.ones(3)}
    sub = training.subscriber(live)
    sub.update()
    training.publish()
    sub.update()
    assert live.pop("kv_cache").tolist() == [1.0, 1.0, 1.0]
    assert bits_of(live) == bits_of(training.state)


def test_version_committed_by_a_publisher_that_slept_through_a_collection_is_not_followed() -> None:
    training = Training()
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish(3)
    store = training.store
    store.create(layout.boundary_key(3), b"")  # type: ignore[attr-defined]
    [zombie] = [i.key for i in store.list(layout.LOG) if "000000000001-commit" in i.key]  # type: ignore[attr-defined]
    history = HistoryReader(Run(store, require_identity(store))).refresh(-1)  # type: ignore[arg-type]
    assert zombie
    assert sorted(history.commits) == [3]


def test_model_that_ties_what_the_run_keeps_apart_is_refused_by_name() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.zeros(3))
            self.head = self.embed

    store, model = MemoryStore(), Tied()
    apart = {"embed": torch.ones(3), "head": torch.full((3,), 2.0)}
    with Publisher(store, apart, background=inline) as pub:
        pub.publish().result()
    with pytest.raises(UnsupportedLayout, match="ties 'head' to 'embed'"):
        Subscriber(store, model, background=inline).update()
    assert not model.embed.any()
