"""Tensors placed in every way on a 2×2 mesh of processes, published, and compared with the whole.

python dtensor_layouts.py STORE REPORT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_training import start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import weightwire as ww
from weightwire.errors import UnsupportedLayout
from weightwire.trainers.sharded import ShardedPublisher

PLACEMENTS = {
    "rows": [Shard(0), Shard(0)],
    "replicas": [Replicate(), Shard(0)],
    "replicas_inside": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "both_turned": [Shard(1), Shard(0)],
    "everywhere": [Replicate(), Replicate()],
}


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(mesh: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same tensors, whole and placed: with more rows than ranks, with fewer, with none."""
    whole, spread = {}, {}
    for number, (name, placements) in enumerate(PLACEMENTS.items()):
        for shape in ((10, 6), (7, 5), (3, 4), (1, 3), (0, 2)):
            key = f"{name}.{shape[0]}"
            whole[key] = draw(shape, number)
            spread[key] = distribute_tensor(whole[key].clone(), mesh, placements)
    whole["plain"], spread["plain"] = draw((3,), 99), draw((3,), 99)
    return whole, spread


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)


def tensor_parallel(mesh: Any) -> tuple[nn.Module, nn.Module]:
    """FSDP2 over tensor parallelism, and the same weights in one piece."""
    torch.manual_seed(5)
    whole, model = Block(), Block()
    model.load_state_dict(whole.state_dict())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["inner"], plan)
    fully_shard(model, mesh=mesh["outer"])
    return whole, model


def published(store: str, state: Any) -> str:
    """Two versions of it: the second is a patch."""
    with ShardedPublisher(store, state) as publisher:
        publisher.publish().result()
        with torch.no_grad():
            for tensor in state.values() if isinstance(state, dict) else state.parameters():
                tensor.mul_(2)
        return str(publisher.publish().result().digest)


def twice(state: Any) -> str:
    tensors = state if isinstance(state, dict) else state.state_dict()
    return ww.digest({name: tensor.detach() * 2 for name, tensor in tensors.items()})


def refusal(store: str, mesh: Any) -> str:
    partial = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()])
    with ShardedPublisher(store, {"sums": partial}) as publisher:
        try:
            publisher.publish().result()
        except UnsupportedLayout as error:
            return str(error)
    return ""


def main() -> None:
    store, report = sys.argv[1:]
    if "RANK" not in os.environ:
        sys.exit(start_ranks(4))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole, spread = placed(mesh)
    model, parallel = tensor_parallel(mesh)
    found = {
        "placed": [published(f"{store}/placed", spread), twice(whole)],
        "parallel": [published(f"{store}/parallel", parallel), twice(model)],
        "refusal": refusal(f"{store}/refused", mesh),
    }
    Path(f"{report}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
