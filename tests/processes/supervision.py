"""Starting, stopping, freezing and killing the processes of a test; only those it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from weightwire.testing.seaweed import S3Server

HERE = Path(__file__).parent
PATIENCE_S = 90.0
"""Only a test that fails waits so long."""


class Actor:
    """One OS process; a context manager that leaves none behind."""

    def __init__(
        self, script: str, *arguments: object, store: tuple[str, dict[str, str]], log: Path
    ) -> None:
        url, options = store
        self.log = log
        self._errors: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "STORE_URL": url, "STORE_OPTIONS": json.dumps(options)},
        )

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """As the kernel does it: no handler, no clean-up."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._close()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line it says; "" when it is gone."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def expect(self, line: str) -> None:
        heard = self.hear()
        assert heard == line, f"said {heard!r}, not {line!r}; its errors end:\n{self.errors()}"

    def until_frozen(self) -> None:
        """Wait until it has stopped itself."""
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"it ended instead:\n{self.errors()}"

    def end(self) -> int:
        """Wait until it ends by itself; gives its exit status."""
        status = self.process.wait(timeout=PATIENCE_S)
        self._close()
        return status

    def errors(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._close()


def place_in(server: S3Server, prefix: str) -> tuple[str, dict[str, str]]:
    """What a process must be told to reach a run."""
    return server.url(prefix), server.options


def wait_for(what: str, is_true: Callable[[], bool], details: Callable[[], str] = str) -> None:
    """Wait until something is so; fail with details if it never is."""
    ends = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < ends, f"{what} did not happen: {details()}"
        time.sleep(0.05)
