"""FSDP2: every rank publishes its own shard; run it with torchrun --nproc-per-node 2 fsdp2.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import weightwire as ww
from weightwire.trainers.sharded import ShardedPublisher

STORE = os.environ.get("RUN", "runs/fsdp2")  # or s3://bucket/run-7: every rank must reach it


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))


dist.init_process_group("gloo")  # or nccl: Weightwire makes gloo groups of its own
model = make_model()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
publisher = ShardedPublisher(STORE, ww.cast(model, "bf16"))  # on every rank

for step in range(4):
    tokens = torch.randint(0, 256, (8, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    done = publisher.publish(step=step).result()  # on every rank; one version for all
publisher.close()

if dist.get_rank() == 0:
    engine = make_model().to(torch.bfloat16)  # usually in another process
    with ww.Subscriber(STORE, engine) as subscriber:
        subscriber.update()
        assert subscriber.digest == done.digest
        print("the engine holds version", subscriber.version, "of step", done.step)
dist.destroy_process_group()
