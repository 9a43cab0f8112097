"""A real Ray cluster of local processes: an actor is killed in mid-run, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from isolated_scripts import ROOT, example_of, ray_environment, run_isolated


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with ray_environment() as made:
        yield made


@pytest.fixture(scope="module")
def result(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the example, with one actor killed by SIGKILL after the fourth step."""
    file = tmp_path_factory.mktemp("ray") / "result.json"
    script = ROOT / "examples" / "ray_cluster.py"
    run_isolated(script, "--steps", 10, "--kill-at", 4, "--json", file, environment=environment)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_run_goes_on_while_a_killed_actor_is_away(result: dict[str, Any]) -> None:
    assert result["n_steps_without_the_killed"] >= 1
    assert result["version"] >= 10


def test_the_killed_actor_comes_back_at_the_newest_version(result: dict[str, Any]) -> None:
    returned = result["returned"]
    assert returned["new_pid"] != returned["killed_pid"]
    assert returned["returned_at"] > returned["killed_at"]
    assert returned["lag"] == 0


def test_every_actor_ends_with_the_bits_that_were_published(result: dict[str, Any]) -> None:
    assert len(result["actors"]) == 2
    for actor in result["actors"]:
        assert (actor["version"], actor["digest"]) == (result["version"], result["digest"])
        assert not actor["is_dirty"]


def test_the_actor_that_was_never_killed_saw_patches_only_after_its_first_version(
    result: dict[str, Any],
) -> None:
    [survivor] = [a for a in result["actors"] if a["pid"] != result["returned"]["new_pid"]]
    assert survivor["n_updates"] > 1
    assert survivor["first_version"] < result["returned"]["killed_at"] + 1


@pytest.mark.long
def test_the_example_of_the_page_runs(environment: dict[str, str], tmp_path: Path) -> None:
    output = run_isolated(
        example_of("ray.md", "ray_cluster.py"),
        environment={**environment, "RUN": str(tmp_path / "run")},
    )
    assert "all actors hold version 5" in output
