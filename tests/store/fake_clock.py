"""A clock that moves only when someone sleeps."""

from __future__ import annotations

import itertools
import random
import threading


class FakeClock:
    """Time, sleep and chance for tests; remembers every sleep."""

    def __init__(self, seed: int = 0, start: float = 1_000_000_000.0) -> None:
        self.time = start
        self.slept: list[float] = []
        self._chance = random.Random(seed)
        self._tokens = itertools.count()

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:  # noqa: ARG002
        self.slept.append(seconds)
        self.time += seconds

    def jitter(self) -> float:
        return self._chance.random()

    def token(self) -> str:
        return f"{next(self._tokens):032x}"
