"""Real FSDP2 on real processes: the digest of one process, no gather, and a rank that is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from isolated_scripts import example_of, run_isolated

import weightwire as ww

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def trained(folder: Path, n_ranks: int, name: str, *options: object) -> list[dict[str, Any]]:
    """What every rank reports of a training run that publishes to ``folder/name``."""
    report = folder / f"report-{name}"
    arguments = ("--ranks", n_ranks, "--store", folder / name, "--report", report, *options)
    run_isolated(HERE / "fsdp2_training.py", *arguments, environment=ENVIRONMENT)
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"report-{name}-*.json"))]


def received(store: Path) -> str:
    live: dict[str, torch.Tensor] = {}
    with ww.Subscriber(store, live) as subscriber:
        subscriber.update()
    return ww.digest(live)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Versions of the same training in one process."""
    versions: list[Any] = trained(tmp_path_factory.mktemp("alone"), 1, "one", "--cast")[0][
        "versions"
    ]
    return versions


def test_two_ranks_publish_the_digests_of_one_process(alone: list[Any], tmp_path: Path) -> None:
    first, second = trained(tmp_path, 2, "two", "--cast", "--anchor-every", 2)
    assert first["versions"] == second["versions"] == alone
    assert received(tmp_path / "two") == alone[-1][1]


@pytest.mark.long
def test_ranks_never_hold_more_than_their_shard_and_a_few_pieces(tmp_path: Path) -> None:
    """A gather would show: DTensor.full_tensor is made to raise, and peaks are measured."""
    options = ("--cast", "--width", 4096, "--piece", 1 << 18, "--lr", 1e-6)
    for report in trained(tmp_path, 2, "large", *options):
        first, *patches = report["peaks"]
        assert max(patches) < report["n_bytes"] / 3
        assert first < report["n_bytes"] / 2 + (56 << 20)  # its baseline, and an anchor's chunks


def test_rank_that_is_killed_leaves_no_version_and_a_restart_goes_on(
    alone: list[Any], tmp_path: Path
) -> None:
    (left,) = trained(tmp_path, 2, "killed", "--cast", "--die-at", 2)
    assert "gone" in left["lost"]
    assert left["versions"] == alone[:2]
    for report in trained(tmp_path, 2, "killed", "--cast"):
        assert [digest for _, digest, *_ in report["versions"]] == [each[1] for each in alone]
        assert report["versions"][0][0] == 3  # 2 is the claim
    assert received(tmp_path / "killed") == alone[-1][1]


@pytest.mark.long
def test_every_placement_on_a_mesh_of_two_dimensions_is_published_or_refused_by_name(
    tmp_path: Path,
) -> None:
    script, report = HERE / "dtensor_layouts.py", tmp_path / "report"
    run_isolated(script, tmp_path / "runs", report, environment=ENVIRONMENT)
    for file in tmp_path.glob("report-*.json"):
        found = json.loads(file.read_text())
        assert found["placed"][0] == found["placed"][1]
        assert found["parallel"][0] == found["parallel"][1]
        assert "'sums'" in found["refusal"]


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    options = ("--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", 29511)
    said = run_isolated(
        HERE / "torchrun.py",
        *options,
        example_of("fsdp2.md", "fsdp2.py"),
        environment={**ENVIRONMENT, "RUN": str(tmp_path / "run")},
    )
    assert "the engine holds version 3 of step 3" in said
