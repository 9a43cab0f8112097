"""Asynchronous GRPO: TRL trains, vLLM generates, and weights reach it as patches while it does.

    VLLM_SERVER_DEV_MODE=1 vllm serve my-model \
        --weight-transfer-config '{"backend": "weightwire"}' \
        --worker-extension-cls weightwire.engines.vllm.worker.WeightwireWorker
    python trl_async.py my-model s3://bucket/run-7 http://localhost:8000
"""

import sys
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from weightwire.trainers.trl import Sync, WeightwireTransfer


def ascii_share(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """A reward that a machine can verify: how much of the answer is ASCII."""
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(map(str.isascii, text)) / max(len(text), 1) for text in texts]


def tell(sync: Sync) -> None:
    """One line per version."""
    published = sync.published
    print(
        f"version {published.version}: {published.n_bytes:,} of {published.n_state_bytes:,} bytes,"
        f" {published.density:.2%} changed, sent in {sync.send_s:.2f} s while generating,"
        f" paused {sync.pause_s * 1000:.1f} ms"
    )


def train(model: str, store: str, *servers: str, **settings: Any) -> AsyncGRPOTrainer:
    """Train; ``trainer.weight_transfer.syncs`` says afterwards what was sent, and the pauses."""
    questions = [f"Write the letter {letter} in ASCII." for letter in "abcdefgh"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=ascii_share,
        args=AsyncGRPOConfig(vllm_server_base_url=servers[0], **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        weight_transfer=WeightwireTransfer(store, servers, model=model, on_synced=tell),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:], output_dir="out", max_steps=20)
