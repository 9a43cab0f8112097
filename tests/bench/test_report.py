from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from weightwire.bench.cases import CHAIN, GENERATED, SPEED
from weightwire.bench.machine import Gpu, Machine
from weightwire.bench.plot import save_plot
from weightwire.bench.published import BEST_PUBLISHED
from weightwire.bench.report import to_json, to_markdown
from weightwire.bench.results import BenchReport, CaseResult, FileSize, Measurement, ratio
from weightwire.errors import StopError

MACHINE = Machine("aarch64", "Linux", 4, 2, "3.11.7", "2.1.0", "native")


def measurement(encoding: str, n_bytes: int, n_threads: int = 2) -> Measurement:
    return Measurement(encoding, "a source", n_threads, n_bytes, 1000, 200_000_000, 0.1, 0.05)


def case(name: str, group: str, n_changed: int = 1000) -> CaseResult:
    measurements = (measurement("compact", 800), measurement(BEST_PUBLISHED, 1750))
    return CaseResult(name, group, "BF16", 100_000, n_changed, measurements)


def full_report() -> BenchReport:
    cases = (
        case("chain, 8 single steps", CHAIN),
        case("BF16 1 %", GENERATED),
        case("BF16 10 %", GENERATED, n_changed=10_000),
        case("BF16 1 %, large", SPEED),
    )
    return BenchReport(
        machine=MACHINE,
        n_repeats=3,
        cases=cases,
        ratios=tuple(ratio(one, "compact", BEST_PUBLISHED) for one in cases),
        scaling=(measurement("compact", 800, 1), measurement("compact", 800, 2)),
        files=(FileSize("merged patch", 1, 1234, 1000, 200_000),),
    )


def test_markdown_says_where_what_and_how() -> None:
    text = to_markdown(full_report())
    assert "aarch64, Linux, 4 CPUs, 2 thread(s) per encoding; Python 3.11.7" in text
    assert "backend `native`" in text
    assert "3 repetition(s)" in text


def test_a_gpu_is_named_with_what_compiles_its_kernels_and_was_not_measured() -> None:
    report = full_report()
    machine = replace(MACHINE, gpu=Gpu("A Fine GPU", "2.11.0", "3.6.0"))
    text = to_markdown(replace(report, machine=machine))
    assert "ran on the CPUs; kernels for this machine's A Fine GPU (Triton 3.6.0, torch 2." in text
    assert "GPU" not in to_markdown(report).split("## ")[0]
    tree = json.loads(to_json(replace(report, machine=machine)))
    assert tree["machine"]["gpu"] == {"name": "A Fine GPU", "torch": "2.11.0", "triton": "3.6.0"}
    assert json.loads(to_json(report))["machine"]["gpu"] is None


def test_markdown_tables_hold_the_measured_values() -> None:
    lines = to_markdown(full_report()).splitlines()
    assert "| compact | a source | 800 | 0.800 | 250,000.0 | 2.00 | 4.00 |" in lines
    assert "| BF16 10 % | 10.00% | 0.800 | 1.750 |" in lines
    assert "| BF16 1 %, large | compact | 2.19 | 1.00 | 1.00 |" in lines
    assert "| merged patch | 1 | 1,234 | 1.234 | 200,000 |" in lines


def test_each_encoding_that_ours_are_measured_against_has_its_own_table() -> None:
    one = case("BF16 1 %", GENERATED)
    ratios = (ratio(one, "compact", BEST_PUBLISHED), ratio(one, "compact", "compact"))
    text = to_markdown(BenchReport(MACHINE, 1, (one,), ratios, (), ()))
    first, second = text.split("## Against ")[1:]
    assert first.startswith(BEST_PUBLISHED)
    assert "| BF16 1 % | compact | 2.19 | 1.00 | 1.00 |" in first
    assert second.startswith("compact\n")
    assert "| BF16 1 % | compact | 1.00 | 1.00 | 1.00 |" in second


def test_every_markdown_table_has_as_many_cells_in_all_rows() -> None:
    for block in to_markdown(full_report()).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_sections_without_results_are_left_out() -> None:
    text = to_markdown(BenchReport(MACHINE, 1, (case("BF16 1 %", GENERATED),), (), (), ()))
    assert "## Threads" not in text
    assert "## Files on disk" not in text
    assert "## Against" not in text


def test_json_holds_every_value_and_the_derived_ones() -> None:
    tree = json.loads(to_json(full_report()))
    assert tree["machine"]["backend"] == "native"
    assert tree["cases"][0]["density"] == 0.01
    assert tree["cases"][0]["measurements"][1]["bytes_per_change"] == 1.75
    assert tree["scaling"][0]["encode_gb_per_s"] == 2.0
    assert tree["files"][0]["bytes_per_change"] == 1.234


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_drawn_in_the_format_of_its_suffix(
    tmp_path: Path, suffix: str, magic: bytes
) -> None:
    save_plot(full_report(), tmp_path / f"bench.{suffix}")
    assert (tmp_path / f"bench.{suffix}").read_bytes().startswith(magic)


def test_a_plot_of_few_results_is_drawn_too(tmp_path: Path) -> None:
    report = BenchReport(MACHINE, 1, (case("chain", CHAIN),), (), (), ())
    save_plot(report, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").stat().st_size > 0


def test_an_unknown_plot_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StopError, match="cannot draw"):
        save_plot(full_report(), tmp_path / "bench.nothing")


def test_a_missing_matplotlib_is_named_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(StopError, match=r"weightwire\[bench\]"):
        save_plot(full_report(), tmp_path / "bench.svg")
