"""A trainer beside an SGLang server that follows its run.

    python -m sglang.launch_server --model-path MODEL --tp 2 \
        --custom-weight-loader weightwire.engines.sglang.load
"""

import os

import torch

import weightwire as ww
from weightwire.engines.sglang import SglangServer

STORE = os.environ.get("RUN", "runs/sglang")  # as the server sees it; or s3://bucket/run-7
SERVER = os.environ.get("SGLANG", "http://127.0.0.1:30000")


def main(weights, train_step, n_steps=3):
    publisher = ww.Publisher(STORE, weights)  # Hugging Face names, as in the server's checkpoint
    publisher.publish().result()
    server = SglangServer(SERVER)
    server.connect(STORE)
    for _ in range(n_steps):
        train_step(weights)
        done = publisher.publish().result()
        server.stage(done.version)  # every rank fetches, decodes and proves while requests run
        server.wait_staged(done.version)
        pause = server.activate(done.version)
        print(
            f"version {pause.version}: {done.n_bytes:,} of {done.n_state_bytes:,} bytes,"
            f" paused {pause.total_s * 1000:.1f} ms, {pause.activate_s * 1000:.1f} of them to write"
        )
    assert server.wait_checked().version == done.version
    print("all ranks hold version", done.version)
    server.close()
    publisher.close()


def some_weights():
    """In place of a model: a checkpoint in bf16."""
    from safetensors.torch import load_file

    return load_file(os.environ["CHECKPOINT"])


def step(weights):
    """In place of training: a few bits move."""
    for tensor in weights.values():
        moved = (torch.rand(tensor.shape) < 0.01).to(torch.int16)
        tensor.view(torch.int16).add_(moved)


if __name__ == "__main__":
    main(some_weights(), step)
