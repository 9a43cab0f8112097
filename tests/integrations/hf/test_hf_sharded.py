"""Several processes: of copies the main one publishes, of shards every one its part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_training import moe_model
from tiny_models import Shape, new_model
from torch import distributed
from transformers import TrainerControl, TrainerState
from witnesses import assert_same_bits, followed, saved

from weightwire.errors import UnsupportedLayout
from weightwire.store.memory import MemoryStore
from weightwire.trainers.hf import WeightwireCallback

# transformers looks at the storage of shards in a way that torch would rather not see.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


@pytest.fixture
def one_rank(isolated: None) -> Iterator[Any]:
    """A mesh of one: gloo listens on every interface, hence ``isolated``."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_sharded_model_is_published_as_its_checkpoint(one_rank: Any, tmp_path: Path) -> None:
    model = new_model(Shape())
    first = saved(model, tmp_path)
    distributed.fsdp.fully_shard(model, mesh=one_rank)
    store, state = MemoryStore(), TrainerState(max_steps=1)
    callback = WeightwireCallback(store)
    callback.on_train_begin(None, state, TrainerControl(), model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    state.global_step = 1
    callback.on_step_end(None, state, TrainerControl(), model=model)
    callback.on_train_end(None, state, TrainerControl(), model=model)

    whole = new_model(Shape())
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(1.01)
    versions = [tensors for _, _, tensors in followed(store, tmp_path / "followed")]
    assert_same_bits(versions[0], first)
    assert_same_bits(versions[1], saved(whole, tmp_path))


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.long), "fsdp2"])
def test_two_processes_publish_one_run(kind: str, isolated: None, tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command += [str(here / "ranks_actor.py"), kind, str(tmp_path / "run"), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(here.parent),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = []
    for _, step, tensors in followed(tmp_path / "run", tmp_path / "followed"):
        assert_same_bits(tensors, torch.load(tmp_path / f"step-{step}.pt"))
        steps.append(step)
    assert steps == [0, 1, 2, 3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning", "ignore:.*FSDP:FutureWarning")
@pytest.mark.usefixtures("one_rank")
def test_fsdp1_shards_are_refused_and_what_to_use_is_named() -> None:
    model = distributed.fsdp.FullyShardedDataParallel(
        new_model(Shape()), device_id=torch.device("cpu"), use_orig_params=True
    )
    with pytest.raises(UnsupportedLayout, match=r"FSDP1.*ShardedPublisher"):
        WeightwireCallback(MemoryStore()).on_train_begin(
            None, TrainerState(), TrainerControl(), model=model
        )


def test_sharded_experts_that_are_saved_apart_are_refused(one_rank: Any) -> None:
    model = moe_model("Mixtral")
    distributed.fsdp.fully_shard(model, mesh=one_rank)
    callback = WeightwireCallback(MemoryStore())
    with pytest.raises(UnsupportedLayout, match="stacked experts"):
        callback.on_train_begin(None, TrainerState(), TrainerControl(), model=model)
