"""``weightwire merge``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import model, run, save, state_on_disk, stepped


def make_chain(root: Path, codec: str) -> list[Path]:
    """Three versions and the two patches between them."""
    versions = [model(), stepped(model()), stepped(stepped(model()), seed=2)]
    paths = [save(root / f"v{n}", "sharded", arrays) for n, arrays in enumerate(versions)]
    for number in (1, 2):
        outcome = run(
            *("diff", paths[number - 1], paths[number]),
            *("-o", root / f"p{number}", "--codec", codec),
        )
        assert outcome.code == 0
    return paths


@pytest.mark.parametrize(("codec", "with_base"), [("compact", True), ("plain", False)])
def test_a_merged_chain_leads_from_the_first_base_to_the_last_target(
    tmp_path: Path, codec: str, with_base: bool
) -> None:
    first, _, last = make_chain(tmp_path, codec)
    base = ["--base", first] if with_base else []
    merged = tmp_path / "merged"
    outcome = run("merge", *base, tmp_path / "p1", tmp_path / "p2", "-o", merged, "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.json["codec"] == codec
    assert run("apply", first, merged, "-o", tmp_path / "out").code == 0
    assert state_on_disk(tmp_path / "out") == state_on_disk(last)


def test_compact_patches_are_not_merged_without_their_base(tmp_path: Path) -> None:
    make_chain(tmp_path, "compact")
    outcome = run("merge", tmp_path / "p1", tmp_path / "p2", "-o", tmp_path / "m", "--json")
    assert outcome.json["error"]["type"] == "IncompatiblePatches"
    assert not (tmp_path / "m").exists()


def test_patches_out_of_order_are_refused(tmp_path: Path) -> None:
    make_chain(tmp_path, "plain")
    outcome = run("merge", tmp_path / "p2", tmp_path / "p1", "-o", tmp_path / "m", "--json")
    assert outcome.json["error"]["remedy"] == "stop"


def test_a_compact_output_without_a_base_is_a_usage_error(tmp_path: Path) -> None:
    make_chain(tmp_path, "plain")
    outcome = run("merge", tmp_path / "p1", "-o", tmp_path / "m", "--codec", "compact")
    assert outcome.code == 2
    assert "--base" in outcome.stderr
