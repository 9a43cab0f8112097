"""``weightwire diff``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import FORMS, make_pair, model, names_under, run, save, state_on_disk, stepped

import weightwire


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_diff_then_apply_gives_every_bit_of_the_target(
    tmp_path: Path, form: str, codec: str
) -> None:
    pair = make_pair(tmp_path, form, codec)
    out = tmp_path / ("out.safetensors" if form == "file" else "out")
    assert run("apply", pair.base, pair.patch, "-o", out).code == 0
    assert state_on_disk(out) == state_on_disk(pair.target)


def test_diff_json_is_one_object_with_the_sizes(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "folder", model())
    target = save(tmp_path / "target", "folder", stepped(model()))
    found = run("diff", base, target, "-o", tmp_path / "patch", "--json", "--threads", 1).json
    patch = weightwire.Patch.load(tmp_path / "patch")
    assert found["n_changed"] == 64 * 50 // 10 + 90 * 30 // 10
    assert found["n_bytes"] == sum(f.stat().st_size for f in (tmp_path / "patch").iterdir())
    assert found["n_full_bytes"] == sum(array.nbytes for array in model().values())
    assert found["times_smaller"] == found["n_full_bytes"] / found["n_bytes"]
    assert (found["base_digest"], found["target_digest"]) == (
        patch.base_digest,
        patch.target_digest,
    )


def test_diff_of_equal_states_has_no_changes(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "file", model())
    found = run("diff", base, base, "-o", tmp_path / "patch", "--json").json
    assert found["n_changed"] == 0
    assert found["bytes_per_change"] is None
    assert found["base_digest"] == found["target_digest"]


def test_diff_summary_for_people_names_density_and_digests(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("diff", pair.base, pair.target, "-o", tmp_path / "again")
    patch = weightwire.Patch.load(pair.patch)
    assert "590 (" in outcome.stdout
    assert "bytes per change" in outcome.stdout
    assert patch.target_digest in outcome.stdout


def test_diff_refuses_an_existing_output_and_leaves_it_alone(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    before = {path.name: path.read_bytes() for path in pair.patch.iterdir()}
    outcome = run("diff", pair.base, pair.target, "-o", pair.patch)
    assert outcome.code == 2
    assert "exists" in outcome.stderr
    assert before == {path.name: path.read_bytes() for path in pair.patch.iterdir()}


def test_diff_overwrites_a_patch_when_asked_to(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("diff", pair.target, pair.base, "-o", pair.patch, "--overwrite", "--json")
    assert outcome.code == 0
    assert weightwire.Patch.load(pair.patch).target_digest == outcome.json["target_digest"]
    assert run("verify", pair.base, pair.patch).code == 0
    assert names_under(tmp_path) == {"base", "target", "patch"}


def test_diff_never_overwrites_what_is_not_a_patch(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("diff", pair.base, pair.target, "-o", pair.base, "--overwrite")
    assert outcome.code == 2
    assert state_on_disk(pair.base) != state_on_disk(pair.target)


def test_diff_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "file", model())
    target = save(tmp_path / "target", "file", stepped(model()))
    target.write_bytes(target.read_bytes()[:-1])
    outcome = run("diff", base, target, "-o", tmp_path / "patch", "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["remedy"] == "retry"
    assert names_under(tmp_path) == {"base.safetensors", "target.safetensors"}
