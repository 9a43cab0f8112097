"""One world, from its seed to its report."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weightwire.store.memory import MemoryStore
from weightwire.testing.faults import FaultKind
from weightwire.testing.faulty_store import FaultyStore
from weightwire.testing.world.collector import Collector
from weightwire.testing.world.engine import Engine
from weightwire.testing.world.finale import finish
from weightwire.testing.world.handles import Chances, SimClock
from weightwire.testing.world.promises import Truth, Violation
from weightwire.testing.world.scheduler import Scheduler, TooLong
from weightwire.testing.world.stage import Stage
from weightwire.testing.world.trainer import Trainer
from weightwire.testing.world.troubles import Trouble, draw_settings
from weightwire.testing.world.vandal import Vandal
from weightwire.testing.world.witness import Witness
from weightwire.trust.keys import SigningKey

MAX_STEPS = 100_000
"""More than any world needs: one that goes on has a loop without end."""


@dataclass(frozen=True)
class WorldReport:
    """What happened in one world."""

    seed: int
    n_steps: int
    n_versions: int
    n_seconds: float
    """Simulated."""
    faults: Mapping[Trouble | FaultKind, int]
    events: tuple[str, ...]


def run_world(seed: int) -> WorldReport:
    """Build a world, let it run, heal it, and see that everything is as promised.

    Raises:
        Violation: a promise was broken; the message holds the seed and the last events.
    """
    with tempfile.TemporaryDirectory(prefix="weightwire-world-", dir=_fast_disk()) as folder:
        stage = _build(seed, Path(folder))
        try:
            _play(stage)
        except (Violation, TooLong) as error:
            story = "\n".join(stage.chances.events[-40:])
            raise Violation(f"seed {seed}: {error}\n{story}") from error
    return _report(stage)


def _build(seed: int, folder: Path) -> Stage:
    chance = random.Random(seed)
    settings = draw_settings(seed, chance)
    scheduler = Scheduler(chance, settings.switching, MAX_STEPS)
    chances = Chances(chance, settings, scheduler)
    clock = SimClock(scheduler, chances)
    truth = Truth()
    witness = Witness(MemoryStore(clock), truth, chances)
    store = FaultyStore(witness, random.Random(seed), settings.store_faults, clock)
    key = _signing_key() if settings.is_signed else None
    return Stage(settings, chance, scheduler, chances, truth, witness, store, folder, key)


def _play(stage: Stage) -> None:
    settings = stage.settings
    trainers = [Trainer(stage, number) for number in range(settings.n_publishers)]
    engines = [Engine(stage, number) for number in range(settings.n_engines)]
    collectors = [Collector(stage, number) for number in range(settings.n_collectors)]
    vandal = Vandal(stage)
    actors: list[Trainer | Engine | Collector | Vandal]
    actors = [*trainers, *engines, *collectors, vandal]
    for actor in actors:
        stage.scheduler.add(actor.name, actor.run)
    for trouble, n_actors in (
        (Trouble.TWO_PUBLISHERS, settings.n_publishers),
        (Trouble.TWO_COLLECTORS, settings.n_collectors),
    ):
        if n_actors > 1:
            stage.chances.count(trouble)
    try:
        stage.scheduler.run()
        finish(stage, trainers, engines, vandal)
    finally:
        for engine in engines:
            engine.close()


def _report(stage: Stage) -> WorldReport:
    faults: Counter[Trouble | FaultKind] = Counter()
    faults.update(stage.chances.injected)
    faults.update(stage.store.injected)
    return WorldReport(
        stage.settings.seed,
        stage.scheduler.n_steps,
        stage.truth.newest + 1,
        stage.scheduler.time,
        faults,
        tuple(stage.chances.events),
    )


@cache
def _signing_key() -> SigningKey:
    """One for all worlds: no check depends on which it is."""
    return SigningKey.generate()


def _fast_disk() -> str | None:
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() else None
