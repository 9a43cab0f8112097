"""The field's bugs on the receiving side, each made to happen to our own components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from field_worlds import (
    Engine,
    Meddled,
    Sabotaged,
    Tensors,
    Trainer,
    bits_in,
    bits_of,
)

import weightwire as ww
from weightwire.errors import Dirty, StopError, TargetMismatch
from weightwire.store import layout
from weightwire.store.history import HistoryReader
from weightwire.store.memory import MemoryStore
from weightwire.store.receipts import is_proven, read_receipts
from weightwire.store.run import Run, require_identity
from weightwire.subscriber import State, require_sound

Write = Callable[[], None]


def sabotaged(store: Any, trainer: Trainer, **options: Any) -> tuple[Engine, Sabotaged]:
    """An engine at the newest version whose next activations a test can spoil."""
    made: list[Sabotaged] = []

    def target(live: Tensors) -> Sabotaged:
        made.append(Sabotaged(live))
        return made[0]

    engine = Engine(store, trainer.state, target=target, **options)
    engine.update()
    assert engine.holds(trainer.state)
    return engine, made[0]


def once(trouble: Callable[[Tensors, Write], None]) -> Callable[[Tensors, Write], None]:
    """Trouble the first time, and a sound write after it."""
    left = [trouble]

    def act(tensors: Tensors, write: Write) -> None:
        if left:
            left.pop()(tensors, write)
        else:
            write()

    return act


def corrupt_a_written_element(tensors: Tensors, write: Write) -> None:
    before = bits_in(tensors["layer"]).copy()
    write()
    bits = bits_in(tensors["layer"])
    bits[np.flatnonzero(bits != before)[0]] ^= 1 << 9


def write_half(tensors: Tensors, write: Write) -> None:
    kept = tensors["layer"].copy()
    write()
    tensors["layer"][1000:] = kept[1000:]
    raise RuntimeError("aborted")


def write_nothing(tensors: Tensors, write: Write) -> None:
    """Reports success."""


def test_slime_2209_an_apply_that_corrupts_is_found_by_reading_live_memory() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine, target = sabotaged(store, trainer)
    trainer.step()
    target.instead = corrupt_a_written_element
    engine.subscriber.stage()
    engine.subscriber.activate()
    with pytest.raises(TargetMismatch):
        engine.subscriber.wait()
    with pytest.raises(Dirty):
        require_sound(engine.subscriber)
    target.instead = lambda _, write: write()
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def test_slime_2209_an_update_repairs_what_its_own_apply_corrupted() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine, target = sabotaged(store, trainer)
    trainer.step()
    target.instead = once(corrupt_a_written_element)
    updated = engine.update()
    assert updated is not None
    assert updated.was_whole
    assert engine.subscriber.n_heals == 1
    assert engine.holds(trainer.state)
    engine.close()


def test_slime_2209_an_apply_that_corrupts_its_neighbours_is_found_by_the_scrub() -> None:
    """What was written reads back, what was not written did not stay: seen within the promised rounds."""
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine, target = sabotaged(store, trainer, scrub_versions=3)

    def spill_over(tensors: Tensors, write: Write) -> None:
        write()
        bits_in(tensors["norm"])[17] ^= 1

    bits_in(trainer.state["layer"])[5] ^= 1
    trainer.publish()
    target.instead = once(spill_over)
    engine.update()
    for number in range(4):
        bits_in(trainer.state["layer"])[number] ^= 1
        trainer.publish()
        engine.update()
    assert engine.subscriber.n_heals == 1
    assert engine.holds(trainer.state)
    engine.close()


def test_tokenspeed_1373_trl_5937_success_that_moved_nothing_is_not_a_version() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine, target = sabotaged(store, trainer)
    trainer.step()
    target.instead = write_nothing
    with pytest.raises(TargetMismatch):
        engine.update()
    assert engine.subscriber.version == 0
    with pytest.raises(Dirty):
        require_sound(engine.subscriber)
    history = HistoryReader(Run(store, require_identity(store))).refresh(-1)
    assert [(r.version, is_proven(r, history)) for r in read_receipts(store)] == [(0, True)]
    engine.close()


def test_skyrl_1902_an_activation_that_is_repeated_does_not_undo_itself() -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine, target = sabotaged(store, trainer)

    def write_and_die(tensors: Tensors, write: Write) -> None:
        write()
        write()
        raise RuntimeError("died after writing, before anyone was told")

    trainer.step()
    target.instead = once(write_and_die)
    engine.subscriber.stage()
    with pytest.raises(RuntimeError):
        engine.subscriber.activate()
    engine.subscriber.activate()
    engine.subscriber.wait()
    assert engine.holds(trainer.state)
    engine.close()


@pytest.mark.parametrize("way", ["activate again", "update", "after one more version"])
def test_tensorrt_llm_16642_nemo_rl_2444_an_aborted_update_is_dirty_and_repairs_itself(
    way: str,
) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    engine, target = sabotaged(store, trainer)
    trainer.step()
    target.instead = once(write_half)
    engine.subscriber.stage()
    with pytest.raises(RuntimeError):
        engine.subscriber.activate()
    with pytest.raises(Dirty):
        require_sound(engine.subscriber)
    if way == "after one more version":
        trainer.step()
    if way == "activate again":
        engine.subscriber.activate()
        engine.subscriber.wait()
    else:
        engine.update()
    assert engine.holds(trainer.state)
    engine.close()


def empty(engine: Engine, target: Sabotaged, trainer: Trainer) -> None:
    """Nothing was ever loaded."""


def idle(engine: Engine, target: Sabotaged, trainer: Trainer) -> None:
    engine.update()


def staged(engine: Engine, target: Sabotaged, trainer: Trainer) -> None:
    engine.subscriber.stage()


def dirty(engine: Engine, target: Sabotaged, trainer: Trainer) -> None:
    engine.update()
    trainer.step()
    engine.subscriber.stage()
    target.instead = once(write_half)
    with pytest.raises(RuntimeError):
        engine.subscriber.activate()


def dirty_and_staged(engine: Engine, target: Sabotaged, trainer: Trainer) -> None:
    dirty(engine, target, trainer)
    engine.subscriber.stage()


def checked(engine: Engine, target: Sabotaged, trainer: Trainer) -> None:
    engine.subscriber.stage()
    engine.subscriber.activate()


ROADS: dict[Callable[..., None], State] = {
    empty: State.EMPTY,
    idle: State.IDLE,
    staged: State.EMPTY,
    dirty: State.DIRTY,
    dirty_and_staged: State.DIRTY,
    checked: State.IDLE,
}


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_vllm_39212_every_state_can_be_aborted_and_updated_afterwards(
    road: Callable[..., None],
) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    made: list[Sabotaged] = []
    engine = Engine(
        store, trainer.state, target=lambda live: made.append(Sabotaged(live)) or made[0]
    )
    road(engine, made[0], trainer)
    engine.subscriber.abort()
    assert engine.subscriber.state is ROADS[road]
    with pytest.raises(StopError):
        engine.subscriber.activate()
    trainer.step()
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()
    engine.subscriber.abort()
    assert engine.subscriber.state is State.CLOSED


def test_vllm_39212_a_failed_staging_leaves_the_engine_where_it_was() -> None:
    store = Meddled()
    trainer = Trainer(store)
    trainer.publish()
    engine = Engine(store, trainer.state)
    engine.update()
    before = bits_of(engine.live)
    trainer.step()
    store.is_down = lambda verb, key: verb == "read" and key.startswith(layout.PATCHES)
    for _ in range(3):
        with pytest.raises(ww.errors.StoreUnavailable):
            engine.update()
        assert engine.subscriber.state is State.IDLE
        assert bits_of(engine.live) == before
        require_sound(engine.subscriber)
    store.is_down = lambda *_: False
    engine.update()
    assert engine.holds(trainer.state)
    engine.close()
