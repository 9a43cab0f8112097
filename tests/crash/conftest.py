"""Hundreds of small worlds are made and thrown away here: in memory where there is such a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that is gone after the test, not three runs later as pytest's own."""
    place = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="weightwire-crash-", dir=place) as folder:
        yield Path(folder)
