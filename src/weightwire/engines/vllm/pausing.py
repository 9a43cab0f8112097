"""vLLM's pause, without the 20 ms it rests at the end of it.

The route answers only a while after the engine has stopped, so that the last tokens reach their
clients first. Weights may be written as soon as no further step is begun: every rank takes its
calls in turn, after the step in flight. The caches are emptied once that step is over, before or
after the writing, and always before the pause has answered, which is always awaited.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for

from weightwire.engines.remote.calls import Routes
from weightwire.engines.remote.server_status import Mode


class Pausing:
    """One server's pauses, over a connection of their own, in a thread of their own."""

    def __init__(self, calls: Routes, thread: Executor) -> None:
        self._calls, self._thread = calls, thread

    def begin(self, mode: Mode) -> Future[object]:
        """Ask for a pause; ``stopped`` says when nothing is generated any more."""
        return self._thread.submit(self._pause, mode)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown()

    def _pause(self, mode: Mode) -> object:
        try:
            return self._calls.post("/pause", mode=mode, clear_cache="true")
        finally:
            # The next one is a while away, and the server may be another one by then.
            self._calls.close()


def await_stop(pausing: Future[object], calls: Routes, *, may_be_quick: bool) -> None:
    """Wait until no rank begins another step.

    ``may_be_quick``: one engine serves, and keeps its requests. Where several step together, some
    may still be in a step when others have stopped.

    Raises:
        EngineUnavailable, EngineRefused: the pause's own.
    """
    while may_be_quick and not pausing.done():
        if calls.get("/is_paused")["is_paused"]:
            return
    pausing.result()


def await_end(pausing: Future[object]) -> None:
    """Wait for the answer, whatever it is: a pause that came after the resume would last."""
    wait_for([pausing])
