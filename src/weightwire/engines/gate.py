"""Who may touch the weights: many generations at a time, or one activation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Gate:
    """Generations pass side by side; an activation waits until none is inside, and goes first.

    Without that precedence, generations that overlap for ever would put an activation off for ever.
    A thread that is inside may enter again: it would otherwise wait for the activation that waits
    for it.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._n_inside = 0
        self._is_wanted = False
        self._is_closed = False
        self._own = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is in a generation."""
        return getattr(self._own, "depth", 0) > 0

    @contextmanager
    def generation(self, is_ready: Callable[[], bool], timeout_s: float | None) -> Iterator[bool]:
        """Go in when nothing is being written and ``is_ready`` says so; False if that did not come."""
        is_in = self.is_inside or self._enter(is_ready, timeout_s)
        self._own.depth = getattr(self._own, "depth", 0) + is_in
        try:
            yield is_in
        finally:
            self._own.depth -= is_in
            if is_in and not self.is_inside:
                self._leave()

    @contextmanager
    def activation(self) -> Iterator[bool]:
        """Keep new generations out, wait for those inside; False if the gate was closed meanwhile."""
        with self._turn:
            self._is_wanted = True
            self._turn.wait_for(lambda: self._is_closed or self._n_inside == 0)
            may_write = self._n_inside == 0
        try:
            yield may_write
        finally:
            with self._turn:
                self._is_wanted = False
                self._turn.notify_all()

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for something that ``tell`` tells of; False if it did not come in time."""
        with self._turn:
            return self._turn.wait_for(lambda: self._is_closed or is_so(), timeout_s) and is_so()

    def tell(self) -> None:
        """Something changed: whoever waits looks again."""
        with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        """Let everyone who waits go, empty-handed."""
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()

    def _enter(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._turn:
            self._turn.wait_for(
                lambda: self._is_closed or (not self._is_wanted and is_ready()), timeout_s
            )
            may_enter = not (self._is_closed or self._is_wanted) and is_ready()
            self._n_inside += may_enter
            return may_enter

    def _leave(self) -> None:
        with self._turn:
            self._n_inside -= 1
            self._turn.notify_all()
