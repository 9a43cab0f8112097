"""``weightwire verify`` and ``weightwire digest``."""

from __future__ import annotations

from pathlib import Path

from sample_runs import make_pair, model, run, save, stepped

import weightwire


def test_the_target_verifies_with_exit_code_0(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("verify", pair.target, pair.patch, "--json")
    assert outcome.code == 0
    assert outcome.json["verdict"] == "target"


def test_the_base_is_named_but_is_not_success(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("verify", pair.base, pair.patch, "--json")
    assert outcome.code == 1
    assert outcome.json["verdict"] == "base"
    assert outcome.json["differs_from_target"] == ["embed.weight", "layer.weight"]


def test_the_base_is_success_when_it_is_what_was_asked_for(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    assert run("verify", pair.base, pair.patch, "--is", "base").code == 0
    assert run("verify", pair.target, pair.patch, "--is", "base").code == 1


def test_neither_names_the_tensors_that_differ(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    other = save(
        tmp_path / "other", "file", {**stepped(model()), "layer.scale": model(5)["layer.scale"]}
    )
    outcome = run("verify", other, pair.patch)
    assert outcome.code == 1
    assert outcome.stdout.startswith("neither")
    assert "layer.scale" in outcome.stdout
    assert "embed.weight" not in outcome.stdout


def test_an_extra_tensor_is_neither(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    other = save(tmp_path / "other", "file", {**stepped(model()), "extra": model()["steps"]})
    outcome = run("verify", other, pair.patch)
    assert outcome.code == 1
    assert "set of tensors" in outcome.stdout


def test_a_path_without_a_patch_is_an_error_not_a_verdict(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("verify", pair.base, tmp_path, "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == "NotAPatch"


def test_digest_is_the_one_of_the_library_in_every_form(tmp_path: Path) -> None:
    expected = weightwire.digest(model())
    for form in ("file", "folder", "sharded"):
        path = save(tmp_path / form, form, model())
        assert run("digest", path).stdout.strip() == expected
        assert run("digest", path, "--json").json["digest"] == expected


def test_digest_lists_tensors_when_asked_to(tmp_path: Path) -> None:
    path = save(tmp_path / "base", "file", model())
    found = run("digest", path, "--json", "--tensors").json["tensors"]
    assert found.keys() == model().keys()
    text = run("digest", path, "--tensors").stdout
    assert all(f"{digest}  {name}" in text for name, digest in found.items())
