from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.small_runs import SmallRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    """A run whose first version exists."""
    made = SmallRun(tmp_path)
    made.publish()
    yield made
    made.close()
