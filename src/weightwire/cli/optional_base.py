"""A base that a command can do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.checkpoint import Checkpoint


@contextmanager
def open_base(path: Path | None) -> Iterator[Checkpoint | None]:
    """The checkpoint at ``path``, or None where none was given.

    Raises:
        WeightwireError: whatever ``Checkpoint.open`` raises.
    """
    if path is None:
        yield None
        return
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint
