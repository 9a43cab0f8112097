"""``weightwire log``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sample_runs import run
from sample_stores import flip, make_chain, version

import weightwire as ww
from weightwire.store.counting import CountingStore, StoreCounts
from weightwire.store.open import open_store
from weightwire.store.receipts import parse_receipt, write_receipt


def test_versions_come_newest_last_with_kind_size_and_share(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    run("publish", chain.store, chain.checkpoints[2])
    found = run("log", chain.store, "--json").json
    assert [each["version"] for each in found["versions"]] == [0, 1, 2, 3]
    assert [each["kind"] for each in found["versions"]] == ["anchor", "patch", "patch", "empty"]
    assert [each["epoch"] for each in found["versions"]] == [1, 2, 3, 4]
    assert [each["n_changed"] for each in found["versions"]] == [5951, 590, 590, 0]
    assert found["versions"][3]["times_smaller"] is None
    assert found["digest"] == ww.digest(version(2))
    text = run("log", chain.store).stdout
    assert "9.91%" in text
    assert "compact" in text


def test_later_anchors_and_skips_are_shown(tmp_path: Path) -> None:
    store, state = tmp_path / "run", version(0)
    with ww.Publisher(store, state, skips=(4,), anchors=ww.AnchorPolicy(every=3)) as publisher:
        for step in range(9):
            state["layer.scale"][step] += np.float32(1)
            publisher.publish().result()
        publisher.wait()
    found = run("log", store, "--json").json
    assert found["anchors"][0] == 0
    assert len(found["anchors"]) > 1
    assert found["versions"][4]["skips_from"] == [0]
    assert "skip from 4" in run("log", store).stdout


def test_receivers_are_listed_with_what_they_prove(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    run("follow", chain.store, "-o", tmp_path / "out", "--once", "--worker", "honest")
    chain.publish_next()
    raw = (chain.store / "receipts" / "honest.json").read_bytes()
    receipt = parse_receipt(raw, "honest", "honest")
    liar = {**vars(receipt), "worker": "liar", "version": 1}
    write_receipt(open_store(chain.store), type(receipt)(**liar))
    receipts = {each["worker"]: each for each in run("log", chain.store, "--json").json["receipts"]}
    assert (receipts["honest"]["is_proven"], receipts["honest"]["lag"]) == (True, 1)
    assert (receipts["liar"]["is_proven"], receipts["liar"]["lag"]) == (False, 0)
    lines = [line.split() for line in run("log", chain.store).stdout.splitlines()]
    assert [line[-1] for line in lines if line[0] == "liar"] == ["no"]


def test_a_limit_shows_the_newest_and_says_that_there_are_more(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    run("follow", chain.store, "-o", tmp_path / "out", "--once")
    for _ in range(3):
        chain.publish_next()
    found = run("log", chain.store, "--limit", 2, "--json").json
    assert [each["version"] for each in found["versions"]] == [2, 3]
    assert found["n_older"] == 2
    assert found["receipts"][0]["is_proven"] is None
    assert "2 older versions" in run("log", chain.store, "--limit", 2).stdout


def test_a_limit_reads_no_more_records_than_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(tmp_path, 6)
    counting = CountingStore(open_store(chain.store))
    monkeypatch.setattr("weightwire.cli.run_opening.open_store", lambda _: counting)
    run("log", chain.store, "--limit", 2)
    counts = counting.snapshot()
    # The run's identity and two records; the log and the receipts.
    assert counts == StoreCounts(n_read=3, n_list=2, n_bytes_down=counts.n_bytes_down)


def test_a_damaged_record_is_shown_and_does_not_hide_the_rest(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    flip(chain.one("log/*1-commit.json"))
    outcome = run("log", chain.store, "--json")
    assert outcome.code == 0
    assert [each["version"] for each in outcome.json["versions"]] == [0, 2]
    assert [each["key"] for each in outcome.json["damaged"]] == ["log/000000000001-commit.json"]
    assert "damaged: " in run("log", chain.store).stdout


def test_a_collected_run_says_where_it_begins(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5, "--anchor-every", 2)
    run("gc", chain.store, "--keep", 1, "--grace", 0)
    found = run("log", chain.store, "--json").json
    assert found["boundary"] == 4
    assert "before 4 were collected" in run("log", chain.store).stdout


def test_a_place_without_a_run_is_an_error(tmp_path: Path) -> None:
    outcome = run("log", tmp_path / "nothing", "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "NotARun")


def test_a_run_without_versions_says_so(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    for path in chain.store.glob("log/*"):
        path.unlink()
    assert run("log", chain.store, "--json").json["newest"] is None
    assert "no version yet" in run("log", chain.store).stdout


def test_steps_are_shown_where_the_trainer_gave_them(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    assert "step" not in run("log", chain.store).stdout
    chain.publish_next("--step", 1200)
    found = run("log", chain.store, "--json").json
    assert [each["step"] for each in found["versions"]] == [None, None, 1200]
    assert "1200" in run("log", chain.store).stdout
