"""``weightwire verify STORE``: every kind of damage is found, named, and weighed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import make_pair, run
from sample_stores import Chain, flip, make_chain, version

import weightwire as ww
from weightwire.codec.index import seal
from weightwire.store import audit_replay


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Five versions, with anchors at 0, 2 and 4."""
    return make_chain(tmp_path, 5, "--anchor-every", 2)


def found(store: Path, *options: object) -> dict[str, Any]:
    """What it says of a run that is not sound."""
    outcome = run("verify", store, "--json", *options)
    assert outcome.code == 1, outcome.stderr
    assert not outcome.json["is_sound"]
    return outcome.json


def test_a_sound_run_verifies_with_exit_code_0(chain: Chain) -> None:
    outcome = run("verify", chain.store, "--json")
    assert outcome.code == 0
    assert outcome.json["is_newest_reachable"]
    assert (outcome.json["n_versions"], outcome.json["newest"]) == (5, 4)
    names = [name for name in chain.objects() if name.startswith(("patches/", "anchors/"))]
    assert outcome.json["n_objects"] == len(names)
    assert run("verify", chain.store).stdout.startswith("sound: 5 versions")


def test_deep_rebuilds_every_version(chain: Chain) -> None:
    outcome = run("verify", chain.store, "--deep", "--json")
    assert (outcome.code, outcome.json["n_rebuilt"]) == (0, 5)


def test_deep_rewrites_its_copy_when_changes_have_gathered(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_replay, "SPILL_BYTES", 1)
    outcome = run("verify", chain.store, "--deep", "--json")
    assert (outcome.code, outcome.json["n_rebuilt"]) == (0, 5)


def test_deep_knows_empty_versions_skips_and_ties(tmp_path: Path) -> None:
    state: dict[str, Any] = version(0)
    state["head.weight"] = state["embed.weight"]
    with ww.Publisher(tmp_path / "run", state, skips=(4,)) as publisher:
        for step in range(9):
            if step != 5:
                state["layer.scale"][step] += np.float32(1)
            publisher.publish().result()
        publisher.wait()
    outcome = run("verify", tmp_path / "run", "--deep", "--json")
    assert (outcome.code, outcome.json["n_rebuilt"]) == (0, 9)


DAMAGES: list[tuple[str, Callable[[Path], None], str, int]] = [
    ("patches/*1-*/bucket*", flip, "HashMismatch", 1),
    ("patches/*1-*/bucket*", Path.unlink, "ObjectMissing", 1),
    (
        "patches/*1-*/bucket*",
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "TruncatedFile",
        1,
    ),
    (
        "patches/*1-*/bucket*",
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        "HashMismatch",
        1,
    ),
    ("patches/*3-*/patch.json", flip, "HashMismatch", 3),
    ("patches/*3-*/patch.json", Path.unlink, "ObjectMissing", 3),
    ("anchors/*2-*/model.safetensors", flip, "HashMismatch", 2),
    ("anchors/*2-*/model.safetensors", Path.unlink, "ObjectMissing", 2),
    ("anchors/*2-*/config.json", lambda path: path.write_text("{ }"), "HashMismatch", 2),
    ("anchors/*2-*/anchor.json", flip, "HashMismatch", 2),
    ("log/*3-commit.json", flip, "HashMismatch", 3),
    ("log/*3-commit.json", lambda path: path.write_text("no"), "MalformedHeader", 3),
    ("log/*3-commit.json", Path.unlink, "ObjectMissing", 3),
    ("log/*2-anchor-*.json", flip, "HashMismatch", 2),
]


@pytest.mark.parametrize(("pattern", "damage", "kind", "at"), DAMAGES)
def test_planted_damage_is_found(
    chain: Chain, pattern: str, damage: Callable[[Path], None], kind: str, at: int
) -> None:
    path = chain.one(pattern)
    damage(path)
    for options in ((), ("--deep",)):
        said = found(chain.store, *options)
        (only,) = said["damages"]
        assert (only["type"], only["version"], said["affected"]) == (kind, at, [at])
        assert only["key"] == str(path.relative_to(chain.store))


def test_all_damage_is_listed_not_only_the_first(chain: Chain) -> None:
    flip(chain.one("patches/*1-*/bucket*"))
    chain.one("patches/*3-*/patch.json").unlink()
    flip(chain.one("anchors/*2-*/model.safetensors"))
    said = found(chain.store)
    assert sorted(each["type"] for each in said["damages"]) == [
        "HashMismatch",
        "HashMismatch",
        "ObjectMissing",
    ]
    assert said["affected"] == [1, 2, 3]


