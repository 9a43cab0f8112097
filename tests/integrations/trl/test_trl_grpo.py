"""The callback in a real GRPO run: a follower holds every version, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl_grpo
from grpo_training import make_grpo
from witnesses import Witness, assert_same_bits, followed

from weightwire.store.memory import MemoryStore
from weightwire.trainers.hf import WeightwireCallback

DOCS = Path(__file__).parents[3] / "docs"


def test_every_version_of_a_grpo_run_is_what_would_have_been_saved(tmp_path: Path) -> None:
    store, witness = MemoryStore(), Witness(tmp_path)
    trainer = make_grpo(tmp_path, witness, WeightwireCallback(store))
    trainer.train()
    steps = []
    for _, step, tensors in followed(store, tmp_path / "followed"):
        assert step is not None
        assert_same_bits(tensors, witness.at[step])
        steps.append(step)
    assert steps == [0, 1, 2, 3, 4]
    densities = [
        entry["weightwire/density"] for entry in trainer.state.log_history if "reward" in entry
    ]
    assert len(densities) == 4
    assert all(0 < density <= 1 for density in densities)


def test_gradient_accumulation_and_every_third_step_are_one_diff_each(tmp_path: Path) -> None:
    store, witness = MemoryStore(), Witness(tmp_path)
    callback = WeightwireCallback(store, every=3)
    make_grpo(
        tmp_path,
        witness,
        callback,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    ).train()
    found = {step: tensors for _, step, tensors in followed(store, tmp_path / "followed")}
    assert list(found) == [0, 3, 4]
    for step, tensors in found.items():
        assert step is not None
        assert_same_bits(tensors, witness.at[step])


def test_the_example_of_the_trl_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "integrations" / "trl.md").read_text()
    for name in ("trl_grpo", "trl_async"):
        assert (DOCS / "examples" / "integrations" / f"{name}.py").read_text() in page
    monkeypatch.chdir(tmp_path)
    trl_grpo.main("runs/grpo")
    assert "the engine holds version 4" in capsys.readouterr().out
