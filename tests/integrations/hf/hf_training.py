"""A real Hugging Face Trainer on a tiny model, and a store that can go away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from weightwire.errors import StoreUnavailable
from weightwire.store.contract import ObjectInfo
from weightwire.store.memory import MemoryStore


def moe_model(family: str) -> Any:
    """A tiny mixture of experts, whose checkpoint has other tensors than the model."""
    import transformers

    sizes = {"num_experts": 4, "moe_intermediate_size": 48}
    if family == "Mixtral":
        sizes = {"num_local_experts": 4}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts_per_tok=2,
        **sizes,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).float()


def make_trainer(model: Any, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """A Trainer on random tokens, on the CPU, which logs every step and fetches nothing."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (64, 16), generator=source)
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**settings, **options}),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=list(callbacks),
    )


class OutageStore(MemoryStore):
    """A store that can go away."""

    is_away = False

    def _require(self) -> None:
        if self.is_away:
            raise StoreUnavailable("the store is away")

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._require()
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._require()
        return super().create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._require()
        return super().read(key, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._require()
        return super().list(prefix, after)


class Outage(TrainerCallback):
    """Takes the store away before some steps end, and brings it back."""

    def __init__(self, store: OutageStore, steps: set[int]) -> None:
        self._store, self._steps = store, steps

    def on_optimizer_step(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        self._store.is_away = state.global_step + 1 in self._steps
