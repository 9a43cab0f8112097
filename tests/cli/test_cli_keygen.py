"""``keygen``: one line on stdout that readers can pin, and a file that only its owner can read."""

from __future__ import annotations

from pathlib import Path

from sample_runs import run

from weightwire.trust.keys import PublicKey, SigningKey


def test_keygen_writes_the_private_key_and_prints_only_the_public_one(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = run("keygen", "-o", path)
    assert made.code == 0
    assert PublicKey.parse(made.stdout) == SigningKey.load(path).public
    assert made.stdout.count("\n") == 1
    assert str(path) in made.stderr
    assert run("keygen", "--show", path).stdout == made.stdout


def test_keygen_speaks_json(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = run("keygen", "-o", path, "--json").json
    assert made == run("keygen", "--show", path, "--json").json
    public = SigningKey.load(path).public
    assert made["public_key"] == str(public)
    assert made["fingerprint"] == public.fingerprint


def test_keygen_does_not_overwrite_a_key(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    run("keygen", "-o", path)
    kept = path.read_bytes()
    again = run("keygen", "-o", path, "--json")
    assert again.code == 2
    assert again.json["error"]["type"] == "OutputExists"
    assert path.read_bytes() == kept


def test_keygen_needs_either_a_new_name_or_an_old_key(tmp_path: Path) -> None:
    assert run("keygen").code == 2
    assert run("keygen", "-o", tmp_path / "a", "--show", tmp_path / "b").code == 2
    assert list(tmp_path.iterdir()) == []
