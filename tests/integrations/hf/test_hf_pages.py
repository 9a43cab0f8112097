"""The pages' examples run as they are printed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import weightwire as ww
from weightwire.trainers.hf import WeightwireCallback

DOCS = Path(__file__).parents[3] / "docs"


def test_the_example_of_the_hf_trainer_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = DOCS / "examples" / "integrations" / "hf_trainer.py"
    assert example.read_text() in (DOCS / "integrations" / "hf-trainer.md").read_text()
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example))["main"]("runs/hf")
    assert "the engine holds version 3" in capsys.readouterr().out


def test_the_lines_of_the_migration_note_are_options_that_exist() -> None:
    page = (DOCS / "migrating.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("trainer.add_callback(")]
    assert len(lines) == 2
    for line in lines:
        made: list[WeightwireCallback] = []
        trainer = type("Trainer", (), {"add_callback": staticmethod(made.append)})
        exec(line, {"trainer": trainer, "WeightwireCallback": WeightwireCallback, "ww": ww})
        assert len(made) == 1
