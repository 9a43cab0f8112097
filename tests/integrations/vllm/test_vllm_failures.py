"""What goes wrong, and what the server does then: it answers."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error

import pytest
import torch
from vllm_runs import Run, World

from weightwire.errors import (
    Dirty,
    EngineRefused,
    EngineUnavailable,
    NotARun,
    NoWay,
    RetryError,
    StopError,
    UnsupportedLayout,
)
from weightwire.testing.seaweed import seaweed_server


@pytest.fixture(params=["one_rank", "two_ranks"])
def world(request: pytest.FixtureRequest) -> World:
    """Both servers in turn: what one rank survives may be the end of two."""
    return request.getfixturevalue(request.param)


def begin(world: World, n_versions: int = 2) -> Run:
    """A run with a few versions, and the server at version 0 of it."""
    store, run = world.new_run()
    run.publish()
    world.client.connect(store)
    for _ in range(1, n_versions):
        run.publish()
    return run


def reach_fresh(world: World, run: Run, next_version: int) -> None:
    """Go on as if nothing had happened: the version a fresh load is known of must come out."""
    for version in range(next_version, world.trained.fresh + 1):
        run.publish()
        world.client.update(version)
    run.close()
    assert world.server.get("/is_paused") == {"is_paused": False}
    assert world.server.checksums() == world.fresh_checksums
    assert world.greedy() == world.fresh_tokens


def test_a_store_that_is_gone_stops_staging_and_nothing_else(one_rank: World) -> None:
    with seaweed_server(one_rank.folder / "seaweed") as s3:
        _, run = one_rank.new_run(s3.open("run"))
        run.publish()
        one_rank.client.connect(s3.url("run"), options=s3.options, retry_s=1.0)
        for version in range(1, one_rank.trained.fresh + 1):
            run.publish()
            one_rank.client.update(version)
        run.publish()
        run.close()
    with pytest.raises(RetryError):
        one_rank.client.update(one_rank.trained.fresh + 1)
    assert one_rank.client.status().version == one_rank.trained.fresh
    assert one_rank.server.checksums() == one_rank.fresh_checksums
    assert one_rank.greedy() == one_rank.fresh_tokens


def test_what_was_not_staged_is_not_activated_by_the_client(one_rank: World) -> None:
    run = begin(one_rank)
    with pytest.raises(EngineRefused, match="version 1 is not staged"):
        one_rank.client.activate(1)
    assert one_rank.client.status().version == 0
    one_rank.client.update(1)
    reach_fresh(one_rank, run, 2)


def test_vllms_own_calls_stage_in_the_pause(world: World) -> None:
    run = begin(world)
    world.server.post("/pause?mode=keep")
    world.server.post("/start_weight_update")
    world.server.post("/update_weights", {"update_info": {"version": 1}})
    world.server.post("/finish_weight_update", {"weight_version": "one"})
    world.server.post("/resume")
    assert world.client.status().version == 1
    assert world.server.get("/weight_info") == {"weight_version": "one"}
    reach_fresh(world, run, 2)


def test_a_version_that_does_not_exist_is_refused_and_the_ranks_stay_in_step(world: World) -> None:
    run = begin(world)
    with pytest.raises(NoWay, match="no version 99"):
        world.client.update(99)
    for wrong in ({"version": 99}, {"version": -1}, {"no such": "field"}, {"version": "x"}):
        world.server.post("/start_weight_update")
        with pytest.raises(urllib.error.HTTPError):
            world.server.post("/update_weights", {"update_info": wrong})
    with pytest.raises(NotARun):
        world.client.connect(world.folder / "nothing here")
    with pytest.raises(EngineRefused, match="not a version"):
        world.client.update(-1)
    world.client.update(1)
    with pytest.raises(EngineRefused, match="versions only go forward"):
        world.client.update(0)
    reach_fresh(world, run, 2)


def test_a_tensor_of_another_shape_is_refused_by_name(world: World) -> None:
    run = begin(world)
    other = dict(world.trained.versions[1])
    other["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    published = run.publish(other)
    with pytest.raises(UnsupportedLayout, match=r"model\.norm\.weight"):
        world.client.update(published.version)
    assert world.client.status().version == 0
    tokens = world.greedy()
    store, fresh = world.new_run()
    fresh.publish()
    world.client.connect(store)
    assert world.greedy() == tokens
    run.close()
    reach_fresh(world, fresh, 1)


def test_activating_twice_changes_nothing(one_rank: World) -> None:
    run = begin(one_rank)
    one_rank.client.update(1)
    before = one_rank.server.checksums()
    assert one_rank.client.activate(1).version == 1
    one_rank.client.stage(1)
    one_rank.client.wait_staged(1)
    one_rank.client.activate(1)
    assert one_rank.server.checksums() == before
    reach_fresh(one_rank, run, 2)


def test_a_pause_of_somebody_else_is_respected(one_rank: World) -> None:
    run = begin(one_rank)
    one_rank.client.stage(1)
    one_rank.client.wait_staged(1)
    with pytest.raises(EngineRefused, match="is not paused, and should be"):
        one_rank.client.activate(1, inside_pause=True)
    one_rank.server.post("/pause?mode=keep")
    with pytest.raises(EngineRefused, match="by somebody else"):
        one_rank.client.activate(1)
    one_rank.client.activate(1, inside_pause=True)
    assert one_rank.server.get("/is_paused") == {"is_paused": True}
    one_rank.server.post("/resume")
    assert one_rank.client.wait_checked().version == 1
    reach_fresh(one_rank, run, 2)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_other_ways_to_pause_work_too(one_rank: World, mode: str) -> None:
    run = begin(one_rank)
    one_rank.client.update(1, mode=mode)
    reach_fresh(one_rank, run, 2)


def test_damage_in_live_memory_is_found_and_mended(world: World) -> None:
    run = begin(world)
    world.client.update(1)
    world.server.rpc("probe_damage")
    assert all(rank.version == 1 for rank in world.client.status().ranks)
    reach_fresh(world, run, 2)


def test_ranks_that_hold_different_versions_stay_paused_until_they_are_mended(
    two_ranks: World,
) -> None:
    run = begin(two_ranks)
    two_ranks.server.rpc("probe_fail_activation")
    with pytest.raises(Dirty, match="left paused: rank 0: version 0 and dirty, rank 1: version 1"):
        two_ranks.client.update(1)
    assert two_ranks.server.get("/is_paused") == {"is_paused": True}
    two_ranks.client.update(1)
    reach_fresh(two_ranks, run, 2)


def test_one_rank_whose_activation_fails_is_mended_too(one_rank: World) -> None:
    run = begin(one_rank)
    one_rank.server.rpc("probe_fail_activation")
    with pytest.raises(Dirty, match="left paused"):
        one_rank.client.update(1)
    one_rank.client.update(1)
    reach_fresh(one_rank, run, 2)


DYING = """
import os, sys
from weightwire.engines.vllm import VllmServer

