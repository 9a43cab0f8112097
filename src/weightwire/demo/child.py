"""How the demo's processes begin and end: they say why they fail, and go when their starter goes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from weightwire.demo.events import Failed, say

_FAILED = 2
_ORPHANED = 3


def run_child(name: str, body: Callable[[], None]) -> NoReturn:
    """Do the work of a process, then end it; what it fails with is its last event."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    code = 0
    try:
        body()
    except BaseException as error:  # the border of a process: whatever it is, it is told
        traceback.print_exc()
        say(Failed(name, type(error).__name__, str(error)))
        code = _FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still wait for a version must not keep it alive


def _end_with_parent() -> None:
    """The starter holds the other end of stdin and never writes: an end means it is gone."""
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with the servers that were started here
    os._exit(_ORPHANED)
