"""``weightwire sidecar``: what it says and how it ends; tests/integrations has it with real servers."""

from __future__ import annotations

from pathlib import Path

from sample_runs import run
from sample_stores import make_chain


def test_a_place_without_a_run_is_an_error(tmp_path: Path) -> None:
    outcome = run("sidecar", tmp_path / "nothing", "http://127.0.0.1:9", "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "NotARun")


def test_an_address_that_is_none_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    outcome = run("sidecar", chain.store, "ftp://somewhere", "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "EngineRefused")
