"""``weightwire bench``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import run


def test_bench_prints_tables_and_writes_them_too(tmp_path: Path) -> None:
    markdown, plot = tmp_path / "bench.md", tmp_path / "bench.svg"
    outcome = run(
        *("bench", "codec", "--quick", "--elements", 4096, "--threads", 1),
        *("--markdown", markdown, "--plot", plot),
    )
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.startswith("# Codec benchmark")
    assert markdown.read_text().strip() == outcome.stdout.strip()
    assert plot.read_bytes().startswith(b"<?xml")
    assert "elements" in outcome.stderr


def test_bench_json_is_one_object() -> None:
    outcome = run("bench", "codec", "--quick", "--elements", 4096, "--json")
    assert outcome.json["cases"]


@pytest.mark.parametrize("name", ["missing.npz", "broken.npz"])
def test_bench_of_a_bad_chain_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.npz").write_bytes(b"no")
    outcome = run("bench", "codec", "--quick", "--data", tmp_path / name, "--json")
    assert outcome.code == 2
    assert "error" in outcome.json
