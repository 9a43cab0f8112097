"""The pages' examples are the files, and the files run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"plain-torch.md": "plain_torch.py", "views.md": "views.py", "fsdp2.md": "fsdp2.py"}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_the_example_as_it_is(page: str) -> None:
    example = ROOT / "docs" / "examples" / "integrations" / PAGES[page]
    text = (ROOT / "docs" / "integrations" / page).read_text()
    assert f"```python\n{example.read_text()}```" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [("plain_torch.py", "the engine holds version 4"), ("views.py", "float8_e4m3fn")],
)
def test_the_example_runs(name: str, says: str, tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "integrations" / name
    environment = {**os.environ, "RUN": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, example], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_plain_torch_takes_at_most_five_lines() -> None:
    text = (ROOT / "docs" / "examples" / "integrations" / "plain_torch.py").read_text()
    trainer = text.partition("engine = ")[0]
    assert sum("ww" in line or "publisher" in line for line in trainer.splitlines()) <= 5
