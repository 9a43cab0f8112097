"""Ending a long command when it is told to, but not in the middle of a write."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM came: the command ends, and that is no failure."""


class Signals:
    """Turns the first SIGINT or SIGTERM into an exception; a context manager.

    Within ``deferred`` it waits for the next ``check``. A second signal does what it always did,
    for whoever cannot wait. Only the main thread may have signal handlers; elsewhere this does
    nothing.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._pending: BaseException | None = None
        self._n_deferred = 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._take) for each in _WATCHED}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._restore()
        return isinstance(error, Terminated)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Work that a signal must not cut in two."""
        self._n_deferred += 1
        try:
            yield
        finally:
            self._n_deferred -= 1

    def check(self) -> None:
        """Raise what came meanwhile.

        Raises:
            KeyboardInterrupt, Terminated: a signal came.
        """
        if self._pending is not None:
            raise self._pending

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._restore()
        self._pending = KeyboardInterrupt() if number == signal.SIGINT else Terminated()
        if not self._n_deferred:
            raise self._pending

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
