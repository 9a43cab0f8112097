"""The field's bugs of engines that are not ready, tied weights, and data that is bad on its way."""

from __future__ import annotations

import numpy as np
import pytest
from field_worlds import Engine, Meddled, Tensors, Trainer, bits_of, first_state, zeros

from weightwire.codec.writer import PatchWriter
from weightwire.errors import NoWay, UnsupportedLayout
from weightwire.store import layout
from weightwire.store.memory import MemoryStore
from weightwire.subscriber import State


class Module:
    """An engine's module: a fixed set of tensors, some of which may be asleep."""

    def __init__(self, state: Tensors) -> None:
        self.tensors = zeros(state)

    def state_dict(self, keep_vars: bool = False) -> Tensors:
        del keep_vars
        return self.tensors


@pytest.mark.parametrize("joined", [True, False], ids=["patch", "anchor"])
@pytest.mark.parametrize("trouble", ["asleep", "read-only"])
def test_vllm_57854_an_engine_that_is_not_ready_is_refused_before_the_first_write(
    joined: bool, trouble: str
) -> None:
    """The last tensor cannot take its bits: no other tensor may have changed by then."""
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    module = Module(trainer.state)
    engine = Engine(store, trainer.state, target=lambda _: module, scrub_versions=1_000_000)
    if joined:
        engine.update()
        trainer.step()
    awake = module.tensors["norm"]
    if trouble == "asleep":
        module.tensors["norm"] = np.empty(0, np.float32)
    else:
        awake.flags.writeable = False
    before = bits_of(module.tensors)
    with pytest.raises(UnsupportedLayout):
        engine.update()
    assert bits_of(module.tensors) == before
    awake.flags.writeable = True
    module.tensors["norm"] = awake
    engine.update()
    assert bits_of(module.tensors) == bits_of(trainer.state)
    engine.close()


@pytest.mark.parametrize("kind", ["tied", "copies"])
def test_vllm_48312_tied_parameters_do_not_drift_apart(kind: str) -> None:
    store, state = MemoryStore(), first_state()
    state["head"] = state["embed"]
    trainer = Trainer(store, state)
    trainer.publish()
    live = zeros(state)
    if kind == "tied":
        live["head"] = live["embed"]
    engine = Engine(store, state, target=lambda _: live)
    engine.update()
    for _ in range(4):
        trainer.step()
        engine.update()
        assert bits_of(live) == bits_of(state)
        assert (live["head"] is live["embed"]) == (kind == "tied")
    engine.close()


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PatchWriter.__init__, "__defaults__", (20, *PatchWriter.__init__.__defaults__[1:])
    )


@pytest.mark.usefixtures("_small_buckets")
def test_shardcast_one_bad_bucket_costs_only_itself() -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    trainer.step()
    bad = [key for key in keys(store) if key.startswith(layout.PATCHES) and "bucket" in key]
    assert len(bad) > 2
    left = [bad[1]]
    store.spoil = lambda key, data: flipped(data) if key in left and not left.clear() else data
    store.reads.clear()
    updated = engine.update()
    assert engine.holds(trainer.state)
    assert {key: store.reads.count(key) for key in bad} == {k: 1 + (k == bad[1]) for k in bad}
    assert updated is not None
    assert updated.n_detours == 0
    engine.close()


def test_shardcast_a_bucket_that_stays_bad_is_asked_for_a_few_times_and_then_avoided() -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    before = bits_of(engine.live)
    trainer.step()
    bad = next(key for key in keys(store) if "bucket" in key)
    store.spoil = lambda key, data: flipped(data) if key == bad else data
    store.reads.clear()
    with pytest.raises(NoWay):
        engine.update()
    assert 1 <= store.reads.count(bad) <= 3
    assert bits_of(engine.live) == before
    assert engine.subscriber.state is State.IDLE
    assert Trainer(store, trainer.state).publisher.epoch == 2  # which needs the version too
    store.spoil = lambda _, data: data
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def keys(store: Meddled) -> list[str]:
    return [info.key for info in store.inner.list("")]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])
