"""The end of a world: everything is healed, and everyone must find to the newest version alone."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.errors import FencedWriter, WeightwireError
from weightwire.publisher import Publisher
from weightwire.store.extras import AnchorPolicy
from weightwire.store.retention import collect
from weightwire.store.run import Run, require_identity
from weightwire.subscriber import State
from weightwire.testing.world.collector import check_reachable
from weightwire.testing.world.engine import Engine
from weightwire.testing.world.handles import SimClock
from weightwire.testing.world.promises import Violation, require
from weightwire.testing.world.stage import RETRY, Stage
from weightwire.testing.world.tensors import Model, bits_of, draw_model, thaw, train
from weightwire.testing.world.trainer import Trainer, inline, publish
from weightwire.testing.world.vandal import Vandal

MAX_UPDATES = 4
"""So many updates may a receiver need to recover in a healed world, and as many to find damage."""


def finish(
    stage: Stage, trainers: Sequence[Trainer], engines: Sequence[Engine], vandal: Vandal
) -> None:
    """Heal, publish, and see that every actor recovers without hands."""
    stage.chances.tell("everything is healed")
    stage.chances.is_calm = True
    stage.store.heal()
    vandal.clear_forged()
    for engine in engines:
        engine.check()
    last = _take_over(stage)
    if stage.is_log_damaged or last[0].version < 0:
        _publish(stage, *last)  # nothing to continue: the first version is the claim
    for trainer in trainers:
        _check_fenced(trainer)
    for _ in range(3):
        _publish(stage, *last)
    for engine in (*engines, Engine(stage, len(engines))):
        _check_recovers(stage, engine)
    _collect(stage)
    check_reachable(stage)
    _publish(stage, *last)
    newcomer = Engine(stage, len(engines) + 1)
    _check_recovers(stage, newcomer)
    newcomer.close()


def _take_over(stage: Stage) -> tuple[Publisher, Model]:
    clock = SimClock(stage.scheduler, stage.chances)
    truth = stage.truth
    model = thaw(truth.versions[truth.newest].bits) if truth.versions else draw_model(stage.chance)
    try:
        publisher = Publisher(
            stage.witness,
            model,
            key=stage.key,
            anchors=AnchorPolicy(every=1),
            n_threads=1,
            retry=RETRY,
            clock=clock,
            background=inline,
        )
    except WeightwireError as error:
        raise Violation(f"recovers alone: no publisher can take over: {error!r}") from error
    stage.chances.tell(f"the last trainer has version {publisher.version}")
    return publisher, model


def _publish(stage: Stage, publisher: Publisher, model: Model) -> None:
    train(model, stage.chances)
    require(publish(stage, publisher, model, "last"), "recovers alone", "publishing still fails")


def _check_fenced(trainer: Trainer) -> None:
    """Fenced stays fenced, even after a collection."""
    publisher = trainer.publisher
    if publisher is None or trainer.life is None or trainer.life.is_dead:
        return
    for _ in range(2):
        bits_of(trainer.model["scale"])[0] += 12345  # with skip_empty, only a change is sent
        try:
            publisher.publish().result()
        except FencedWriter:
            continue
        except WeightwireError as error:
            raise Violation(f"fenced stays fenced: raised {error!r}") from error
        raise Violation("one writer: a publisher went on after another took over")


def _check_recovers(stage: Stage, engine: Engine) -> None:
    if engine.subscriber is None:
        engine.start()
    subscriber = engine.subscriber
    if subscriber is None:
        raise Violation(f"recovers alone: {engine.name} cannot be started")
    n_most = MAX_UPDATES + 2 * stage.settings.scrub_versions
    for _ in range(n_most):
        engine.update()
        if subscriber.version == stage.truth.newest and engine.is_right:
            break
    wanted = stage.truth.newest
    require(subscriber.version == wanted, "recovers alone", engine.name, subscriber.version, wanted)
    require(subscriber.state is State.IDLE, "recovers alone", engine.name, subscriber.state)
    require(engine.is_right, "recovers alone", engine.name, "is damaged")


def _collect(stage: Stage) -> None:
    clock = SimClock(stage.scheduler, stage.chances)
    run = Run(stage.witness, require_identity(stage.witness))
    try:
        collect(run, stage.settings.retention, clock)
    except WeightwireError as error:
        raise Violation(f"recovers alone: nothing can be collected: {error!r}") from error
