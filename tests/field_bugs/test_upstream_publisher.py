"""The field's bugs on the sending side, each made to happen to our own components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_worlds import Engine, Meddled, Trainer, bits_in, bits_of, first_state

import weightwire as ww
from weightwire.clock import SystemClock
from weightwire.digest import digest_state
from weightwire.errors import FencedWriter, RetryError, RolledBack
from weightwire.store import layout
from weightwire.store.history import HistoryReader
from weightwire.store.memory import MemoryStore
from weightwire.store.retention import Retention, collect
from weightwire.store.run import Run, require_identity


def copy_of(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


@pytest.mark.parametrize("verb", ["put", "create"])
def test_slime_2104_baseline_does_not_advance_before_commit(verb: str) -> None:
    """Uploads or commits fail for a while, training goes on: no step's change may be lost."""
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    committed = ww.digest(trainer.state)
    store.is_down = lambda what, key: what == verb and "receipts" not in key
    for _ in range(3):
        trainer.train()
        with pytest.raises(RetryError):
            trainer.publish()
        assert digest_state(trainer.publisher._baseline)[0] == committed
        assert engine.update() is None
    store.is_down = lambda *_: False
    trainer.step()
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def test_slime_2104_a_commit_whose_answer_was_lost_is_settled_and_not_sent_twice() -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    create = store.inner.create

    def lose_answer(key: str, data: bytes) -> bool:
        create(key, data)
        raise ww.errors.StoreUnavailable("no answer (injected)")

    store.inner.create = lose_answer  # type: ignore[method-assign]
    trainer.train()
    first = bits_of(trainer.state)
    with pytest.raises(ww.errors.CommitUnknown):
        trainer.publish()
    store.inner.create = create  # type: ignore[method-assign]
    engine = Engine(store, trainer.state)
    engine.update()
    assert bits_of(engine.live) == first
    published = trainer.step()
    assert published.version == 2
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def test_skyrl_1902_resumed_trainer_does_not_build_on_the_wrong_base(tmp_path: Path) -> None:
    """Its own copy is of a version whose chain was pruned meanwhile; another trainer went on."""
    store = MemoryStore()
    old = Trainer(store, baseline=tmp_path / "baseline")
    old.step(3)
    other = Trainer(store, anchors=ww.AnchorPolicy(every=2))
    other.step(6)
    run = Run(store, require_identity(store))
    collected = collect(run, Retention(keep_versions=1, keep_anchors=1), SystemClock())
    assert 2 in collected.versions, "the chain must be pruned, or this tests nothing"
    resumed = Trainer(store, baseline=tmp_path / "baseline")
    committed = HistoryReader(run).refresh(-1).newest
    assert committed is not None
    assert digest_state(resumed.publisher._baseline)[0] == committed.digest
    resumed.step()
    engine = Engine(store, resumed.state)
    engine.update()
    assert engine.holds(resumed.state)
    engine.close()


def test_marin_1829_a_restarted_trainer_never_makes_versions_go_back() -> None:
    """It starts again from its first weights; they come as a new version, and its twin is fenced."""
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.step(4)
    engine = Engine(store, trainer.state)
    engine.update()
    seen = [engine.subscriber.version]
    restarted = Trainer(store)
    for _ in range(3):
        restarted.publish()
        engine.update()
        seen.append(engine.subscriber.version)
        assert engine.holds(restarted.state)
        restarted.train()
    assert seen == sorted(set(seen))
    assert restarted.publisher.epoch > trainer.publisher.epoch
    with pytest.raises(FencedWriter):
        trainer.step()
    engine.close()


