"""The rollout actor without Ray: what it generates says which version made it."""

from __future__ import annotations

import sys

import pytest
import torch

from engines.small_runs import SOON, SmallRun, bits_of, small_module
from weightwire.engines.ray import RolloutActor, rollout_actors
from weightwire.errors import ExtraMissing, NoWay


def first_bits(module: torch.nn.Module, prompts: list[int], *, scale: int) -> tuple[bytes, int]:
    return bits_of(module)["0.weight"], sum(prompts) * scale


def test_a_rollout_names_the_version_that_made_it(run: SmallRun) -> None:
    actor = RolloutActor(run.store, small_module, first_bits, polling=SOON, worker="one")
    try:
        for _ in range(3):
            version = run.publish()
            assert actor.update_to(version) == version
            rollout = actor.generate([1, 2], scale=10)
            assert (rollout.version, rollout.worker) == (version, "one")
            assert rollout.digest == run.digests[version]
            assert rollout.output == (run.bits[version]["0.weight"], 30)
        status = actor.status()
        assert (status.version, status.first_version, status.first_lag) == (3, 0, 0)
        assert (status.n_updates, status.n_rollouts, status.is_dirty) == (4, 3, False)
        assert status.n_bytes > 0
    finally:
        actor.close()


def test_a_version_that_does_not_come_is_not_waited_for_for_ever(run: SmallRun) -> None:
    actor = RolloutActor(run.store, small_module, first_bits)
    try:
        with pytest.raises(NoWay, match="holds version 0, not 7"):
            actor.update_to(7, timeout_s=0.05)
    finally:
        actor.close()


def test_actors_without_ray_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissing, match="pip install"):
        rollout_actors(1, "somewhere", small_module, first_bits)