class Dying(VllmServer):
    def _tell(self, path, body=None):
        if sys.argv[2] == "after update":
            super()._tell(path, body)
        if path == "/update_weights":
            os.kill(os.getpid(), 9)
        if sys.argv[2] != "after update":
            super()._tell(path, body)

Dying(sys.argv[1]).update(1)
"""


@pytest.mark.parametrize(
    ("ranks", "moment"), [("one_rank", "before update"), ("two_ranks", "after update")]
)
def test_a_client_killed_inside_the_pause_is_taken_over_from(
    ranks: str, moment: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(ranks)
    run = begin(world)
    command = [sys.executable, "-c", DYING, world.server.url, moment]
    died = subprocess.run(command, check=False, timeout=60)
    assert died.returncode == -9
    assert world.server.get("/is_paused") == {"is_paused": True}
    world.client.stage(1)
    world.client.wait_staged(1)
    _activate_after_takeover(world)
    assert world.client.status().version == 1
    assert world.server.get("/weight_info") == {"weight_version": "1"}
    reach_fresh(world, run, 2)


def _activate_after_takeover(world: World) -> None:
    """The dead client may still be waited for; a moment later it is not."""
    for _ in range(100):
        try:
            world.client.activate(1)
            return
        except EngineUnavailable:
            time.sleep(0.05)
    pytest.fail("a dead client was waited for without end")


def test_aborting_forgets_what_was_staged(one_rank: World) -> None:
    run = begin(one_rank)
    one_rank.client.stage(1)
    one_rank.client.wait_staged(1)
    one_rank.client.abort()
    with pytest.raises(EngineRefused, match="nothing is"):
        one_rank.client.activate(1)
    one_rank.client.update(1)
    reach_fresh(one_rank, run, 2)


def test_a_server_without_the_routes_is_refused_with_the_way_to_start_it(one_rank: World) -> None:
    with pytest.raises(StopError, match="VLLM_SERVER_DEV_MODE=1"):
        one_rank.client._calls.post("/no_such_route")
