"""The demo's processes, seen from the one that starts them: start, listen, kill, end."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weightwire.demo.events import Ended, Event, parse_line
from weightwire.demo.settings import Settings
from weightwire.errors import MalformedHeader

_END_S = 5.0


class Processes:
    """One trainer and its workers; a context manager that leaves none behind."""

    def __init__(self, settings: Settings) -> None:
        self._settings_file = str(settings.save())
        self._logs = Path(settings.folder)
        self._events: queue.Queue[Event] = queue.Queue()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._listeners: list[threading.Thread] = []
        self._killed: set[int] = set()
        """Whose end is no news."""

    def start_trainer(self) -> None:
        """Begin training."""
        self._start("trainer", ["weightwire.demo.trainer", self._settings_file])

    def start_worker(self, worker: int) -> None:
        """Begin a worker, or begin it again."""
        name = f"worker-{worker}"
        self._start(name, ["weightwire.demo.rollout", self._settings_file, str(worker)])

    def kill_worker(self, worker: int) -> None:
        """As the kernel does when memory runs out: no farewell."""
        process = self._running[f"worker-{worker}"]
        self._killed.add(process.pid)
        _signal(process, signal.SIGKILL)
        process.wait()

    def events(self, look_s: float) -> Iterator[Event | None]:
        """What the processes say, in the order it comes; None where nothing came for ``look_s``."""
        while True:
            try:
                yield self._events.get(timeout=look_s)
            except queue.Empty:
                yield None

    def log_of(self, name: str) -> str:
        """The end of what a process wrote besides events."""
        with suppress(OSError):
            return (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]
        return ""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """End them all, by force if they do not listen."""
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_S)
            _signal(process, signal.SIGKILL)
            process.wait()
        for listener in self._listeners:
            listener.join()

    def _start(self, name: str, arguments: list[str]) -> None:
        """In a session of its own: Ctrl-C is for the one who started it, who then ends all."""
        with (self._logs / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        self._running[name] = process
        listener = threading.Thread(target=self._listen, args=(name, process), daemon=True)
        listener.start()
        self._listeners.append(listener)

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            with suppress(MalformedHeader):  # half a line of a process that was killed
                self._events.put(parse_line(line))
        code = process.wait()
        _close(process)
        if process.pid not in self._killed:
            self._events.put(Ended(name, code))


def _close(process: subprocess.Popen[str]) -> None:
    """Both pipes; nobody is at their other end any more."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To a process and to all it started: they are a group of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Numbers must not depend on how many cores are free, and nothing is to be fetched."""
