"""What an actor has of the world: a store handle and a clock that die with its process."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.testing.world.scheduler import Scheduler
from weightwire.testing.world.troubles import Settings, Trouble

EPOCH_S = 1_000_000_000.0
"""When worlds begin, by their own clocks."""


class Killed(BaseException):
    """The process is gone. Passes through ``except Exception``, as a real one would."""


class Chances:
    """Draws what goes wrong, counts it, and keeps the story for whoever must understand it."""

    def __init__(self, chance: random.Random, settings: Settings, scheduler: Scheduler) -> None:
        self.chance, self._odds, self._scheduler = chance, settings.odds, scheduler
        self.injected: Counter[Trouble] = Counter()
        self.events: list[str] = []
        self.is_calm = False

    def strikes(self, trouble: Trouble) -> bool:
        """Whether this happens now; if so it is counted."""
        odds = self._odds.get(trouble, 0.0)
        if self.is_calm or not odds or self.chance.random() >= odds:
            return False
        self.count(trouble)
        return True

    def count(self, trouble: Trouble) -> None:
        """Note that something went wrong."""
        self.injected[trouble] += 1
        self.tell(f"! {trouble.name}")

    def tell(self, event: str) -> None:
        """One line of the world's story."""
        self.events.append(f"{self._scheduler.time:9.2f}  {event}")


class Life:
    """One incarnation of an actor's process."""

    def __init__(self, name: str, scheduler: Scheduler, chances: Chances) -> None:
        self.name = name
        self.is_dead = False
        self.n_operations = 0
        self.between: Callable[[], None] = lambda: None
        """Called at every operation: what else may happen to this process right then."""
        self.wrote: Callable[[str, bytes], None] = lambda *_: None
        """Told what this process is about to write."""
        self.may_die = True
        self._scheduler, self._chances = scheduler, chances

    def before(self, verb: str, key: str) -> None:
        """An operation is about to happen: others may go first, and this process may die.

        Raises:
            Killed: it does, or did before.
        """
        self._require_alive()
        self.n_operations += 1
        self._scheduler.pause()
        self._freeze(verb, key)
        self.between()
        self._maybe_die(Trouble.KILLED_BEFORE, verb, key)

    def after(self, verb: str, key: str) -> None:
        """An operation had its effect.

        Raises:
            Killed: this process does not live to hear of it.
        """
        self._maybe_die(Trouble.KILLED_AFTER, verb, key)

    def sleep(self, seconds: float) -> None:
        """Wait in simulated time.

        Raises:
            Killed: this process is dead already.
        """
        self._require_alive()
        self._scheduler.sleep(seconds)

    def kill(self) -> None:
        """From now on nothing this process does has an effect."""
        self.is_dead = True

    def _require_alive(self) -> None:
        if self.is_dead:
            raise Killed(self.name)

    def _maybe_die(self, trouble: Trouble, verb: str, key: str) -> None:
        if self.may_die and self._chances.strikes(trouble):
            self._chances.tell(f"{self.name} dies at {verb} {key}")
            self.kill()
            raise Killed(self.name)

    def _freeze(self, verb: str, key: str) -> None:
        chance = self._chances.chance
        if verb == "create" and key.endswith("-commit.json"):
            # Drawn four times: this is the moment everything else is built around.
            if any(self._chances.strikes(Trouble.SLEPT_BEFORE_COMMIT) for _ in range(4)):
                self._scheduler.sleep(chance.uniform(50.0, 250.0))
        elif self._chances.strikes(Trouble.FROZEN):
            self._scheduler.sleep(chance.uniform(1.0, 60.0))


class SimClock:
    """Implements ``Clock``: the world's time, as one process sees it."""

    def __init__(
        self,
        scheduler: Scheduler,
        chances: Chances,
        life: Life | None = None,
        offset_s: float = 0.0,
    ) -> None:
        self._scheduler, self._chances, self._life = scheduler, chances, life
        self._offset_s = offset_s

    def now(self) -> float:
        """Wall-clock time, wrong by this process's offset; it may be set back in between."""
        if self._life is not None and self._chances.strikes(Trouble.CLOCK_JUMP):
            self._offset_s += self._chances.chance.uniform(-7200.0, 7200.0)
        return EPOCH_S + self._scheduler.time + self._offset_s

    def monotonic(self) -> float:
        """The world's own time."""
        return self._scheduler.time

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Let others go on meanwhile."""
        del wake
        if self._life is None:
            self._scheduler.sleep(seconds)
        else:
            self._life.sleep(seconds)

    def jitter(self) -> float:
        """A number in [0, 1), from the seed."""
        return self._chances.chance.random()

    def token(self) -> str:
        """32 hex digits, from the seed."""
        return f"{self._chances.chance.getrandbits(128):032x}"


class ActorStore:
    """Implements ``ObjectStore``: one process's way to the store; every operation is a yield point."""

    def __init__(self, store: ObjectStore, life: Life) -> None:
        self._store, self._life = store, life

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object, if this process lives to."""
        self._life.before("put", key)
        if isinstance(data, bytes):
            self._life.wrote(key, data)
        self._store.put(key, data)
        self._life.after("put", key)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none, if this process lives to."""
        self._life.before("create", key)
        is_new = self._store.create(key, data)
        self._life.after("create", key)
        return is_new

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read an object."""
        self._life.before("read", key)
        return self._store.read(key, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """List objects."""
        self._life.before("list", prefix)
        yield from self._store.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects one by one: a process may die between two of them."""
        for key in keys:
            self._life.before("delete", key)
            self._store.delete([key])
            self._life.after("delete", key)
