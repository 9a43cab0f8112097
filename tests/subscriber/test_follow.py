from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import weightwire as ww
from sample_training import Weights, bits_of, inline, train, weights, zeros_like
from weightwire.apply.targets import MemoryTarget, Ready
from weightwire.checkpoint import Checkpoint
from weightwire.clock import SystemClock
from weightwire.errors import (
    Dirty,
    FencedWriter,
    FrozenHistory,
    NotARun,
    NoWay,
    RolledBack,
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
from weightwire.subscriber import Polling, State, Subscriber, require_sound
from weightwire.trust.keys import SigningKey


class Training:
    """A trainer, its store, and receivers on demand."""

    def __init__(self, store: object = None, **options: object) -> None:
        self.store = store if store is not None else MemoryStore()
        self.state = weights()
        self.pub = Publisher(self.store, self.state, background=inline, **options)  # type: ignore[arg-type]
        self.pub.publish().result()
        self.n_steps = 0

    def publish(self, n: int = 1) -> None:
        for _ in range(n):
            self.n_steps += 1
            train(self.state, self.n_steps)
            self.pub.publish().result()

    def subscriber(self, live: object, store: object = None, **options: object) -> Subscriber:
        return Subscriber(store or self.store, live, background=inline, **options)  # type: ignore[arg-type]


@pytest.fixture
def training() -> Training:
    return Training()


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


def flip(store: MemoryStore, part: str) -> str:
    """Damage one stored object for good."""
    [key, *_] = [info.key for info in store.list("") if part in info.key]
    raw = bytearray(store.read(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))
    return key


def test_damaged_patch_is_gone_around_by_another_way() -> None:
    training = Training(skips=(4,), anchors=ww.AnchorPolicy(every=100))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish(4)
    flip(training.store, "patches/000000000004-000000000000")  # type: ignore[arg-type]
    done = sub.update()
    assert done is not None
    assert (done.n_detours, done.n_steps, done.was_whole) == (1, 4, False)
    assert bits_of(live) == bits_of(training.state)


def test_damaged_chain_is_gone_around_by_an_anchor() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=3))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    training.publish(4)
    flip(training.store, "patches/000000000002-")  # type: ignore[arg-type]
    done = sub.update()
    assert done is not None
    assert done.was_whole
    assert bits_of(live) == bits_of(training.state)


def test_when_no_way_leads_on_the_receiver_keeps_what_it_has_and_says_so() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    before = bits_of(live)
    training.publish()
    flip(training.store, "patches/")  # type: ignore[arg-type]
    flip(training.store, "model.safetensors")  # type: ignore[arg-type]
    with pytest.raises(NoWay):
        sub.update()
    assert (sub.state, sub.version, bits_of(live)) == (State.IDLE, 0, before)


def test_live_weights_changed_by_someone_else_are_found_and_healed(training: Training) -> None:
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    live["mlp"][5] = 42.0
    training.publish()
    done = sub.update()
    assert done is not None
    assert done.was_whole
    assert sub.n_heals == 1
    assert bits_of(live) == bits_of(training.state)


def test_damaged_target_is_dirty_until_there_is_a_way_to_heal_it() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live = zeros_like(training.state)
    sub = training.subscriber(live)
    sub.update()
    live["mlp"][5] = 42.0
    training.publish()
    flip(training.store, "model.safetensors")  # type: ignore[arg-type]
    sub._cache.keep_only([])
    with pytest.raises(NoWay):
        sub.update()
    assert sub.state is State.DIRTY
    flip(training.store, "model.safetensors")  # type: ignore[arg-type]
    sub.update()
    assert (sub.state, sub.n_heals) == (State.IDLE, 1)
    assert bits_of(live) == bits_of(training.state)


def test_silent_damage_in_a_tensor_nobody_updates_is_found_within_the_stated_versions() -> None:
    training = Training()
    live = zeros_like(training.state)
    sub = training.subscriber(live, scrub_versions=4)
    sub.update()
    live["norm"][3] = 7.0
    for _ in range(4):
        training.publish()
        sub.update()
    assert sub.n_heals == 1
    assert bits_of(live) == bits_of(training.state)


class Interrupted(MemoryTarget):
    """Dies half way through an activation, once."""

    def __init__(self, state: Weights) -> None:
        super().__init__(state)
        self.is_armed = False
        self._weights = state

    def activate(self, ready: Ready) -> None:
        if self.is_armed:
            self.is_armed = False
            self._weights["mlp"][:] = 0
            raise RuntimeError("interrupted")
        super().activate(ready)


