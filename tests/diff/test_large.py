"""Tensors with more than 2^31 elements: positions and digests beyond 31 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import weightwire as ww
from weightwire.apply.memory import activate, stage

N = (1 << 31) + 10
PLACE = N - 3


@pytest.mark.long
@pytest.mark.skipif(shutil.disk_usage("/tmp").free < 1 << 30, reason="under 1 GiB of free disk")
def test_change_past_the_2_to_the_31st_element_is_found_and_written(tmp_path: Path) -> None:
    """Both files are all hole but for one page."""
    old, new = tmp_path / "old", tmp_path / "new"
    for path in (old, new):
        with path.open("wb") as file:
            file.truncate(N)
    base, target = (np.memmap(path, np.uint8, "r+") for path in (old, new))
    target[PLACE] = 7
    patch = ww.diff({"x": base}, {"x": target})
    assert patch.n_changed == 1
    assert patch.n_bytes < 150_000
    activate({"x": base}, stage({"x": base}, patch))
    assert base[PLACE] == 7
    assert base[-100:].sum() == 7
