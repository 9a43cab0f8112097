"""A trainer and two rollout actors on a Ray cluster."""

import os

import ray
import torch

import weightwire as ww
from weightwire.engines.ray import rollout_actors

STORE = os.environ.get("RUN", "runs/ray")  # on a real cluster: s3://bucket/run-7


def make_model():
    return torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))


@torch.no_grad()
def generate(model, prompts):
    return model(prompts).argmax(-1)


def main():
    ray.init(include_dashboard=False, object_store_memory=80 << 20)  # or address="auto"
    model = make_model()
    publisher = ww.Publisher(STORE, model)
    publisher.publish().result()
    actors = rollout_actors(2, STORE, make_model, generate, actor_options={"num_cpus": 0.5})

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prompts = torch.arange(64).reshape(4, 16)
    for step in range(1, 6):
        rollouts = ray.get([actor.generate.remote(prompts) for actor in actors])
        print("step", step, "made by versions", [rollout.version for rollout in rollouts])
        loss = torch.nn.functional.cross_entropy(
            model(prompts).flatten(0, 1), rollouts[0].output.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = publisher.publish(step=step).result()

    ray.get([actor.update_to.remote(done.version) for actor in actors])
    statuses = ray.get([actor.status.remote() for actor in actors])
    assert {status.digest for status in statuses} == {done.digest}
    print("all actors hold version", done.version)
    ray.get([actor.close.remote() for actor in actors])
    publisher.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
