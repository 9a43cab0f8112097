"""verl's own manager, workers and registry on a real Ray cluster; the model and the loader are small.

    python manager_run.py STORE RESULT.json

Two trainer ranks, two rollout ranks. ``CheckpointEngineManager.update_weights`` does what it does
in a training run; only the rollout's loader is a stand-in, which writes down what it was given.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

MODULE = "weightwire.engines.verl"
N_STEPS = 4


def sha256(tensor: torch.Tensor) -> str:
    bits = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()


class Trainer(Worker):
    """A trainer rank, as verl's own: its checkpoint engine sends what the model engine gathers."""

    def __init__(self, store: str) -> None:
        super().__init__()
        import_external_libs(MODULE)
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256))
        self._chance = torch.Generator().manual_seed(1)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "weightwire", is_master=self.rank == 0, bucket_size=1 << 20, store=store
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:  # noqa: ARG002
        weights = ((name, p.detach().clone()) for name, p in self._model.named_parameters())
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*arguments, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> dict[str, str]:
        """One step, the same on every rank; what the weights are now."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                noise = torch.randn(parameter.shape, generator=self._chance)
                parameter.add_(noise.sign(), alpha=3e-6)
        return {name: sha256(p) for name, p in self._model.named_parameters()}


class WritesDown:
    """A stand-in for verl's server adapter: takes tensors, and notes what they were."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self, folder: str) -> None:
        self._folder = folder

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = ""
    ) -> None:
        found = {name: sha256(tensor) async for name, tensor in weights}
        file = Path(self._folder) / f"{global_steps}-{os.getpid()}.json"
        file.write_text(json.dumps({"wire_format": wire_format, "tensors": found}))


class Replica:
    """A stand-in for a rollout replica, which is asked to pause and to go on."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers, self.calls = workers, list[str]()

    async def abort_all_requests(self, reject_request: bool = False) -> None:  # noqa: ARG002
        self.calls.append("abort")

    async def release_kv_cache(self) -> None:
        self.calls.append("release")

    async def resume_kv_cache(self) -> None:
        self.calls.append("restore")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


def group(cls: type, *arguments: Any, n_ranks: int = 2, **options: Any) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[n_ranks], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(cls), *arguments, **options)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made)


def main(store: str, result: Path) -> None:
    notes = result.parent / "notes"
    notes.mkdir()
    config = CheckpointEngineConfig(
        backend="weightwire",
        custom_backend_module=MODULE,
        engine_kwargs={"weightwire": {"store": store}},
    )
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    trainers = group(Trainer, store)
    rollouts = group(
        CheckpointEngineWorker,
        rollout_config=rollout_config,
        model_config=None,
        server_adapter=WritesDown(str(notes)),
    )
    replica = Replica(rollouts.workers)
    manager = CheckpointEngineManager(config, trainers, [replica])
    steps = []
    for step in range(N_STEPS):
        expected = trainers.train()[0]
        metrics = manager.update_weights(global_steps=step)
        received = [json.loads(file.read_text()) for file in notes.glob(f"{step}-*.json")]
        steps.append({"expected": expected, "received": received, "metrics": metrics})
    result.write_text(json.dumps({"steps": steps, "calls": replica.calls}))


if __name__ == "__main__":
    ray.init(include_dashboard=False, num_cpus=8, object_store_memory=80 << 20)
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    finally:
        ray.shutdown()
