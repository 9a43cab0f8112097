"""What every running server can do once it can stage, activate and say where it stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

from weightwire.clock import Clock
from weightwire.engines.remote.server_status import Mode, Pause, ServerStatus
from weightwire.errors import Dirty, EngineUnavailable

Look = TypeVar("Look")

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.25
_N_TRIES = 2


class RemoteServer(ABC):
    """A server of one or several ranks, kept at the version it is told."""

    _clock: Clock
    _timeout_s: float

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is."""

    @abstractmethod
    def status(self) -> ServerStatus:
        """Where every rank stands."""

    @abstractmethod
    def stage(self, version: int) -> None:
        """Begin to stage a version on every rank; generation goes on, and this does not wait."""

    @abstractmethod
    def activate(self, version: int, *, mode: Mode = "keep") -> Pause:
        """Pause, write the staged version on every rank, resume."""

    def update(self, version: int, *, mode: Mode = "keep") -> Pause:
        """Stage, wait, activate, and have what was written read back; repeated once if it is not right.

        Raises:
            WeightwireError: as ``wait_staged`` and ``activate``.
        """
        for _ in range(_N_TRIES):
            self.stage(version)
            self.wait_staged(version)
            pause = self.activate(version, mode=mode)
            if self.wait_checked().version == version:
                return pause
        raise Dirty(f"{self.url}: version {version} was written twice and does not read back")

    def wait_staged(self, version: int, timeout_s: float | None = None) -> ServerStatus:
        """Wait until every rank has staged it.

        Raises:
            WeightwireError: what a rank ran into; the server serves on what it had.
            EngineUnavailable: not in time.
        """
        for status in self._looks(self._heard, timeout_s):
            if status is None:
                continue
            if status.is_ready(version):
                return status
            status.require_possible(version)
        raise EngineUnavailable(f"{self.url}: version {version} was not staged in time")

    def wait_checked(self) -> ServerStatus:
        """Wait until the ranks have read back what they wrote; requests run meanwhile.

        Raises:
            EngineUnavailable, EngineRefused: the server's own.
        """
        for status in self._looks(self.status):
            if not status.is_checking:
                return status
        raise EngineUnavailable(f"{self.url}: what was written was not read back in time")

    def _heard(self) -> ServerStatus | None:
        """The ranks' answer to the last ``stage``; None while they have not taken notice of it."""
        return self.status()

    def _looks(self, look: Callable[[], Look], timeout_s: float | None = None) -> Iterator[Look]:
        """Look ever more seldom: each look takes the ranks a moment."""
        ends = self._clock.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        look_s = _FIRST_LOOK_S
        yield look()
        while self._clock.monotonic() < ends:
            self._clock.sleep(look_s)
            look_s = min(look_s * 1.5, _LONGEST_LOOK_S)
            yield look()
