"""How far a command is: bars on a terminal, now and then a line in a log, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from weightwire.cli.numbers import bytes_text

Clock = Callable[[], float]

_SHARE_BETWEEN_LINES = 0.1
_SECONDS_BETWEEN_LINES = 5.0
_LEAST_SECONDS_BETWEEN_LINES = 0.5
"""A small checkpoint is done before anyone could read ten lines about it."""


class ProgressDisplay(Protocol):
    """Shows stages one after another; told of bytes as they are dealt with."""

    def stage(self, name: str, n_bytes: int) -> Callable[[int], None]:
        """Begin a stage of so many bytes; gives the function to call with each advance."""

    def note(self, text: str) -> None:
        """Show one line beside the progress."""

    def stop(self) -> None:
        """Show nothing more; may be called twice."""


def choose_display(*, quiet: bool) -> ProgressDisplay:
    """Bars where someone is watching, lines where a log is kept, nothing if so asked."""
    if quiet:
        return NoDisplay()
    return Bars() if sys.stderr.isatty() else Lines()


class NoDisplay:
    """Shows nothing."""

    def stage(self, name: str, n_bytes: int) -> Callable[[int], None]:
        """Begin a stage that nobody sees."""
        del name, n_bytes
        return lambda _: None

    def note(self, text: str) -> None:
        """Pass over it."""
        del text

    def stop(self) -> None:
        """Nothing to stop."""


class Bars:
    """One bar per stage, redrawn in place."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def stage(self, name: str, n_bytes: int) -> Callable[[int], None]:
        """Add a bar."""
        self._progress.start()
        task = self._progress.add_task(name, total=n_bytes)
        return lambda n_done: self._progress.advance(task, n_done)

    def note(self, text: str) -> None:
        """Print above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


class Lines:
    """A line every tenth of the way or every few seconds, and one at the end of a stage."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock

    def stage(self, name: str, n_bytes: int) -> Callable[[int], None]:
        """Begin a stage; an empty one says nothing."""
        return _LineStage(name, n_bytes, self._clock).advance

    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Nothing is open."""


class _LineStage:
    def __init__(self, name: str, n_bytes: int, clock: Clock) -> None:
        self._name, self._n_bytes, self._clock = name, n_bytes, clock
        self._n_done = 0
        self._n_said = 0
        self._began = self._said_at = clock()

    def advance(self, n_done: int) -> None:
        self._n_done += n_done
        now = self._clock()
        if n_done and self._is_due(now):
            self._n_said, self._said_at = self._n_done, now
            print(self._line(now), file=sys.stderr, flush=True)

    def _is_due(self, now: float) -> bool:
        if self._n_done >= self._n_bytes:
            return True
        quiet_s = now - self._said_at
        is_far = self._n_done - self._n_said >= _SHARE_BETWEEN_LINES * self._n_bytes
        return quiet_s >= _SECONDS_BETWEEN_LINES or (
            is_far and quiet_s >= _LEAST_SECONDS_BETWEEN_LINES
        )

    def _line(self, now: float) -> str:
        speed = self._n_done / max(now - self._began, 1e-9)
        return (
            f"{self._name}: {self._n_done / max(self._n_bytes, 1):.0%},"
            f" {bytes_text(self._n_done)} of {bytes_text(self._n_bytes)}, {bytes_text(speed)}/s"
        )
