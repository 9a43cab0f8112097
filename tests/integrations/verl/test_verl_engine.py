"""The checkpoint engine in verl itself: its registry, its base class, its manager on a Ray cluster."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from isolated_scripts import ROOT, example_of, ray_environment, run_isolated, run_script
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngine
from verl.utils.import_utils import import_external_libs

from weightwire.errors import NoWay, StopError

import_external_libs("weightwire.engines.verl")


def engine(store: Path, **options: Any) -> Any:
    return CheckpointEngineRegistry.new(
        "weightwire", bucket_size=1 << 20, store=str(store), **options
    )


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(40, 8, generator=generator),
        "b.bias": torch.randn(16, generator=generator),
    }


async def sync(trainers: list[Any], rollouts: list[Any], state: dict[str, Any]) -> Any:
    """What verl's manager does: announce to all, then send and receive at once."""
    metadata = [each.prepare() for each in [*trainers, *rollouts]]
    to_trainers, to_rollouts = type(trainers[0]).build_topology(
        len(trainers), len(rollouts), metadata
    )
    for engines, options in ((trainers, to_trainers), (rollouts, to_rollouts)):
        for rank, each in enumerate(engines):
            each.init_process_group(**{name: values[rank] for name, values in options.items()})

    async def receive(rollout: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in rollout.receive_weights()}

    sends = [each.send_weights(iter(state.items())) for each in trainers]
    results = await asyncio.gather(*sends, *map(receive, rollouts))
    for each in [*trainers, *rollouts]:
        each.finalize()
    return results[: len(trainers)], results[len(trainers) :]


def assert_equal_bits(received: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert received.keys() == state.keys()
    for name, tensor in state.items():
        wanted = tensor.to(torch.bfloat16)
        assert received[name].dtype == torch.bfloat16
        assert torch.equal(received[name].view(torch.int16), wanted.view(torch.int16))


def test_verl_finds_the_backend_by_its_module(tmp_path: Path) -> None:
    assert "weightwire" in CheckpointEngineRegistry._registry
    made = engine(tmp_path / "run")
    assert isinstance(made, CheckpointEngine)
    assert made.wire_format == "named_tensors"


def test_rollout_ranks_get_every_version_and_only_the_master_publishes(tmp_path: Path) -> None:
    store = tmp_path / "run"
    trainers = [engine(store, is_master=True), engine(store)]
    rollouts = [engine(store), engine(store)]
    for seed in range(3):
        numbers, received = asyncio.run(sync(trainers, rollouts, weights(seed)))
        assert numbers[0]["weightwire/version"] == seed
        assert numbers[1] is None
        for each in received:
            assert_equal_bits(each, weights(seed))
    for each in [*trainers, *rollouts]:
        each.close()


def test_a_late_rollout_rank_gets_everything(tmp_path: Path) -> None:
    trainer, first = engine(tmp_path / "run", is_master=True), engine(tmp_path / "run")
    asyncio.run(sync([trainer], [first], weights(0)))
    late = engine(tmp_path / "run")
    _, received = asyncio.run(sync([trainer], [first, late], weights(1)))
    for each in received:
        assert_equal_bits(each, weights(1))
    for each in (trainer, first, late):
        each.close()


def test_a_trainer_that_starts_anew_goes_on_with_the_run(tmp_path: Path) -> None:
    before, rollout = engine(tmp_path / "run", is_master=True), engine(tmp_path / "run")
    asyncio.run(sync([before], [rollout], weights(0)))
    before.close()
    after = engine(tmp_path / "run", is_master=True)
    numbers, received = asyncio.run(sync([after], [rollout], weights(1)))
    assert numbers[0]["weightwire/version"] > 0
    assert_equal_bits(received[0], weights(1))
    after.close()
    rollout.close()


def test_a_tensor_that_verl_no_longer_sends_is_gone(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path / "run", is_master=True), engine(tmp_path / "run")
    asyncio.run(sync([trainer], [rollout], weights(0)))
    fewer = {"b.bias": weights(1)["b.bias"]}
    _, received = asyncio.run(sync([trainer], [rollout], fewer))
    assert_equal_bits(received[0], fewer)
    trainer.close()
    rollout.close()


def test_a_version_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    trainer = engine(tmp_path / "run", is_master=True)
    trainer.prepare()
    rollout = engine(tmp_path / "run", timeout_s=0.05)
    rollout.init_process_group(version=0)

    async def receive() -> None:
        async for _ in rollout.receive_weights():
            pass

    with pytest.raises(NoWay, match="did not come"):
        asyncio.run(receive())
    trainer.close()
    rollout.close()


def test_a_topology_without_a_master_is_refused(tmp_path: Path) -> None:
    made = engine(tmp_path / "run")
    with pytest.raises(StopError, match="exactly one"):
        type(made).build_topology(2, 1, [{}, {}, {}])


@pytest.mark.long
def test_verls_own_manager_syncs_two_trainer_and_two_rollout_ranks_on_ray(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    script = ROOT / "tests" / "integrations" / "verl" / "manager_run.py"
    with ray_environment() as environment:
        run_isolated(script, tmp_path / "run", result, environment=environment)
    found = json.loads(result.read_text())
    assert found["calls"] == ["abort", "release", "restore", "resume"] * 4
    for number, step in enumerate(found["steps"]):
        assert [each["tensors"] for each in step["received"]] == [step["expected"]] * 2
        assert {each["wire_format"] for each in step["received"]} == {"named_tensors"}
        assert step["metrics"]["weightwire/version"] == number
    last = found["steps"][-1]["metrics"]
    assert last["weightwire/patch_bytes"] < last["weightwire/full_bytes"] / 10


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    output = run_script(
        example_of("verl.md", "verl_engine.py"),
        environment={**os.environ, "RUN": str(tmp_path / "run")},
    )
    assert "bit for bit" in output
