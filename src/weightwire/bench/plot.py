"""Results as a picture: size against density, and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightwire.bench.cases import GENERATED, SPEED
from weightwire.bench.ours import OUR_CODECS
from weightwire.bench.results import BenchReport, CaseResult
from weightwire.errors import StopError


def save_plot(report: BenchReport, path: Path) -> None:
    """Draw bytes per change over density, and bars of both speeds; the suffix names the format.

    Raises:
        StopError: matplotlib is not installed, or it does not write this format.
    """
    figure_type = _import_figure()
    figure = figure_type(figsize=(16, 5), layout="constrained")
    sizes, speeds = figure.subplots(1, 2)
    _draw_sizes(sizes, [case for case in report.cases if _is_density_case(case)])
    _draw_speeds(speeds, [case for case in report.cases if case.group == SPEED])
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise StopError(f"cannot draw to {path}: {error}") from error


def _import_figure() -> Any:
    """The figure class alone: it draws with Agg or SVG and never looks for a screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "the plot needs matplotlib: pip install 'weightwire[bench]'"
        raise StopError(message) from error
    return Figure


def _is_density_case(case: CaseResult) -> bool:
    return case.group == GENERATED and case.dtype == "BF16"


def _draw_sizes(axes: Any, cases: list[CaseResult]) -> None:
    for encoding in _encodings(cases):
        densities = [case.density * 100 for case in cases]
        sizes = [case.of(encoding).bytes_per_change for case in cases]
        axes.plot(densities, sizes, label=encoding, **_line(encoding))
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="elements changed, %", ylabel="bytes per change")
    axes.set_title("Size (generated BF16)")
    axes.grid(visible=True, alpha=0.25)
    if cases:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_speeds(axes: Any, cases: list[CaseResult]) -> None:
    for case in cases:
        names = _encodings([case])
        rows = range(len(names))
        encode = [case.of(name).encode_gb_per_s for name in names]
        decode = [case.of(name).decode_gb_per_s for name in names]
        axes.barh([row - 0.2 for row in rows], encode, height=0.4, label="encode, diff included")
        axes.barh([row + 0.2 for row in rows], decode, height=0.4, label="decode + apply")
        axes.set_yticks(list(rows), names)
        axes.set_title(f"Speed ({case.name}, {case.measurements[0].n_threads} threads)")
        axes.legend(fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("GB of model per second")
    axes.grid(visible=True, axis="x", alpha=0.25)


def _encodings(cases: list[CaseResult]) -> list[str]:
    return [measurement.encoding for measurement in cases[0].measurements] if cases else []


def _line(encoding: str) -> dict[str, Any]:
    """Ours stand out; the published ones share a thinner line."""
    if encoding in OUR_CODECS:
        return {"linewidth": 2.5, "marker": "o"}
    return {"linewidth": 1.2, "marker": ".", "linestyle": "--"}
