"""Time, sleep and chance, passed in wherever they are needed: that is what lets a test replay them."""

from __future__ import annotations

import random
import secrets
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What Weightwire asks of the world besides bytes."""

    def now(self) -> float:
        """Wall-clock seconds since 1970, for people and for grace periods."""

    def monotonic(self) -> float:
        """Seconds that never go back, for durations."""

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Wait so long, or until ``wake`` is set."""

    def jitter(self) -> float:
        """A number in [0, 1), so that many waiters do not come back at once."""

    def token(self) -> str:
        """32 hex digits nobody else draws."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        """Wall-clock seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Wait so long, or until ``wake`` is set."""
        if wake is None:
            time.sleep(seconds)
        else:
            wake.wait(seconds)

    def jitter(self) -> float:
        """A number in [0, 1)."""
        return random.random()

    def token(self) -> str:
        """32 hex digits from the system's source of randomness."""
        return secrets.token_hex(16)
