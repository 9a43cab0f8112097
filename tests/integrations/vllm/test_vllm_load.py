"""Syncs while requests run."""

from __future__ import annotations

import statistics
import time

import pytest
from vllm_load import Load
from vllm_runs import World

N_SYNCS = 20


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_no_request_fails_and_no_forward_pass_mixes_versions_while_weights_change(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(ranks)
    store, run = world.new_run()
    run.publish()
    world.client.connect(store)
    world.server.rpc("probe_start")
    known = [{report["now"]} for report in world.server.rpc("probe_report")]
    pauses = []
    with Load(world.server) as load:
        for version in range(1, N_SYNCS + 1):
            run.publish()
            n_done = load.n_done
            pauses.append(world.client.update(version))
            for digests, report in zip(known, world.server.rpc("probe_report"), strict=True):
                digests.add(report["now"])
            while load.n_done == n_done:
                time.sleep(0.01)
    run.close()
    reports = world.server.rpc("probe_report")
    world.server.rpc("probe_stop")

    totals = [pause.total_s * 1e3 for pause in pauses]
    print(
        f"{pauses[0].n_ranks} rank(s): {load.n_done} requests and {load.n_tokens:,} tokens during "
        f"{N_SYNCS} syncs; pause median {statistics.median(totals):.1f} ms, "
        f"longest {max(totals):.1f} ms"
    )
    assert load.failures == []
    assert load.n_done >= N_SYNCS
    for digests, report in zip(known, reports, strict=True):
        assert report["n_torn"] == 0
        assert len(digests) == N_SYNCS + 1
        assert set(report["seen"]) <= digests
        assert len(report["seen"]) > N_SYNCS // 2
