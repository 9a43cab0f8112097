"""A trainer and a vLLM server that follows it: a complete run, small enough for a laptop.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \
        --weight-transfer-config '{"backend": "weightwire"}' \
        --worker-extension-cls weightwire.engines.vllm.worker.WeightwireWorker

    python vllm_follow.py MODEL http://127.0.0.1:8000 runs/demo

MODEL is a checkpoint folder. The trainer takes a few AdamW steps and publishes each; the server is
brought to every version while it serves, and what it holds in the end is proven from its memory.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

import weightwire as ww
from weightwire.engines.vllm import VllmServer

N_STEPS = 5


def main(model_folder: str, url: str, store: str) -> None:
    """Train, publish, and keep the server current."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def weights() -> list[tuple[str, torch.Tensor]]:
        return [(name, p.detach().bfloat16()) for name, p in model.named_parameters()]

    with ww.Publisher(store, weights) as publisher:
        publisher.publish().result()  # version 0: a whole checkpoint
        server = VllmServer(url)
        server.connect(store)  # the server is at version 0 now

        for _ in range(N_STEPS):
            train_step(model, optimizer)
            done = publisher.publish().result()
            pause = server.update(done.version)  # staged while it serves; then the pause
            print(
                f"version {done.version}: {done.density:.2%} changed, {done.n_bytes:,} bytes,"
                f" paused for {pause.total_s * 1e3:.0f} ms"
            )

        n_tensors = server.prove(done.version, done.digest)
        print(f"{n_tensors} tensors proven, bit for bit, from the server's memory")
        server.close()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Any step will do; this one learns random tokens."""
    tokens = torch.randint(0, 256, (4, 32))
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
