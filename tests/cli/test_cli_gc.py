"""``weightwire gc``, and the durations and sizes it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from sample_runs import run, state_on_disk
from sample_stores import make_chain

from weightwire.cli.quantities import age_text, duration, size


def test_a_dry_run_says_what_would_go_and_deletes_nothing(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5, "--anchor-every", 2)
    before = chain.objects()
    said = run("gc", chain.store, "--keep", 1, "--grace", "0s", "--dry-run", "--json").json
    assert chain.objects() == before
    assert (said["dry_run"], said["boundary"], said["versions"]) == (True, 4, [0, 1, 2, 3])
    assert "would be deleted: 4 versions (0 to 3)" in run(
        "gc", chain.store, "--keep", 1, "--grace", 0, "--dry-run"
    ).stdout.replace("\n", " ")


def test_what_a_dry_run_names_is_what_goes(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5, "--anchor-every", 2)
    options = ("--keep", 1, "--grace", "0s", "--json")
    named = run("gc", chain.store, *options, "--dry-run").json["keys"]
    before = set(chain.objects())
    done = run("gc", chain.store, *options).json
    assert sorted(done["keys"]) == sorted(named)
    assert before - set(chain.objects()) == set(named)
    assert done["n_total_bytes"] > 0
    assert run("follow", chain.store, "-o", tmp_path / "out", "--once").code == 0
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[4])


def test_what_stays_is_explained(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    run("follow", chain.store, "-o", tmp_path / "out", "--once", "--worker", "gpu-7")
    outcome = run("gc", chain.store, "--keep", 1)
    assert outcome.stdout.startswith("nothing deleted\nversions from 0 on stay")
    assert "the newest complete anchor is of 0" in outcome.stdout
    assert "worker gpu-7 holds 2" in outcome.stdout


def test_young_versions_stay(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5, "--anchor-every", 2)
    said = run("gc", chain.store, "--keep", 1, "--keep-age", "1h", "--json").json
    assert (said["boundary"], said["versions"]) == (0, [])


def test_a_size_removes_more_than_the_count_allows(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5, "--anchor-every", 2)
    kept = run("gc", chain.store, "--keep", 5, "--dry-run", "--json").json
    less = run("gc", chain.store, "--keep", 5, "--max-bytes", "1kB", "--dry-run", "--json").json
    assert (kept["boundary"], less["boundary"]) == (0, 4)


@pytest.mark.parametrize(
    "options", [["--keep-age", "soon"], ["--max-bytes", "10 bananas"], ["--keep", "0"]]
)
def test_what_makes_no_sense_is_wrong_usage(tmp_path: Path, options: list[str]) -> None:
    outcome = run("gc", make_chain(tmp_path, 1).store, *options)
    assert outcome.code == 2
    assert options[0] in outcome.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604800), ("1.5", 1.5)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("10GB", 10**10), ("500 MB", 5 * 10**8), ("8GiB", 8 << 30), ("1.5kb", 1500), ("7", 7)],
)
def test_sizes_are_read(text: str, n_bytes: int) -> None:
    assert size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "-3s", "3 years", "1e3s", "s"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        duration(text)
    with pytest.raises(typer.BadParameter):
        size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (90, "1.5 min"),
        (7200, "2.0 h"),
        (1e6, "12 d"),
        (-1, "in the future"),
    ],
)
def test_ages_read_well(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
