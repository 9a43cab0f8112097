from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightwire.bench.chain import make_chain, read_chain
from weightwire.bench.files import measure_files
from weightwire.bench.generate import generate_pair
from weightwire.bench.ours import OUR_CODECS, OurContender
from weightwire.bench.plot import save_plot
from weightwire.bench.published import BEST_PUBLISHED, PUBLISHED
from weightwire.bench.report import to_json, to_markdown
from weightwire.bench.run import run_codec_bench
from weightwire.bench.whole import WHOLE_TENSORS
from weightwire.errors import NotAPatch, StopError
from weightwire.model import dtype_named


@pytest.fixture
def chain_file(tmp_path: Path) -> Path:
    make_chain(tmp_path / "chain.npz", n_steps=8)
    return tmp_path / "chain.npz"


@pytest.mark.parametrize("codec", OUR_CODECS)
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_our_codecs_restore_tensors_longer_than_a_piece(
    codec: str, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.limits.PIECE_ELEMENTS", 3000)
    pairs = [generate_pair(n, dtype_named("BF16"), density, 1) for n in (10_001, 0, 1)]
    patch = OurContender(codec, 2).encode(pairs)
    outs = [pair.old.copy() for pair in pairs]
    patch.decode_into(outs)
    assert all(np.array_equal(out, pair.new) for out, pair in zip(outs, pairs, strict=True))


def test_a_quick_run_measures_every_encoding_on_every_case(chain_file: Path) -> None:
    steps: list[str] = []
    report = run_codec_bench(chain_file, 1 << 14, 2, quick=True, progress=steps.append)
    names = [*OUR_CODECS, *(encoding.name for encoding in PUBLISHED), WHOLE_TENSORS]
    assert len(report.cases) == 2 + 7 + 3 + 1
    assert all([m.encoding for m in case.measurements] == names for case in report.cases)
    assert [(point.encoding, point.n_threads) for point in report.scaling] == [
        (codec, n_threads) for codec in OUR_CODECS for n_threads in (1, 2)
    ]
    assert {found.against for found in report.ratios} == {BEST_PUBLISHED, WHOLE_TENSORS}
    assert len(report.ratios) == 2 * len(OUR_CODECS) * len(report.cases)
    assert len(steps) > len(report.cases)


def test_a_run_can_be_told_in_every_form(tmp_path: Path, chain_file: Path) -> None:
    report = run_codec_bench(chain_file, 1 << 12, 1, quick=True)
    save_plot(report, tmp_path / "bench.svg")
    assert "## Files on disk" in to_markdown(report)
    assert '"single patches"' in to_json(report)


def test_files_of_the_merged_patch_are_smaller_than_those_of_all_steps(chain_file: Path) -> None:
    single, merged = measure_files(read_chain(chain_file))
    assert (single.n_patches, merged.n_patches) == (8, 1)
    assert 0 < merged.n_bytes < single.n_bytes < single.n_full_bytes
    assert 0 < merged.n_changed < single.n_changed


@pytest.mark.parametrize(("n_elements", "n_threads"), [(0, 1), (100, 0), (100, -1)])
def test_a_size_that_is_not_positive_is_refused(n_elements: int, n_threads: int) -> None:
    with pytest.raises(StopError, match="cannot measure"):
        run_codec_bench(None, n_elements, n_threads)


def test_a_file_that_is_no_chain_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(NotAPatch):
        run_codec_bench(tmp_path / "nowhere.npz")
