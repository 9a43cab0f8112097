"""A plain torch training loop that publishes every step as bf16, and an engine that follows."""

import os

import torch
from torch import nn

import weightwire as ww

STORE = os.environ.get("RUN", "runs/plain-torch")  # or s3://bucket/run-7


def make_model():
    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))


torch.manual_seed(0)
model = make_model()  # fp32 masters
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
publisher = ww.Publisher(STORE, ww.cast(model, "bf16"))  # rounded as it is read, no second copy
publisher.publish(step=0)

for step in range(1, 9):
    tokens = torch.randint(0, 256, (8, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:  # two optimizer steps between syncs are one diff
        done = publisher.publish(step=step).result()
        print(f"version {done.version}: {done.density:.1%} changed, {done.n_bytes:,} bytes")
publisher.close()

engine = make_model().to(torch.bfloat16)  # usually in another process
with ww.Subscriber(STORE, engine) as subscriber:
    subscriber.update()
    assert subscriber.digest == done.digest == ww.digest(model.to(torch.bfloat16))
    print("the engine holds version", subscriber.version)
