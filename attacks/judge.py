"""What became of an attack: refused, without effect, or a broken promise."""

from __future__ import annotations

import faulthandler
import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import weightwire as ww
from sample import Files, State, base_state, target_state
from weightwire.codec.index import parse_index
from weightwire.codec.patch import MemoryBuckets, Patch
from weightwire.errors import WeightwireError

REFUSED = "refused"
HARMLESS = "no effect"

MAX_SECONDS = 60
"""A case that takes longer is a hang: the process ends with a traceback."""

MAX_EXTRA_BYTES = 1 << 30
"""Address space that attacks of a few kilobytes may add to the process."""


def judge_files(files: Files) -> str:
    """Offer forged files to the reader, then to a small state."""
    state = base_state()
    try:
        patch = Patch(parse_index(files.index, "attack"), MemoryBuckets(files.buckets))
        _ = patch.heads
        ww.apply(state, patch)
    except Exception as error:
        return _judge_error(error, state)
    return _judge_result(state)


def judge_folder(folder: Path) -> str:
    """The same for a patch folder on disk."""
    state = base_state()
    try:
        ww.apply(state, Patch.load(folder))
    except Exception as error:
        return _judge_error(error, state)
    return _judge_result(state)


@contextmanager
def bounded() -> Iterator[None]:
    """No hang, no warning, no more memory than an attack's size justifies."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if "WEIGHTWIRE_SANITIZED" not in os.environ:
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MAX_EXTRA_BYTES, hard))
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return n_pages * resource.getpagesize()


def _judge_error(error: Exception, state: State) -> str:
    if not isinstance(error, WeightwireError):
        return f"RAISED {type(error).__name__}: {error}"
    if not same_states(state, base_state()):
        return f"WROTE, THEN RAISED {type(error).__name__}: {error}"
    return REFUSED


def _judge_result(state: State) -> str:
    return HARMLESS if same_states(state, target_state()) else "WRONG WEIGHTS ACCEPTED"


def same_states(a: State, b: State) -> bool:
    """Same names, types, shapes and bits."""
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, a[name].tobytes())
        == (b[name].dtype, b[name].shape, b[name].tobytes())
        for name in a
    )
