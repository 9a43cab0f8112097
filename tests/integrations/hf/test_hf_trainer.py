"""The callback in a real Trainer: every version is what ``save_pretrained`` would have written then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hf_training import Outage, OutageStore, make_trainer, moe_model
from tiny_models import Shape, new_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from witnesses import Witness, assert_same_bits, followed, saved

import weightwire as ww
from weightwire.errors import FencedWriter, StopError
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy
from weightwire.trainers.hf import WeightwireCallback

ONCE = RetryPolicy(n_attempts=1)


def make_model(kind: str) -> Any:
    if kind in {"Mixtral", "Qwen3Moe"}:
        return moe_model(kind)
    return new_model(
        Shape(family=kind.removesuffix("-untied"), is_tied=not kind.endswith("untied"))
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama-untied", "Mixtral", "Qwen3Moe"])
def test_every_version_is_what_would_have_been_saved_at_its_step(kind: str, tmp_path: Path) -> None:
    store, witness = MemoryStore(), Witness(tmp_path)
    callback = WeightwireCallback(store)
    make_trainer(make_model(kind), tmp_path / "out", witness, callback).train()
    steps = []
    for _, step, tensors in followed(store, tmp_path / "followed"):
        assert step is not None
        assert_same_bits(tensors, witness.at[step])
        steps.append(step)
    assert steps == [0, 1, 2, 3, 4]
    assert callback.n_failed == 0


def test_several_steps_between_versions_are_one_diff_and_the_rest_comes_at_the_end(
    tmp_path: Path,
) -> None:
    store, witness = MemoryStore(), Witness(tmp_path)
    model = make_model("qwen3")
    make_trainer(
        model, tmp_path / "out", witness, WeightwireCallback(store, every=3), max_steps=7
    ).train()
    found = {step: tensors for _, step, tensors in followed(store, tmp_path / "followed")}
    assert list(found) == [0, 3, 6, 7]
    for step, tensors in found.items():
        assert_same_bits(tensors, witness.at[step])  # type: ignore[index]


def test_gradient_accumulation_gives_one_version_per_optimizer_step(tmp_path: Path) -> None:
    store, witness = MemoryStore(), Witness(tmp_path)
    trainer = make_trainer(
        make_model("llama"),
        tmp_path / "out",
        witness,
        WeightwireCallback(store),
        gradient_accumulation_steps=2,
        max_steps=2,
    )
    trainer.train()
    found = [(step, tensors) for _, step, tensors in followed(store, tmp_path / "followed")]
    assert [step for step, _ in found] == [0, 1, 2]
    assert_same_bits(found[-1][1], witness.at[2])


def test_resumed_training_goes_on_in_the_same_run(tmp_path: Path) -> None:
    store = MemoryStore()
    first = make_trainer(
        make_model("qwen3"),
        tmp_path / "out",
        WeightwireCallback(store),
        save_strategy="steps",
        save_steps=2,
        max_steps=3,
    )
    first.train()
    witness, callback = Witness(tmp_path), WeightwireCallback(store)
    second = make_trainer(make_model("qwen3"), tmp_path / "out", witness, callback, max_steps=4)
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    versions = list(followed(store, tmp_path / "followed"))
    # 0 … 3 by the first trainer; 4 fences it, 5 goes back to the checkpoint's step 2.
    assert [step for _, step, _ in versions] == [0, 1, 2, 3, 3, 2, 3, 4]
    for _, step, tensors in versions[5:]:
        assert_same_bits(tensors, witness.at[step])  # type: ignore[index]
    assert callback.published is not None
    assert callback.published.epoch == 2


def test_store_that_goes_away_does_not_stop_training_and_the_next_version_covers_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, witness = OutageStore(), Witness(tmp_path)
    callback = WeightwireCallback(store, retry=ONCE)
    make_trainer(
        make_model("qwen3"), tmp_path / "out", Outage(store, {2, 3}), witness, callback, max_steps=5
    ).train()
    found = {step: tensors for _, step, tensors in followed(store, tmp_path / "followed")}
    assert 3 not in found
    assert {0, 1, 4, 5} <= set(found)
    for step, tensors in found.items():
        assert_same_bits(tensors, witness.at[step])  # type: ignore[index]
    assert callback.n_failed > 0
    assert "the next publish covers it" in caplog.text


def test_store_that_is_away_when_training_begins_is_opened_later(tmp_path: Path) -> None:
    store, witness = OutageStore(), Witness(tmp_path)
    store.is_away = True
    callback = WeightwireCallback(store, retry=ONCE)
    make_trainer(
        make_model("qwen3"), tmp_path / "out", Outage(store, {1}), witness, callback, max_steps=3
    ).train()
    found = {step: tensors for _, step, tensors in followed(store, tmp_path / "followed")}
    assert list(found) == [2, 3]
    assert_same_bits(found[2], witness.at[2])
    assert callback.n_failed == 2


def test_store_that_is_away_at_the_last_step_is_tried_once_more_at_the_end(tmp_path: Path) -> None:
    store, witness = OutageStore(), Witness(tmp_path)
    callback = WeightwireCallback(store, retry=ONCE)
    trainer = make_trainer(
        make_model("qwen3"), tmp_path / "out", Outage(store, {3}), witness, callback, max_steps=3
    )

    class Back(Outage):
        def on_train_end(self, *_arguments: Any, **_others: Any) -> None:
            store.is_away = False

    trainer.callback_handler.callbacks.insert(0, Back(store, {3}))
    trainer.train()
    *_, (_, step, tensors) = followed(store, tmp_path / "followed")
    assert step == 3
    assert_same_bits(tensors, witness.at[3])


def test_trainer_whose_run_was_taken_over_is_stopped(tmp_path: Path) -> None:
    store = MemoryStore()
    callback = WeightwireCallback(store)

    class TakesOver(Witness):
        def on_step_end(self, *arguments: Any, **others: Any) -> None:
            super().on_step_end(*arguments, **others)
            if arguments[1].global_step == 2:
                ww.Publisher(store, {}).close()

    trainer = make_trainer(make_model("qwen3"), tmp_path / "out", TakesOver(tmp_path), callback)
    with pytest.raises(FencedWriter):
        trainer.train()
    callback.close()


def test_numbers_of_the_newest_version_are_in_the_trainers_log(tmp_path: Path) -> None:
    trainer = make_trainer(make_model("qwen3"), tmp_path, WeightwireCallback(MemoryStore()))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "weightwire/version" in entry]
    assert len(entries) >= 4
    assert {"loss", "weightwire/density"} <= set(entries[0])
    last = entries[-1]
    assert last["weightwire/version"] == 4
    assert 0 < last["weightwire/density"] < 1
    assert 0 < last["weightwire/bytes"] < 2 * sum(p.numel() for p in trainer.model.parameters())
    assert last["weightwire/publish_seconds"] >= last["weightwire/read_seconds"] > 0


def test_attached_callback_gives_its_numbers_to_those_who_report_them(tmp_path: Path) -> None:
    class Reporter(TrainerCallback):
        versions: ClassVar[list[float]] = []

        def on_log(self, *_arguments: Any, logs: dict[str, float], **_others: Any) -> None:
            self.versions.append(logs["weightwire/version"])

    trainer = make_trainer(make_model("qwen3"), tmp_path, Reporter(), max_steps=2)
    WeightwireCallback(MemoryStore()).attach(trainer)
    trainer.train()
    assert len(Reporter.versions) == 3


def test_observe_counts_changes_and_needs_no_store(tmp_path: Path) -> None:
    seen: list[ww.Published] = []
    callback = WeightwireCallback("nowhere://", mode="observe", on_published=seen.append)
    make_trainer(make_model("qwen3"), tmp_path, callback).train()
    assert [each.step for each in seen] == [0, 1, 2, 3, 4]
    assert all(0 < each.density < 1 for each in seen[1:])


def test_validate_compares_every_version_with_the_full_state(tmp_path: Path) -> None:
    seen: list[ww.Published] = []
    callback = WeightwireCallback(MemoryStore(), mode="validate", on_published=seen.append)
    make_trainer(make_model("Qwen3Moe"), tmp_path, callback, max_steps=2).train()
    assert [each.is_validated for each in seen] == [False, True, True]


def test_anchor_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    store, model = MemoryStore(), make_model("qwen3")
    save_tokenizer(tmp_path / "tokenizer")
    trainer = make_trainer(model, tmp_path / "out", WeightwireCallback(store), max_steps=1)
    trainer.processing_class = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    trainer.callback_handler.processing_class = trainer.processing_class
    trainer.train()
    *_, _ = followed(store, tmp_path / "followed")
    engine = AutoModelForCausalLM.from_pretrained(tmp_path / "followed")
    assert str(engine.dtype) == "torch.bfloat16"
    assert_same_bits(saved(engine, tmp_path), saved(model, tmp_path))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "followed")) == 512
    assert str(model.config.dtype).removeprefix("torch.") in {"float32", "None"}


def test_same_callback_serves_two_trainings(tmp_path: Path) -> None:
    store, callback, model = MemoryStore(), WeightwireCallback(MemoryStore()), make_model("qwen3")
    callback = WeightwireCallback(store)
    for _ in range(2):
        trainer = make_trainer(model, tmp_path / "out", callback, max_steps=1)
        trainer.train()
    *_, (version, step, tensors) = followed(store, tmp_path / "followed")
    assert (version, step) == (4, 1)
    assert_same_bits(tensors, saved(model, tmp_path))


def test_only_the_main_process_publishes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    trainer = make_trainer(make_model("qwen3"), tmp_path, WeightwireCallback(store))

    class Elsewhere(Witness):
        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
            state.is_world_process_zero = False

    trainer.callback_handler.callbacks.insert(0, Elsewhere(tmp_path))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert not list(store.list(""))


def test_zero_steps_between_versions_are_refused() -> None:
    with pytest.raises(StopError, match="every=0"):
        WeightwireCallback("runs/demo", every=0)
