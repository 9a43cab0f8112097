"""A real transformers model follows a run of another one: the same bits, the same words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isolated_scripts import example_of, run_script
from tiny_models import Shape, Training, new_model

import weightwire as ww
from weightwire.engines.torch_module import TorchModuleEngine
from weightwire.subscriber import Polling

PROMPT = torch.tensor([[72, 105, 32]])


def words(model: Any) -> list[int]:
    found = model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=258)
    return [int(token) for token in found[0]]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def training(request: pytest.FixtureRequest) -> Training:
    return Training(new_model(Shape(is_tied=request.param)), learning_rate=1e-4)


@pytest.fixture
def run(training: Training, tmp_path: Path) -> Iterator[tuple[Path, ww.Publisher]]:
    with ww.Publisher(tmp_path / "run", ww.cast(training.model, "bf16")) as publisher:
        publisher.publish().result()
        yield tmp_path / "run", publisher


def rounded(model: Any) -> dict[str, torch.Tensor]:
    """What an fp32 model holds that was loaded from a bf16 checkpoint of this one."""
    return {name: t.to(torch.bfloat16).float() for name, t in model.state_dict().items()}


def test_an_fp32_model_that_follows_says_what_a_fresh_load_says(
    training: Training, run: tuple[Path, ww.Publisher]
) -> None:
    store, publisher = run
    model = new_model(Shape(is_tied=training.model.config.tie_word_embeddings), seed=9).eval()
    fresh = new_model(Shape(is_tied=training.model.config.tie_word_embeddings), seed=8).eval()
    with TorchModuleEngine(store, model, polling=Polling(first_s=0.02, max_s=0.05)) as engine:
        for _ in range(5):
            training.step()
            done = publisher.publish().result()
            assert engine.wait_for(done.version, timeout_s=60)
            assert engine.digest == done.digest
            fresh.load_state_dict(rounded(training.model))
            for name, tensor in fresh.state_dict().items():
                assert torch.equal(tensor, model.state_dict()[name]), name
            with engine.generation():
                assert words(model) == words(fresh)


def test_generations_that_never_cease_are_each_of_one_version(
    training: Training, run: tuple[Path, ww.Publisher]
) -> None:
    store, publisher = run
    is_tied = training.model.config.tie_word_embeddings
    model, fresh = (
        new_model(Shape(is_tied=is_tied)).eval(),
        new_model(Shape(is_tied=is_tied)).eval(),
    )
    said: list[tuple[int, list[int]]] = []
    stop = threading.Event()

    with TorchModuleEngine(store, model, polling=Polling(first_s=0.02, max_s=0.05)) as engine:

        def generate() -> None:
            while not stop.is_set():
                with engine.generation() as version:
                    said.append((version, words(model)))

        thread = threading.Thread(target=generate)
        thread.start()
        expected = {}
        try:
            for _ in range(6):
                fresh.load_state_dict(rounded(training.model))
                expected[publisher.version] = words(fresh)
                training.step()
                assert engine.wait_for(publisher.publish().result().version, timeout_s=60)
        finally:
            stop.set()
            thread.join()
    known = [(version, text) for version, text in said if version in expected]
    assert len({version for version, _ in known}) > 2
    assert all(text == expected[version] for version, text in known)


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    output = run_script(
        example_of("transformers.md", "transformers_follow.py"),
        environment={**os.environ, "RUN": str(tmp_path / "run")},
    )
    assert "holds version 4 bit for bit" in output
