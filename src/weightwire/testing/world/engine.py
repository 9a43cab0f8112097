"""The actor that serves: it follows a run, is interrupted, damaged, killed and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightwire.checkpoint import Checkpoint
from weightwire.errors import WeightwireError
from weightwire.events import Updated
from weightwire.store import layout
from weightwire.store.receipts import parse_receipt
from weightwire.subscriber import State, Subscriber
from weightwire.testing.world.fragile import FragileTarget, Interrupted, Refused
from weightwire.testing.world.handles import Killed, Life
from weightwire.testing.world.promises import check_forward, check_held, require
from weightwire.testing.world.stage import RETRY, Stage
from weightwire.testing.world.tensors import Frozen, Model, draw_model, flip_bit, frozen, scribble
from weightwire.testing.world.trainer import inline
from weightwire.testing.world.troubles import Trouble
from weightwire.testing.world.vandal import damage_file, remove_file, truncate_file

SOUND = (State.IDLE, State.STAGING, State.STAGED)
"""States in which, unless it says it is dirty, a receiver may be served from."""
_CACHE_TROUBLES = (
    (Trouble.CACHE_DAMAGED, damage_file),
    (Trouble.CACHE_TRUNCATED, truncate_file),
    (Trouble.CACHE_PARTIAL, remove_file),
)


class Engine:
    """One receiver: a sequence of processes that share a disk."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, self.number = stage, number
        self.name = f"engine-{number}"
        self._worker = self.name
        chance = stage.chance
        self._cache = stage.folder / f"{self.name}-cache" if chance.random() < 0.6 else None
        is_folder = chance.random() < 0.12
        self._target: Path | None = stage.folder / f"{self.name}-model" if is_folder else None
        self._pause_s = chance.uniform(3.0, 20.0)
        if stage.chances.strikes(Trouble.SLOW):
            self._pause_s *= 3
        self._model: Model = {}
        self.subscriber: Subscriber | None = None
        self._version = -1
        """The highest this process has held."""
        self._n_unhealed: int | None = None
        """Updates since live weights were damaged; None while they are not."""

    def run(self) -> None:
        """Be started again and again until the world's time is up."""
        self.stage.scheduler.sleep(self.stage.chance.uniform(0.0, 60.0) if self.number else 0.0)
        while self.stage.is_going:
            try:
                self._live()
            except Killed:
                self._died()
            self.stage.scheduler.sleep(self.stage.chance.uniform(0.5, 40.0))

    def _live(self) -> None:
        life = self.start()
        while self.subscriber is not None and self.stage.is_going:
            life.sleep(self.stage.chance.uniform(0.0, 2 * self._pause_s))
            n_before = life.n_operations
            self.update()
            self.stage.check_operations(life, n_before)

    def start(self) -> Life:
        """A new process; what is on disk is still there, what was in memory is not."""
        stage = self.stage
        life, store, clock = stage.begin_life(self.name)
        if stage.chances.strikes(Trouble.WORKER_RENAMED):
            self._worker = f"{self.name}-{stage.chance.randint(0, 9)}"
        self._model, self._version, self._n_unhealed = {}, -1, None
        if stage.chance.random() < 0.3:
            self._model = draw_model(stage.chance)  # whatever an engine starts with
        target: Any = self._target or FragileTarget(self._model, stage.chances)
        try:
            self.subscriber = Subscriber(
                store,
                target,
                key=stage.key.public if stage.key else None,
                worker=self._worker,
                cache=self._cache,
                scrub_versions=stage.settings.scrub_versions,
                n_threads=1,
                retry=RETRY,
                clock=clock,
                background=inline,
            )
        except WeightwireError as error:
            stage.check_error(self.name, error)
        life.between, life.wrote = self._between, self._wrote
        return life

    def update(self) -> Updated | None:
        """One update, by one call or by three, with everything checked after it."""
        subscriber = self.subscriber
        if subscriber is None:
            return None
        updated = None
        try:
            updated = self._by_steps(subscriber) or subscriber.update()
            self._count_unhealed()
        except (Interrupted, Refused):
            self.stage.chances.tell(f"{self.name} was interrupted while it was written to")
            require(subscriber.is_dirty, "never a mixture", self.name, "is not dirty")
        except Exception as error:  # every kind is looked at
            self.stage.check_error(self.name, error)
        if updated is not None:
            self.stage.chances.tell(f"{self.name} now has {updated.version}")
            require(updated.digest == subscriber.digest, "never a mixture", self.name)
        self.check()
        return updated

    def check(self) -> None:
        """Hold what is live against the truth."""
        subscriber = self.subscriber
        if subscriber is None or subscriber.is_dirty or subscriber.version < 0:
            return
        if subscriber.state not in SOUND:
            return
        check_forward(self.name, self._version, subscriber.version)
        self._version = subscriber.version
        if self._n_unhealed is None:
            self._check_bits(subscriber)
        elif self._is_right(subscriber):
            self._n_unhealed = None
        else:
            most = 2 * self.stage.settings.scrub_versions + 2
            require(self._n_unhealed <= most, "damage is found", self.name, self._n_unhealed)

    @property
    def is_right(self) -> bool:
        """Whether nothing is damaged, found or not."""
        subscriber = self.subscriber
        is_sound = subscriber is not None and not subscriber.is_dirty
        return is_sound and self._n_unhealed is None

    def close(self) -> None:
        """Let go of files; not a store operation."""
        if self.subscriber is not None:
            self.subscriber.close()
        self.subscriber = None

    def _by_steps(self, subscriber: Subscriber) -> Updated | None:
        """Sometimes an engine stages early, changes its mind, or activates much later."""
        chance = self.stage.chance
        if chance.random() < 0.7 or not subscriber.stage():
            return None
        self.check()
        if chance.random() < 0.2:
            subscriber.abort()
            self.check()
            return None
        self.stage.scheduler.sleep(chance.uniform(0.0, 30.0))
        try:
            subscriber.activate()
        except (Interrupted, Refused):
            require(subscriber.is_dirty, "never a mixture", self.name, "is not dirty")
            if chance.random() < 0.5:
                raise
            subscriber.activate()  # what was interrupted may be repeated
        return subscriber.wait()

    def _check_bits(self, subscriber: Subscriber) -> None:
        live = self._live_bits()
        aliases = self._target is None
        truth = self.stage.truth
        check_held(truth, self.name, subscriber.version, subscriber.digest, live, aliases=aliases)

    def _is_right(self, subscriber: Subscriber) -> bool:
        committed = self.stage.truth.versions[subscriber.version]
        names = [n for n in committed.bits.tensors if self._target is None]
        return not committed.bits.differences(self._live_bits(), names)

    def _live_bits(self) -> dict[str, Frozen]:
        if self._target is None:
            return {name: frozen(array) for name, array in self._model.items()}
        with Checkpoint.open(self._target) as checkpoint:
            return {
                name: Frozen(
                    _NUMPY_NAMES.get(spec.dtype.name, ""),
                    spec.shape,
                    checkpoint.read(name, 0, spec.n_elements).tobytes(),
                )
                for name, spec in checkpoint.specs.items()
            }

    def _between(self) -> None:
        """What may happen to this process in the middle of something."""
        chances, chance = self.stage.chances, self.stage.chance
        if chance.random() > 0.1:
            return
        self.check()
        if self._target is not None or not any(array.size for array in self._model.values()):
            return
        for trouble, damage in (
            (Trouble.LIVE_BIT_FLIP, flip_bit),
            (Trouble.LIVE_OVERWRITTEN, scribble),
        ):
            if chances.strikes(trouble):
                self._n_unhealed = 0
                chances.tell(f"{self.name}: {damage(self._model, chance)} is damaged")

    def _count_unhealed(self) -> None:
        if self._n_unhealed is not None:
            self._n_unhealed += 1

    def _wrote(self, key: str, data: bytes) -> None:
        """Receipts only claim what is held."""
        subscriber = self.subscriber
        if key != layout.receipt_key(self._worker) or subscriber is None:
            return
        receipt = parse_receipt(data, key, self._worker)
        claimed, held = (receipt.version, receipt.digest), (subscriber.version, subscriber.digest)
        require(claimed == held, "receipts are true", self.name, claimed, "but holds", held)
        self.check()

    def _died(self) -> None:
        self.stage.chances.tell(f"{self.name} is dead")
        self.close()
        chances, chance = self.stage.chances, self.stage.chance
        for trouble, damage in _CACHE_TROUBLES:
            if self._cache is not None and chances.strikes(trouble):
                damage(self._cache, chance)
        if self._target is not None and chances.strikes(Trouble.FOLDER_DAMAGED):
            damage_file(self._target, chance)


_NUMPY_NAMES = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
    "I32": "int32",
    "U8": "uint8",
    "I64": "int64",
}
