"""Many actors, one at a time: who goes on after each step is drawn, so a seed replays it all.

Actors are plain functions in threads, because the code they run is plain code: it does not know that
it is being scheduled. Exactly one thread runs. At every yield point the running one draws who
goes on, wakes that one, and waits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

STEP_S = 0.01
"""What one operation takes, at least."""


class WorldEnds(BaseException):
    """Raised in every actor once the world is over; passes through ``except Exception``."""


class TooLong(Exception):
    """A world that does not come to its end."""


class Actor:
    """One thread of the world, and when it next wants to run."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name, self.body = name, body
        self.wake_at = 0.0
        self.is_done = False
        self.gate = threading.Lock()
        self.gate.acquire()


class Scheduler:
    """Simulated time, and whose turn it is."""

    def __init__(self, chance: random.Random, switching: float, max_steps: int) -> None:
        self.time = 0.0
        self.n_steps = 0
        self._chance, self._switching, self._max_steps = chance, switching, max_steps
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._is_stopping = False
        self._error: BaseException | None = None
        self._over = threading.Lock()

    def add(self, name: str, body: Callable[[], None]) -> None:
        """One more actor; before ``run``."""
        self._actors.append(Actor(name, body))

    def run(self) -> None:
        """Let all actors run until each has returned.

        Raises:
            whatever one of them raised first.
        """
        threads = [threading.Thread(target=self._live, args=(actor,)) for actor in self._actors]
        self._over.acquire()
        for thread in threads:
            thread.start()
        self._hand_over()
        self._over.acquire()
        for thread in threads:
            thread.join()
        self._current = None
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """A yield point: maybe another actor goes on. Outside ``run`` only time passes.

        Raises:
            WorldEnds: some actor failed.
            TooLong: the world had more steps than it should ever need.
        """
        self.time += STEP_S
        self.n_steps += 1
        if self.n_steps > self._max_steps:
            raise TooLong(f"{self.n_steps} steps, {self.time:.0f} simulated seconds")
        if self._current is not None and self._chance.random() < self._switching:
            self._switch(self._current)

    def sleep(self, seconds: float) -> None:
        """Let simulated time pass for the actor that runs."""
        if self._current is None:
            self.time += seconds
            return
        self._current.wake_at = self.time + seconds
        self._switch(self._current)

    def _live(self, actor: Actor) -> None:
        actor.gate.acquire()
        try:
            if not self._is_stopping:
                actor.body()
        except WorldEnds:
            pass
        except BaseException as error:  # belongs to whoever called run
            self._error = self._error or error
            self._is_stopping = True
        actor.is_done = True
        self._hand_over()

    def _switch(self, actor: Actor) -> None:
        if self._draw() is not actor:
            self._wake()
            actor.gate.acquire()
        if self._is_stopping:
            raise WorldEnds

    def _hand_over(self) -> None:
        """Let someone else go on, or say that nobody is left."""
        if self._draw() is None:
            self._over.release()
        else:
            self._wake()

    def _draw(self) -> Actor | None:
        """One of those that are not asleep; if all are, time passes until the first wakes."""
        alive = [actor for actor in self._actors if not actor.is_done]
        if not alive:
            self._current = None
            return None
        if not self._is_stopping:
            self.time = max(self.time, min(actor.wake_at for actor in alive))
            alive = [actor for actor in alive if actor.wake_at <= self.time]
        self._current = alive[self._chance.randrange(len(alive))]
        return self._current

    def _wake(self) -> None:
        if self._current is not None:
            self._current.gate.release()
