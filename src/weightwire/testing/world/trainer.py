"""The actor that trains and publishes, dies, comes back, and is fenced by its own successors."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

from weightwire.diff.held import HeldOnHost
from weightwire.errors import FencedWriter, RetryError, WeightwireError
from weightwire.patching import digest
from weightwire.publisher import Publisher
from weightwire.store.extras import AnchorPolicy
from weightwire.testing.world.handles import ActorStore, Killed, Life, SimClock
from weightwire.testing.world.promises import check_fenced, check_published, require
from weightwire.testing.world.stage import RETRY, Stage
from weightwire.testing.world.tensors import Model, draw_model, flip_bit, freeze, thaw, train
from weightwire.testing.world.troubles import Trouble
from weightwire.testing.world.vandal import damage_file
from weightwire.workers import InlineExecutor


def inline(n_threads: int, name: str) -> Executor:
    """All work in the actor's own thread."""
    del n_threads, name
    return InlineExecutor()


class Trainer:
    """One trainer job: a sequence of processes, each with a publisher of its own."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self.name = f"trainer-{number}"
        self._starts_at = 0.0 if number == 0 else stage.chance.uniform(5.0, 200.0)
        has_file = stage.chance.random() < 0.2
        self._baseline: Path | None = stage.folder / f"{self.name}-baseline" if has_file else None
        self._pause_s = stage.chance.uniform(1.0, 15.0)
        if stage.chances.strikes(Trouble.SLOW):
            self._pause_s *= 5
        self.model: Model = draw_model(stage.chance)
        self.publisher: Publisher | None = None
        self.life: Life | None = None

    def run(self) -> None:
        """Be started again and again until the world's time is up."""
        self._stage.scheduler.sleep(self._starts_at)
        while self._stage.is_going:
            try:
                self._live()
            except Killed:
                self._stage.chances.tell(f"{self.name} is dead")
                self.publisher = None
                self._damage_baseline()
            self._stage.scheduler.sleep(self._stage.chance.uniform(1.0, 80.0))

    def _live(self) -> None:
        life, store, clock = self._stage.begin_life(self.name)
        self.life, self.publisher = life, None
        self._restart_model()
        publisher = self._open(store, clock)
        while publisher is not None and self._stage.is_going and not publisher.is_fenced:
            life.sleep(self._stage.chance.uniform(0.0, 2 * self._pause_s))
            if self._stage.truth.newest >= self._stage.settings.n_versions:
                break
            train(self.model, self._stage.chances)
            if publisher.version >= 0 and self._stage.chances.strikes(Trouble.BASELINE_BIT_FLIP):
                flip_bit(_arrays_of(publisher), self._stage.chance)
            n_before = life.n_operations
            publish(self._stage, publisher, self.model, self.name)
            self._stage.check_operations(life, n_before)

    def _open(self, store: ActorStore, clock: SimClock) -> Publisher | None:
        stage = self._stage
        if stage.truth.epoch and self.publisher is None:
            stage.chances.tell(f"{self.name} takes over")
        try:
            self.publisher = Publisher(
                store,
                self.model,
                key=stage.key,
                baseline=self._baseline,
                anchors=AnchorPolicy(every=stage.settings.anchor_every, chain_share=4.0),
                skips=stage.settings.skips,
                skip_empty=stage.chance.random() < 0.2,
                n_threads=1,
                retry=RETRY,
                clock=clock,
                background=inline,
            )
        except WeightwireError as error:
            stage.check_error(self.name, error)
            return None
        return self.publisher

    def _restart_model(self) -> None:
        """Go on where this job was, or from the newest checkpoint, as trainers do."""
        truth = self._stage.truth
        if truth.newest >= 0 and self._stage.chance.random() < 0.7:
            self.model = thaw(truth.versions[truth.newest].bits)

    def _damage_baseline(self) -> None:
        if self._baseline is None or not self._baseline.exists():
            return
        if self._stage.chances.strikes(Trouble.BASELINE_FILE_DAMAGED):
            damage_file(self._baseline, self._stage.chance)


def _arrays_of(publisher: Publisher) -> Model:
    held = publisher._baseline._held.items()
    return {name: each.array for name, each in held if isinstance(each, HeldOnHost)}


def publish(stage: Stage, publisher: Publisher, model: Model, who: str) -> bool:
    """Publish once, and hold the answer against the truth; whether a version came of it."""
    wanted, epoch, before = freeze(model), publisher.epoch, publisher.version
    stage.truth.captured[digest(model)] = wanted
    try:
        published = publisher.publish().result()
    except FencedWriter as error:
        stage.chances.tell(f"{who}: {error}")
        require(publisher.is_fenced, "fenced stays fenced", who)
        if not stage.is_log_damaged:  # a fresh start may lose its place to who can go on
            check_fenced(stage.truth, who, epoch, before)
        return False
    except Exception as error:  # every kind is looked at
        stage.check_error(who, error)
        require(not publisher.is_fenced, "fenced stays fenced", who, "raised", repr(error))
        is_retry = isinstance(error, RetryError)
        require(not is_retry or publisher.version >= before, "versions go forward", who, before)
        return False
    if published.version >= 0:
        stage.chances.tell(f"{who} published {published.version}")
        check_published(stage.truth, published.version, wanted)
    return True