def test_interrupted_activation_is_dirty_and_activating_again_does_not_help_itself_to_less(
    training: Training,
) -> None:
    live = zeros_like(training.state)
    target = Interrupted(live)
    sub = training.subscriber(target)
    sub.update()
    training.publish()
    sub.stage()
    target.is_armed = True
    with pytest.raises(RuntimeError):
        sub.activate()
    assert sub.state is State.DIRTY
    with pytest.raises(Dirty):
        require_sound(sub)
    sub.update()
    require_sound(sub)
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


class Forgetful(MemoryTarget):
    """Says it wrote, and did not; as often as told."""

    def __init__(self, state: Weights) -> None:
        super().__init__(state)
        self.n_lies = 0

    def activate(self, ready: Ready) -> None:
        if self.n_lies:
            self.n_lies -= 1
            return
        super().activate(ready)


def test_version_is_not_held_until_live_memory_proves_it(training: Training) -> None:
    live = zeros_like(training.state)
    target = Forgetful(live)
    sub = training.subscriber(target, worker="engine")
    sub.update()
    training.publish()
    target.n_lies = 1
    sub.stage()
    sub.activate()
    assert sub.state is State.DIRTY
    [receipt] = read_receipts(training.store)  # type: ignore[arg-type]
    assert receipt.version == 0
    done = sub.update()
    assert done is not None
    assert done.was_whole
    [receipt] = read_receipts(training.store)  # type: ignore[arg-type]
    assert receipt.version == 1
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


def test_damaged_cache_is_noticed_and_fetched_again(training: Training, tmp_path: Path) -> None:
    with training.subscriber(zeros_like(training.state), cache=tmp_path) as sub:
        sub.update()
        training.publish(2)
        sub.update()
    for file in tmp_path.rglob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1
        file.write_bytes(raw)
    live = zeros_like(training.state)
    with training.subscriber(live, cache=tmp_path) as sub:
        sub.update()
    assert bits_of(live) == bits_of(training.state)


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


def test_folder_too_damaged_to_open_is_written_anew(training: Training, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with training.subscriber(out) as sub:
        sub.update()
    (out / "model.safetensors").write_bytes(b"\xff" * 64)
    with training.subscriber(out) as sub:
        done = sub.update()
        assert done is not None
        assert done.was_whole
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


def test_store_that_went_back_in_time_is_noticed_across_restarts(
    training: Training, tmp_path: Path
) -> None:
    copy = MemoryStore()
    for info in training.store.list(""):  # type: ignore[attr-defined]
        copy.put(info.key, training.store.read(info.key))  # type: ignore[attr-defined]
    training.publish(2)
    with training.subscriber(zeros_like(training.state), cache=tmp_path) as sub:
        sub.update()
    live = zeros_like(training.state)
    with training.subscriber(live, copy, cache=tmp_path) as sub, pytest.raises(RolledBack):
        sub.update()
    assert bits_of(live) == bits_of(zeros_like(training.state))


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


def test_rotten_commit_record_is_gone_around_and_a_new_publisher_starts_afresh() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live, other = zeros_like(training.state), zeros_like(training.state)
    sub = training.subscriber(live)
    training.publish(2)
    sub.update()
    training.publish()
    flip(training.store, "000000000003-commit")  # type: ignore[arg-type]
    assert sub.update() is None
    again = Publisher(training.store, training.state, background=inline)  # type: ignore[arg-type]
    train(training.state, 50)
    done = again.publish().result()
    assert (done.version, done.n_changed) == (4, done.n_elements)
    for subscriber, weights_held in ((sub, live), (training.subscriber(other), other)):
        subscriber.update()
        assert bits_of(weights_held) == bits_of(training.state)
    train(training.state, 51)
    with pytest.raises(FencedWriter):
        training.pub.publish().result()


def test_rotten_record_in_the_middle_is_gone_around_by_an_anchor() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=3))
    training.publish(5)
    flip(training.store, "000000000002-commit")  # type: ignore[arg-type]
    live = zeros_like(training.state)
    training.subscriber(live).update()
    assert bits_of(live) == bits_of(training.state)
    again = Publisher(training.store, training.state, background=inline)  # type: ignore[arg-type]
    assert again.version == 6


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


def test_tensor_the_run_dropped_goes_whichever_way_the_version_came() -> None:
    training = Training(skips=(), anchors=ww.AnchorPolicy(every=100))
    live = {**zeros_like(training.state), "mine": np.ones(2)}
    sub = training.subscriber(live)
    sub.update()
    del training.state["norm"]
    training.publish()
    again = Publisher(training.store, training.state, background=inline)  # type: ignore[arg-type]
    again._head = replace(again._head, needs_anchor=True)
    again.publish().result()
    live["mlp"][0] = 9  # damage: only the anchor is left
    done = sub.update()
    assert done is not None
    assert done.was_whole
    assert bits_of({n: t for n, t in live.items() if n != "mine"}) == bits_of(training.state)
    assert "mine" in live
