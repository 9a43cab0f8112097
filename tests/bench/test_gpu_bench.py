"""The GPU benchmark measures and proves every element type; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightwire as ww

torch = pytest.importorskip("torch", reason="states are made with torch")
pytest.importorskip("triton", reason="GPU kernels need triton")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
N_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
N_ELEMENTS = 1000
SLOW = ("encode", "decode")
"""Steps that take seconds in the interpreter."""
N_QUICK_ROWS = 14


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; its neighbours' names are common ones, and are forgotten afterwards."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("bench")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)
    ww.use_backend(None)


@pytest.fixture
def run_once(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which runs what it measures only once: interpreted kernels take their time."""

    def measure(work: Callable[[], object]) -> Any:
        work()
        return import_module("timing").Timing(1.0, 1.0, 1, None)

    monkeypatch.setattr(bench, "measure", measure)
    return bench


def made(name: str, n_elements: int, density: float) -> Any:
    """A pair of a flat model of this type; after ``bench``."""
    states, element = import_module("states"), import_module("elements").ELEMENT_TYPES[name]
    flat = [torch.empty(n_elements, dtype=element.bits) for _ in range(2)]
    return states.make_pair(states.flat_model(n_elements, element), *flat, density)


def rows(bench: Any, path: Path, *options: str) -> list[dict[str, Any]]:
    """All rows of a run on a thousand elements; none failed, and none was left out."""
    sizes = ["--elements", str(N_ELEMENTS), "--densities", "0.03"]
    assert bench.main([*sizes, "--json", str(path), *options]) == 0
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert all(row["timing"] for row in found)
    return found


@pytest.mark.parametrize("name", N_BYTES)
def test_what_is_quick_to_interpret_is_measured_and_proven_in_each_type(
    name: str, run_once: Any, tmp_path: Path
) -> None:
    quick = [step for step in run_once.STEPS if step not in SLOW]
    found = rows(run_once, tmp_path / "rows.json", "--dtypes", name, "--only", *quick)
    assert {row["case"]["dtype"] for row in found} == {name}
    assert len(found) == N_QUICK_ROWS


@pytest.mark.long
@pytest.mark.parametrize("name", N_BYTES)
def test_the_compact_codec_is_measured_and_proven_in_each_type(
    name: str, run_once: Any, tmp_path: Path
) -> None:
    found = rows(run_once, tmp_path / "rows.json", "--dtypes", name, "--only", *SLOW)
    assert [row["name"] for row in found] == ["diff+encode compact", "decode compact"]


def test_json_and_table_say_the_type(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(bench, tmp_path / "rows.json", "--only", "copy", "--dtypes", *N_BYTES)
    traffic = {row["case"]["dtype"]: row["n_traffic_bytes"] for row in found}
    assert traffic == {name: 2 * N_ELEMENTS * n_bytes for name, n_bytes in N_BYTES.items()}
    table = capsys.readouterr().out.split("CPU kernels")[1]
    assert all(f"flat: {N_ELEMENTS:,} {name} elements" in table for name in N_BYTES)


def test_every_type_is_a_case_of_its_own(bench: Any) -> None:
    options = ["--elements", "99", "--densities", "0.1", "0.2", "--dtypes", "fp8", "fp32"]
    cases = bench.cases_of(bench.parse_options(options))
    found = [(model.element.name, model.n_bytes, density) for model, density in cases]
    assert found == [("fp8", 99, 0.1), ("fp8", 99, 0.2), ("fp32", 396, 0.1), ("fp32", 396, 0.2)]


def test_without_a_choice_elements_are_bf16(bench: Any) -> None:
    cases = list(bench.cases_of(bench.parse_options(["--quick"])))
    assert [(m.name, m.element.name, density) for m, density in cases] == [("flat", "bf16", 0.01)]


@pytest.mark.parametrize("density", [0.01, 0.1])
@pytest.mark.parametrize("name", N_BYTES)
def test_about_so_many_elements_change_as_were_asked_for(
    name: str, density: float, bench: Any
) -> None:
    # Both the sample and the model are drawn: five of their deviations fit into a tenth.
    pair = made(name, 1 << 19, density)
    assert pair.n_changed == np.count_nonzero(pair.old.numpy() != pair.new.numpy())
    assert pair.n_changed / len(pair.old) == pytest.approx(density, rel=0.1)
    sectors = (pair.old != pair.new).numpy().reshape(-1, 32 // N_BYTES[name])
    assert pair.n_sectors == np.count_nonzero(sectors.any(axis=1))


def test_streams_are_proven_by_the_reference_where_nothing_faster_loads(bench: Any) -> None:
    pair, proof = made("fp8", 3000, 0.03), import_module("proof")
    encode = import_module("ours").encode
    coded = encode([pair.old], [pair.new], pair.model.element, "plain", 3000)
    ww.use_backend("reference")
    assert proof.check_streams(pair, "plain", coded) == "1 pieces like reference"


def test_norms_and_weights_are_numbers_in_fp8(bench: Any) -> None:
    states, element = import_module("states"), import_module("elements").FP8
    model = states.llama_model("tiny", element)
    flat = [torch.empty(model.n_elements, dtype=torch.uint8) for _ in range(2)]
    pair = states.make_pair(model, *flat, 0.01)
    for version in (pair.old, pair.new):
        assert not version.view(torch.float8_e4m3fn).float().isnan().any()
        assert len(version.unique()) > 150
