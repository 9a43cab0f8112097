"""``weightwire apply``, and the library calls behind it."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sample_runs import (
    FORMS,
    Arrays,
    make_pair,
    model,
    names_under,
    run,
    save,
    state_on_disk,
    stepped,
)

import weightwire
from weightwire.apply.files import apply_in_place, apply_to_new
from weightwire.checkpoint.disk import LocalDisk
from weightwire.codec.index import seal
from weightwire.errors import BaseMismatch


class PowerCutError(Exception):
    """Stands for the moment after which nothing of the process runs."""


def restructured() -> Arrays:
    """The next version with a tensor gone, one new, one retyped and one reshaped."""
    new = stepped(model())
    del new["norm.weight"]
    new["fresh.weight"] = np.arange(12, dtype=np.float32).reshape(3, 4)
    new["layer.scale"] = new["layer.scale"].astype(ml_dtypes.bfloat16)
    new["embed.weight"] = new["embed.weight"].reshape(50, 64)
    return new


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_in_place_gives_every_bit_of_the_target(tmp_path: Path, form: str, codec: str) -> None:
    pair = make_pair(tmp_path, form, codec)
    outcome = run("apply", pair.base, pair.patch, "--in-place", "--json")
    assert outcome.json["n_changed"] == 590
    assert not outcome.json["was_target"]
    assert state_on_disk(pair.base) == state_on_disk(pair.target)


def test_in_place_twice_says_that_it_is_there_already(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    run("apply", pair.base, pair.patch, "--in-place")
    again = run("apply", pair.base, pair.patch, "--in-place", "--json")
    assert again.code == 0
    assert again.json["was_target"]
    assert "already" in run("apply", pair.base, pair.patch, "--in-place").stdout


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_place", [True, False])
def test_new_removed_retyped_and_reshaped_tensors_arrive(
    tmp_path: Path, form: str, in_place: bool
) -> None:
    base = save(tmp_path / "base", form, model())
    target = save(tmp_path / "target", form, restructured())
    run("diff", base, target, "-o", tmp_path / "patch")
    out = base if in_place else base.with_stem("out")
    where = ["--in-place"] if in_place else ["-o", out]
    outcome = run("apply", base, tmp_path / "patch", *where)
    assert outcome.code == 0, outcome.stderr
    assert state_on_disk(out) == state_on_disk(target)


def test_restructuring_in_place_reaches_through_a_link_to_the_folder(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "sharded", model())
    target = save(tmp_path / "target", "sharded", restructured())
    run("diff", base, target, "-o", tmp_path / "patch")
    (tmp_path / "link").symlink_to(base)
    assert run("apply", tmp_path / "link", tmp_path / "patch", "--in-place").code == 0
    assert (tmp_path / "link").is_symlink()
    assert state_on_disk(base) == state_on_disk(target)


def test_in_place_finishes_an_apply_that_died_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path)

    def rename_and_die(self: LocalDisk, source: Path, target: Path) -> None:
        source.rename(target)
        raise PowerCutError

    with monkeypatch.context() as patcher:
        patcher.setattr(LocalDisk, "rename", rename_and_die)
        with pytest.raises(PowerCutError):
            apply_in_place(pair.base, weightwire.Patch.load(pair.patch))
    refused = run("apply", pair.base, pair.patch, "-o", tmp_path / "out", "--json")
    assert refused.json["error"]["type"] == "InterruptedApply"
    outcome = run("apply", pair.base, pair.patch, "--in-place", "--json")
    assert (outcome.code, outcome.json["n_recovered"]) == (0, 1)
    assert "finished" in outcome.stderr
    assert state_on_disk(pair.base) == state_on_disk(pair.target)


@pytest.mark.parametrize("where", [["--in-place"], ["-o", "out"]])
@pytest.mark.parametrize("name", ["embed.weight", "layer.scale", "norm.weight"])
def test_a_wrong_base_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = make_pair(tmp_path)
    other = model()
    other[name].reshape(-1).view(np.uint8)[3] ^= 1
    shutil.rmtree(pair.base)
    save(pair.base, "sharded", other)
    before = state_on_disk(pair.base)
    outcome = run("apply", pair.base, pair.patch, *where, "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == "BaseMismatch"
    assert outcome.json["error"]["remedy"] == "resync"
    assert name in outcome.json["error"]["message"]
    assert state_on_disk(pair.base) == before
    assert names_under(tmp_path) == {"base", "target", "patch"}


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    shutil.rmtree(pair.base)
    save(pair.base, "sharded", {n: a for n, a in model().items() if n != "norm.weight"})
    outcome = run("apply", pair.base, pair.patch, "-o", tmp_path / "out", "--json")
    assert outcome.json["error"]["type"] == "MissingTensor"
    assert "what to do: resync" in outcome.stderr


def test_a_damaged_bucket_is_a_retry(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    bucket = pair.patch / "bucket-00000.safetensors"
    raw = bytearray(bucket.read_bytes())
    raw[-1] ^= 1
    bucket.write_bytes(raw)
    outcome = run("apply", pair.base, pair.patch, "--in-place", "--json")
    assert outcome.json["error"] | {"message": ""} == {
        "type": "HashMismatch",
        "message": "",
        "remedy": "retry",
    }


def test_an_index_that_promises_another_target_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    digest = weightwire.Patch.load(pair.patch).target_digest
    index = pair.patch / "patch.json"
    lying = index.read_bytes().replace(digest.encode(), b"0" * 32)
    index.write_bytes(seal(lying[: lying.rindex(b',"sha256":')] + b"}"))
    for where in (["--in-place"], ["-o", tmp_path / "out"]):
        outcome = run("apply", pair.base, pair.patch, *where, "--json")
        assert outcome.json["error"]["type"] == "TargetMismatch"
    assert names_under(tmp_path) == {"base", "target", "patch"}


def test_a_copy_of_a_tied_tensor_is_kept_and_brought_along(tmp_path: Path) -> None:
    old, new = model(), stepped(model())
    tied_old = {**old, "head.weight": old["embed.weight"]}
    tied_new = {**new, "head.weight": new["embed.weight"]}
    weightwire.diff(tied_old, tied_new).save(tmp_path / "patch")
    patch = weightwire.Patch.load(tmp_path / "patch")
    base = save(tmp_path / "base", "sharded", {**old, "head.weight": old["embed.weight"].copy()})
    apply_to_new(base, patch, tmp_path / "out")
    apply_in_place(base, patch)
    for path in (base, tmp_path / "out"):
        found = state_on_disk(path)
        assert found["head.weight"] == found["embed.weight"]
        assert found["head.weight"][2] == new["embed.weight"].tobytes()


def test_apply_from_python_reports_its_stages(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    n_done: dict[str, int] = {}
    n_total: dict[str, int] = {}

    def stage(name: str, n_bytes: int):  # noqa: ANN202
        n_total[name], n_done[name] = n_bytes, 0

        def advance(n: int) -> None:
            n_done[name] += n

        return advance

    apply_in_place(pair.base, weightwire.Patch.load(pair.patch), stage=stage)
    assert list(n_total) == ["check", "apply", "verify"]
    assert n_done == n_total


def test_apply_from_python_raises_typed_errors(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    with pytest.raises(BaseMismatch):
        apply_to_new(pair.target, weightwire.Patch.load(pair.patch), tmp_path / "out")


@pytest.mark.parametrize("where", [[], ["--in-place", "-o", "x"], ["--in-place", "--overwrite"]])
def test_apply_wants_exactly_one_place_to_write_to(tmp_path: Path, where: list[str]) -> None:
    outcome = run("apply", tmp_path, tmp_path, *where)
    assert outcome.code == 2
    assert "exactly one" in outcome.stderr


def test_apply_replaces_an_old_output_only_when_asked_to(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    out = save(tmp_path / "out", "sharded", model(9))
    assert run("apply", pair.base, pair.patch, "-o", out).code == 2
    assert run("apply", pair.base, pair.patch, "-o", out, "--overwrite").code == 0
    assert state_on_disk(out) == state_on_disk(pair.target)
