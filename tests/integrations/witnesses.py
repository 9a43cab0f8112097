"""Who knows what must be published: transformers' own ``save_pretrained``, at every step."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from weightwire.subscriber import Subscriber

Tensors = dict[str, torch.Tensor]


class Witness(TrainerCallback):
    """Saves the model in bf16 at every step, in transformers' own way: what must be published."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.at: dict[int, Tensors] = {}

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **others: Any) -> None:
        self.at[state.global_step] = saved(others["model"], self._folder)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **others: Any) -> None:
        self.at[state.global_step] = saved(others["model"], self._folder)


def saved(model: Any, folder: Path) -> Tensors:
    """What ``save_pretrained`` writes of the model in bf16."""
    scratch = folder / "scratch"
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(scratch)
    tensors = loaded(scratch)
    shutil.rmtree(scratch)
    return tensors


def loaded(folder: Path) -> Tensors:
    """Every tensor of a checkpoint folder, copied: the files are mapped, and written to in place."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    return tensors


def followed(store: object, folder: Path) -> Iterator[tuple[int, int | None, Tensors]]:
    """Version by version, with its training step: what a receiver has on its disk."""
    with Subscriber(store, folder) as subscriber:  # type: ignore[arg-type]
        for version in range(subscriber.poll() + 1):
            subscriber.stage(version)
            subscriber.activate()
            updated = subscriber.wait()
            assert updated is not None
            yield version, updated.step, loaded(folder)


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    """Same names, types, shapes and bits."""
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].view(torch.int16).equal(tensor.view(torch.int16)), name