def test_marin_1829_an_old_copy_of_the_store_is_not_followed(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.step(2)
    backup = copy_of(store)
    trainer.step(3)
    engine = Engine(store, trainer.state, cache=tmp_path / "cache")
    engine.update()
    store.delete([info.key for info in store.list("")])
    for key, data in backup.items():
        store.put(key, data)
    with pytest.raises(RolledBack):
        engine.update()
    assert engine.holds(trainer.state)
    engine.close()
    restarted = Engine(store, trainer.state, cache=tmp_path / "cache")
    with pytest.raises(RolledBack):
        restarted.update()
    restarted.close()


def tied_state() -> dict[str, Any]:
    state = first_state()
    state["head"] = state["embed"]
    return state


def test_miles_1235_a_tied_tensor_is_published_once() -> None:
    store = MemoryStore()
    trainer = Trainer(store, tied_state())
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    bits_in(trainer.state["embed"])[:10] ^= 5
    published = trainer.publish()
    assert published.n_changed == 10
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def swap(tensor: Any) -> None:
    bits = bits_in(tensor)
    other = next(at for at in range(1, bits.size) if bits[at] != bits[0])
    bits[[0, other]] = bits[[other, 0]]


def test_verl_slime_1806_prime_rl_swapped_values_are_a_change() -> None:
    """The same values in another order: a sum or a sorted checksum cannot see it."""
    store = MemoryStore()
    trainer = Trainer(store)
    before = trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    swap(trainer.state["layer"])
    after = trainer.publish()
    assert after.digest != before.digest
    assert after.n_changed == 2
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def test_verl_slime_1806_prime_rl_swapped_live_values_are_found_and_repaired() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state, scrub_versions=1)
    engine.update()
    swap(engine.live["layer"])
    trainer.step()
    engine.update()
    assert engine.subscriber.n_heals == 1
    assert engine.holds(trainer.state)
    engine.close()


def test_vllm_57130_strided_weights_are_published_and_received_exactly() -> None:
    """Transposed, every-other and reversed views, on both sides."""
    rng = np.random.default_rng(8)

    def strided() -> dict[str, Any]:
        return {
            "transposed": rng.standard_normal((30, 40)).astype(np.float32).T,
            "every other": rng.standard_normal(2000).astype(np.float16)[::2],
            "reversed": rng.standard_normal((20, 30)).astype(np.float32)[::-1, ::-1],
        }

    store, state, live = MemoryStore(), strided(), strided()
    assert not any(tensor.flags.c_contiguous for tensor in (*state.values(), *live.values()))
    trainer = Trainer(store, state)
    trainer.publish()
    engine = Engine(store, state, target=lambda _: live)
    engine.update()
    assert bits_of(live) == bits_of(state)
    state["transposed"][3:5, 1] += 1
    state["every other"][7:90:3] *= -1
    state["reversed"][2, 4:9] = np.nan
    trainer.publish()
    engine.update()
    assert bits_of(live) == bits_of(state)
    engine.close()


def test_shardcast_nothing_is_announced_before_all_of_it_is_there() -> None:
    """At the moment a record or an offer appears, everything it names can be read."""
    store = Meddled()
    trainer = Trainer(store, anchors=ww.AnchorPolicy(every=2), skips=(2,))
    announced = []

    def look(verb: str, key: str) -> bool:
        if verb in ("put", "create") and key.startswith(layout.LOG):
            announced.append(key)
            put_id = key.removesuffix(".json")[-32:]
            names = [info.key for info in store.inner.list("")]
            manifest = layout.ANCHOR_MANIFEST if "anchor" in key else "patch.json"
            is_offer = "commit" not in key
            assert not is_offer or any(put_id in n and n.endswith(manifest) for n in names), key
        return False

    store.is_down = look
    for _ in range(5):
        trainer.step()
        engine = Engine(store, trainer.state, receipts=False)
        engine.update()
        assert engine.holds(trainer.state)
        engine.close()
    assert any("anchor" in key for key in announced)
    assert any("skip" in key for key in announced)


def test_shardcast_a_version_is_not_seen_while_its_buckets_are_on_their_way() -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state, receipts=False)
    engine.update()
    seen = []

    def look(verb: str, key: str) -> bool:
        if verb == "put" and key.startswith(layout.PATCHES):
            seen.append(engine.subscriber.poll())
        return False

    store.is_down = look
    trainer.step()
    assert seen
    assert set(seen) == {0}
    assert engine.subscriber.poll() == 1
    engine.close()
