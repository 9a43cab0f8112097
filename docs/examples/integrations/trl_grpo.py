"""GRPO with TRL that publishes every step, and an engine that follows.

python trl_grpo.py runs/grpo        # or s3://bucket/run-7
"""

import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import weightwire as ww
from weightwire.trainers.hf import WeightwireCallback


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; yours comes with your model."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def make_model() -> Qwen3ForCausalLM:
    """A small Qwen3; yours comes from ``from_pretrained``."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=256,
        pad_token_id=257,
    )
    return Qwen3ForCausalLM(config)


def ascii_share(completions: list[str], **_: Any) -> list[float]:
    """A reward that a machine can verify: how much of the answer is ASCII."""
    return [sum(map(str.isascii, text)) / max(len(text), 1) for text in completions]


def main(store: str) -> None:
    """Train in fp32, publish bf16, follow."""
    model = make_model()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=ascii_share,
        args=GRPOConfig(
            output_dir="out",
            max_steps=4,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"write {c}: " for c in "abcdefgh"]}),
        processing_class=make_tokenizer(),
    )
    trainer.add_callback(WeightwireCallback(store))
    trainer.train()

    engine = make_model().to(torch.bfloat16)  # on another machine
    with ww.Subscriber(store, engine) as subscriber:
        subscriber.update()
        print("the engine holds version", subscriber.version)
    same = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    assert ww.digest(dict(engine.named_parameters())) == ww.digest(same)


if __name__ == "__main__":
    main(sys.argv[1])
