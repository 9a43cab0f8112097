"""What verl does with a checkpoint engine, without a cluster: one trainer, two rollout ranks."""

import asyncio
import os

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

STORE = os.environ.get("RUN", "runs/verl")  # on a real cluster: s3://bucket/run-7

import_external_libs("weightwire.engines.verl")  # checkpoint_engine.custom_backend_module


def engine(**options):
    bucket_size = 64 << 20  # checkpoint_engine.update_weights_bucket_megabytes
    return CheckpointEngineRegistry.new(
        "weightwire", bucket_size=bucket_size, store=STORE, **options
    )


async def sync(trainer, rollouts, model, step):
    """One ``CheckpointEngineManager.update_weights``: announce, then send and receive at once."""
    metadata = [each.prepare() for each in [trainer, *rollouts]]
    sender, receivers = type(trainer).build_topology(1, len(rollouts), metadata)
    trainer.init_process_group(version=sender["version"][0])
    for rollout, version in zip(rollouts, receivers["version"], strict=True):
        rollout.init_process_group(version=version)

    async def load(rollout):
        return {name: tensor async for name, tensor in rollout.receive_weights(global_steps=step)}

    weights = ((name, p.detach()) for name, p in model.named_parameters())
    metrics, *loaded = await asyncio.gather(
        trainer.send_weights(weights, global_steps=step), *map(load, rollouts)
    )
    for each in [trainer, *rollouts]:
        each.finalize()
    return metrics, loaded


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512))  # fp32
    trainer, rollouts = engine(is_master=True), [engine(), engine()]
    for step in range(4):
        metrics, loaded = asyncio.run(sync(trainer, rollouts, model, step))
        print(
            f"step {step}: version {metrics['weightwire/version']},"
            f" {metrics['weightwire/patch_bytes']:,} bytes to each rollout rank,"
            f" {metrics['weightwire/full_bytes']:,} in all"
        )
        for weights in loaded:
            for name, parameter in model.named_parameters():
                assert torch.equal(weights[name], parameter.detach().to(torch.bfloat16))
        with torch.no_grad():  # training, at a learning rate as in RL
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter).sign(), alpha=3e-6)
    for each in [trainer, *rollouts]:
        each.close()
    print("every rollout rank holds the trainer's weights, bit for bit")


if __name__ == "__main__":
    main()
