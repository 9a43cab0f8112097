"""A Hugging Face Trainer that publishes every second step, and an engine that follows.

python hf_trainer.py runs/hf        # or s3://bucket/run-7
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import weightwire as ww
from weightwire.trainers.hf import WeightwireCallback


def make_model() -> LlamaForCausalLM:
    """A small Llama; your own model comes from ``from_pretrained``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def main(store: str) -> None:
    """Train in fp32, publish bf16, follow."""
    model = make_model()
    texts = torch.randint(0, 256, (64, 32))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="out",
            max_steps=6,
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
    )
    trainer.add_callback(WeightwireCallback(store, every=2))
    trainer.train()

    engine = make_model().to(torch.bfloat16)  # on another machine
    with ww.Subscriber(store, engine) as subscriber:
        subscriber.update()
        print("the engine holds version", subscriber.version)
    same = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert ww.digest(engine) == ww.digest(same)


if __name__ == "__main__":
    main(sys.argv[1])
