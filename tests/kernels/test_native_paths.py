"""The vector paths of this machine against the plain loops, in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "native" / "tests" / "paths_agree.cpp"


def test_vector_and_scalar_paths_agree(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "the package was built with a C++ compiler; set CXX to it"
    program = tmp_path / "paths_agree"
    subprocess.run([compiler, "-O2", "-std=c++17", SOURCE, "-o", program], check=True)
    done = subprocess.run([program, "7"], check=True, capture_output=True, text=True)
    assert "paths agree" in done.stdout
