"""A tiny GRPO task with a reward that a machine can verify: write ASCII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny_models import Shape, new_model, save_tokenizer
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = [f"write the letter {letter}: " for letter in "abcdefgh"]


def write_ascii(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's characters that are ASCII: a fresh model writes some of each."""
    return [sum(map(str.isascii, text)) / max(len(text), 1) for text in completions]


def make_grpo(folder: Path, *callbacks: TrainerCallback, **options: Any) -> GRPOTrainer:
    """GRPO on the CPU, with fp32 masters, logging to nowhere."""
    save_tokenizer(folder / "tokenizer")
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return GRPOTrainer(
        model=new_model(Shape()),
        reward_funcs=write_ascii,
        args=GRPOConfig(output_dir=str(folder / "out"), **{**settings, **options}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left"),
        callbacks=list(callbacks),
    )
