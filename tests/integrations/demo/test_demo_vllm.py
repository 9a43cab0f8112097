"""The demo with a real vLLM server as its rollout engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_every_version_is_proven_in_the_live_memory_of_a_vllm_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightwire", "demo", "--engine", "vllm", "--json"]
    command += ["--steps", "3", "--workers", "1", "--warm-up", "8", "--staleness", "1"]
    command += ["--report", str(tmp_path / "report.html"), "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    checked = {claim["claim"]: claim["n_checked"] for claim in summary["claims"]}
    assert summary["is_proven"] is True
    assert checked["patches: every version on every worker is the trainer's, bit for bit"] == 4
