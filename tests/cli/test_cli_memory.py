"""Memory does not grow with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"
BOUND_BYTES = 48 << 20


def peaks(folder: Path, commands: str, n_megabytes: int) -> dict[str, int]:
    """Each command's peak memory on a checkpoint of this size."""
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--json"]
    command += ["--megabytes", str(n_megabytes), "--hidden", "1024", "--commands", commands]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {run["command"]: run["n_peak_bytes"] for run in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("commands", "n_megabytes"),
    [
        pytest.param("files", 256, marks=pytest.mark.long),
        pytest.param("run", 400, marks=pytest.mark.long),
    ],
)
def test_several_times_the_model_takes_about_the_same_memory(
    tmp_path: Path, commands: str, n_megabytes: int
) -> None:
    small, large = peaks(tmp_path, commands, 64), peaks(tmp_path, commands, n_megabytes)
    growth = {command: large[command] - small[command] for command in small}
    assert max(growth.values()) < BOUND_BYTES, growth
    assert not list(tmp_path.iterdir())
