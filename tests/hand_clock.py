"""Time that moves when someone sleeps, or a test says so; every token is another one, and known."""

from __future__ import annotations

import threading


class HandClock:
    """Implements ``Clock``; the same in every run."""

    def __init__(self, start: float = 1_000_000.0, jitter: float = 0.0) -> None:
        self.time = start
        self.n_tokens = 0
        self._jitter = jitter

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        del wake
        self.time += seconds

    def jitter(self) -> float:
        return self._jitter

    def token(self) -> str:
        self.n_tokens += 1
        return f"{self.n_tokens:032x}"
