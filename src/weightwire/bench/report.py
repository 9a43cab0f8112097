"""Results as text: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from weightwire.bench.cases import CHAIN, SPEED
from weightwire.bench.machine import Gpu, Machine
from weightwire.bench.results import BenchReport, CaseResult, FileSize, Measurement, Ratio

_FOOTNOTES = """\
- *Bytes* are those of the encoded streams. Published encodings are charged for their streams only,
  Weightwire also for its tables and directories. Files on disk are counted in a table of their own.
- *Bytes per change* divides by the elements whose bits differ, counted apart from all encodings.
- *GB/s* are 10⁹ bytes of one version of the model per second. *Encode* starts from two versions in
  memory and includes finding the difference; *decode + apply* starts from the patch and ends with
  the new version in place. Copying the old version and comparing the result are not timed.
- All encodings ran in the same process, on the same tensors, with the same number of threads. They
  took turns within each of {n_repeats} repetition(s); the best time of each direction counts.
- Every decode was compared with the new version bit for bit; one difference ends the benchmark.
- The published encodings are NumPy and zstandard rewrites, made bit-exact and run in slices on a
  thread pool: they are the encodings of the systems named, not those systems' own code. The one
  called *whole tensors* is the same encoding written the straightforward way: NumPy over a whole
  tensor at a time, on one thread, then one zstd frame made with all threads.
- Generated tensors: normal fp32 masters with outlier columns take one step of about the learning
  rate and are rounded to nearest-even; the learning rate is chosen to reach the density. F32 steps
  only a random subset; 100 % is independent values.
"""


def to_markdown(report: BenchReport) -> str:
    """All tables, the machine first and the footnotes last."""
    sections = [
        "# Codec benchmark",
        _machine_line(report.machine),
        *(_full_table(case) for case in report.cases if case.group in (CHAIN, SPEED)),
        _matrix("Bytes per change", report.cases, lambda m: f"{m.bytes_per_change:.3f}"),
        _matrix("Encode, GB/s", report.cases, lambda m: f"{m.encode_gb_per_s:.2f}"),
        _matrix("Decode + apply, GB/s", report.cases, lambda m: f"{m.decode_gb_per_s:.2f}"),
        *_ratio_tables(report.ratios),
        _scaling_table(report.scaling),
        _file_table(report.files),
        "## What is measured\n\n" + _FOOTNOTES.format(n_repeats=report.n_repeats),
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def to_json(report: BenchReport) -> str:
    """All values, with the derived ones that the tables show."""
    tree = asdict(report)
    for case, result in zip(tree["cases"], report.cases, strict=True):
        case["density"] = result.density
        case["measurements"] = [_with_rates(measurement) for measurement in result.measurements]
    tree["scaling"] = [_with_rates(measurement) for measurement in report.scaling]
    for size, file in zip(tree["files"], report.files, strict=True):
        size["bytes_per_change"] = file.bytes_per_change
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def _with_rates(measurement: Measurement) -> dict[str, Any]:
    return asdict(measurement) | {
        "bytes_per_change": measurement.bytes_per_change,
        "times_smaller": measurement.times_smaller if measurement.n_bytes else None,
        "encode_gb_per_s": measurement.encode_gb_per_s,
        "decode_gb_per_s": measurement.decode_gb_per_s,
    }


def _machine_line(machine: Machine) -> str:
    return (
        f"{machine.architecture}, {machine.system}, {machine.n_cpus} CPUs, "
        f"{machine.n_threads} thread(s) per encoding; Python {machine.python}, "
        f"NumPy {machine.numpy}; Weightwire backend `{machine.backend}`.{_gpu_sentence(machine.gpu)}"
    )


def _gpu_sentence(gpu: Gpu | None) -> str:
    if gpu is None:
        return ""
    return (
        f" All encodings ran on the CPUs; kernels for this machine's {gpu.name} (Triton {gpu.triton},"
        f" torch {gpu.torch}) load, and are measured by `benchmarks/gpu/run.sh`."
    )


def _full_table(case: CaseResult) -> str:
    title = (
        f"## {case.name}\n\n{case.n_elements:,} elements of {case.dtype}, "
        f"{case.n_changed:,} changed ({case.density:.2%})."
    )
    header = (
        *("encoding", "used by", "bytes", "bytes per change", "× smaller than full"),
        *("encode GB/s", "decode + apply GB/s"),
    )
    rows = [
        (
            measurement.encoding,
            measurement.source,
            f"{measurement.n_bytes:,}",
            f"{measurement.bytes_per_change:.3f}",
            f"{measurement.times_smaller:,.1f}",
            f"{measurement.encode_gb_per_s:.2f}",
            f"{measurement.decode_gb_per_s:.2f}",
        )
        for measurement in case.measurements
    ]
    return title + "\n\n" + _table(header, rows, n_text_columns=2)


def _matrix(title: str, cases: Sequence[CaseResult], show: Callable[[Measurement], str]) -> str:
    """One row per case, one column per encoding."""
    encodings = [measurement.encoding for measurement in cases[0].measurements] if cases else []
    rows = [
        (case.name, f"{case.density:.2%}", *(show(case.of(encoding)) for encoding in encodings))
        for case in cases
    ]
    return f"## {title}\n\n" + _table(("case", "changed", *encodings), rows)


def _ratio_tables(ratios: Sequence[Ratio]) -> list[str]:
    """One table for each encoding that ours were measured against."""
    names = dict.fromkeys(ratio.against for ratio in ratios)
    return [_ratio_table(name, [r for r in ratios if r.against == name]) for name in names]


def _ratio_table(against: str, ratios: Sequence[Ratio]) -> str:
    header = ("case", "codec", "× smaller", "× faster encode", "× faster decode + apply")
    rows = [
        (
            ratio.case,
            ratio.encoding,
            f"{ratio.times_smaller:.2f}",
            f"{ratio.encode_speedup:.2f}",
            f"{ratio.decode_speedup:.2f}",
        )
        for ratio in ratios
    ]
    return f"## Against {against}\n\n" + _table(header, rows, n_text_columns=2)


def _scaling_table(scaling: Sequence[Measurement]) -> str:
    if not scaling:
        return ""
    rows = [
        (
            point.encoding,
            str(point.n_threads),
            f"{point.encode_gb_per_s:.2f}",
            f"{point.decode_gb_per_s:.2f}",
        )
        for point in scaling
    ]
    header = ("codec", "threads", "encode GB/s", "decode + apply GB/s")
    return "## Threads\n\n" + _table(header, rows)


def _file_table(files: Sequence[FileSize]) -> str:
    if not files:
        return ""
    header = ("chain on disk", "patches", "bytes of all files", "bytes per change", "bytes in full")
    rows = [
        (
            file.name,
            str(file.n_patches),
            f"{file.n_bytes:,}",
            f"{file.bytes_per_change:.3f}",
            f"{file.n_full_bytes:,}",
        )
        for file in files
    ]
    return "## Files on disk\n\n" + _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], n_text_columns: int = 1) -> str:
    """A Markdown table; all but the first columns are numbers and align right."""
    marks = ["---" if column < n_text_columns else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, marks, *rows))