def test_what_damage_means_for_a_newcomer_is_said(chain: Chain) -> None:
    flip(chain.one("patches/*1-*/bucket*"))
    said = found(chain.store)
    assert (said["unreachable"], said["is_newest_reachable"]) == ([1], True)
    text = run("verify", chain.store).stdout
    assert "versions affected: 1" in text
    assert "the newest version, 4, can still be reached" in text


def test_a_newest_version_that_nobody_can_reach_is_said(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 4)
    flip(chain.one("patches/*2-*/bucket*"))
    said = found(chain.store)
    assert (said["unreachable"], said["is_newest_reachable"]) == ([2, 3], False)
    assert "versions a newcomer cannot reach: 2 to 3" in run("verify", chain.store).stdout
    assert (
        run("follow", chain.store, "-o", tmp_path / "out", "--once", "--json").json["version"] == 1
    )


def test_a_record_that_cannot_be_read_is_found_and_readers_go_around_it(chain: Chain) -> None:
    flip(chain.one("log/*3-commit.json"))
    said = found(chain.store)
    assert [each["version"] for each in said["damages"]] == [3]
    assert not said["trouble"]


def test_a_log_that_readers_cannot_follow_is_said(chain: Chain) -> None:
    chain.one("log/*3-commit.json").unlink()
    said = found(chain.store)
    assert said["trouble"]
    assert not said["is_newest_reachable"]
    assert "readers cannot follow this run" in run("verify", chain.store).stdout


def test_a_record_that_does_not_follow_the_one_before_it_is_found(chain: Chain) -> None:
    path = chain.one("log/*3-commit.json")
    fields = json.loads(path.read_bytes())
    del fields["sha256"]
    fields["previous"] = "0" * 64
    path.write_bytes(seal(json.dumps(fields, separators=(",", ":")).encode()))
    said = found(chain.store)
    assert {each["type"] for each in said["damages"]} == {"ForkedHistory"}
    assert [each["version"] for each in said["damages"]] == [3, 4]


def test_unsigned_and_foreign_records_are_found(tmp_path: Path) -> None:
    for name in ("key", "other"):
        run("keygen", "-o", tmp_path / name)
    public = run("keygen", "--show", tmp_path / "key").stdout.strip()
    chain = make_chain(tmp_path, 2, "--key", tmp_path / "key")
    assert run("verify", chain.store, "--key", public).code == 0
    other = run("keygen", "--show", tmp_path / "other").stdout.strip()
    assert {each["type"] for each in found(chain.store, "--key", other)["damages"]} == {
        "BadSignature"
    }
    chain.publish_next()
    said = found(chain.store, "--key", public)
    assert [(each["type"], each["version"]) for each in said["damages"]] == [("UnsignedRecord", 2)]
    assert "UnsignedRecord" in said["trouble"]
    assert run("verify", chain.store).code == 0


def test_deep_finds_a_patch_whose_hashes_are_right_and_whose_bits_are_not(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    lie = chain.one("log/*2-commit.json")
    fields = json.loads(lie.read_bytes())
    other = json.loads(chain.one("log/*1-commit.json").read_bytes())["digest"]
    del fields["sha256"]
    fields["patch"]["base_digest"] = other[::-1]
    lie.write_bytes(seal(json.dumps(fields, separators=(",", ":")).encode()))
    said = found(chain.store, "--deep")
    assert {each["type"] for each in said["damages"]} == {"BaseMismatch"}
    assert said["n_rebuilt"] == 2


def test_a_stranger_with_a_far_version_cannot_make_it_work_for_ever(chain: Chain) -> None:
    (chain.store / "log" / "999999999999-commit.json").write_text("{}")
    said = found(chain.store)
    assert [each["type"] for each in said["damages"]] == ["NotARun", "ObjectMissing"]
    assert said["unreachable"] == [999999999999]


def test_a_collected_run_is_sound(chain: Chain) -> None:
    run("gc", chain.store, "--keep", 1, "--grace", 0)
    assert run("verify", chain.store, "--deep", "--json").json["n_rebuilt"] == 1


def test_a_place_without_a_run_is_an_error_not_a_verdict(tmp_path: Path) -> None:
    outcome = run("verify", tmp_path, "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "NotARun")


def test_options_for_a_run_are_refused_for_a_state(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    assert run("verify", pair.target, pair.patch, "--deep").code == 2
