"""One training run, followed in bf16, fp16 and fp8."""

import os

import torch
from torch import nn

import weightwire as ww
from weightwire.trainers.views import ViewPublisher, view_address

STORE = os.environ.get("RUN", "runs/views")  # or s3://bucket/run-7


def make_model():
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
views = {"fp16": "fp16", "fp8": "fp8"}
with ViewPublisher(STORE, ww.cast(model, "bf16"), views=views) as publisher:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        done = publisher.publish(step=step)
        print(f"step {step}:", {n: f.result().n_changed for n, f in done.views.items()})

half = make_model().to(torch.float16)  # a receiver of another precision, like any other
with ww.Subscriber(view_address(STORE, "fp16"), half) as subscriber:
    subscriber.update()
    assert subscriber.digest == done.views["fp16"].result().digest

eight = {}  # names, bits and scales of an fp8 checkpoint
with ww.Subscriber(view_address(STORE, "fp8"), eight) as subscriber:
    subscriber.update()
weight, scale = eight["0.weight"], eight["0.weight_scale_inv"]
print(weight.shape, weight.dtype, "with scales", scale.shape)
