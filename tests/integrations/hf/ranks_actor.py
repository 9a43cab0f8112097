"""One rank of a Trainer on several processes; started by torchrun.

python -m torch.distributed.run --nproc-per-node 2 ranks_actor.py ddp|fsdp2 STORE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import Shape, new_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from weightwire.trainers.hf import WeightwireCallback


class Gathers(TrainerCallback):
    """Knows what must be published: the whole model at each step, gathered here for this alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **others: Any) -> None:
        self._gather(state, others["model"])

    def on_step_end(self, _args: Any, state: Any, _control: Any, **others: Any) -> None:
        self._gather(state, others["model"])

    def _gather(self, state: Any, model: Any) -> None:
        whole = {
            name.removeprefix("module."): _whole(parameter).to(torch.bfloat16)
            for name, parameter in model.named_parameters()
        }
        if state.is_world_process_zero:
            torch.save(whole, self._folder / f"step-{state.global_step}.pt")


def _whole(parameter: Any) -> torch.Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


def train_ddp(store: str, folder: Path) -> None:
    """A Trainer on every rank, as torchrun starts it."""
    tokens = torch.randint(0, 256, (64, 16), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model=new_model(Shape()),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_backend="gloo",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Gathers(folder)],
    )
    trainer.add_callback(WeightwireCallback(store))
    trainer.train()


def train_fsdp2(store: str, folder: Path) -> None:
    """The Trainer's events by hand: accelerate shards models on GPUs only."""
    distributed.init_process_group("gloo")
    model = new_model(Shape())
    distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    callbacks = [Gathers(folder), WeightwireCallback(store)]
    state = TrainerState(is_world_process_zero=distributed.get_rank() == 0)
    for each in callbacks:
        each.on_train_begin(None, state, TrainerControl(), model=model)
    for _ in range(3):
        tokens = torch.randint(0, 256, (4, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        for each in callbacks:
            each.on_step_end(None, state, TrainerControl(), model=model)
    for each in callbacks:
        each.on_train_end(None, state, TrainerControl(), model=model)
    distributed.destroy_process_group()


if __name__ == "__main__":
    {"ddp": train_ddp, "fsdp2": train_fsdp2}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
