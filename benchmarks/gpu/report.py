"""The rows of a run as a plain table, and as JSON."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
import triton
from elements import ELEMENT_TYPES
from timing import Timing

MAX_CHARACTERS = 9_800
"""A table that is cut off by whoever shows it helps nobody."""


@dataclass(frozen=True)
class Case:
    """What all rows of a block were measured on."""

    model: str
    n_tensors: int
    n_pieces: int
    n_elements: int
    n_changed: int
    dtype: str

    @property
    def n_bytes(self) -> int:
        """Of one version."""
        return ELEMENT_TYPES[self.dtype].n_bytes * self.n_elements

    def __str__(self) -> str:
        share = self.n_changed / self.n_elements
        return (
            f"{self.model}: {self.n_elements:,} {self.dtype} elements, {self.n_tensors} tensors,"
            f" {self.n_pieces} pieces, {share:.3%} changed"
        )


@dataclass(frozen=True)
class Row:
    """One measured thing, or why it was not."""

    case: Case
    name: str
    timing: Timing | None = None
    takes_host: bool = False
    """Whether its time is the host's clock: the result is, or ends, in the host's memory."""
    n_traffic_bytes: int = 0
    """What must move through device memory at least."""
    beside: str = ""
    """The row that does the same with torch alone."""
    note: str = ""

    @property
    def ms(self) -> float | None:
        """The time that counts."""
        if self.timing is None:
            return None
        return self.timing.wall_ms if self.takes_host else self.timing.device_ms


@dataclass(frozen=True)
class Machine:
    """What a reader must know to repeat the numbers."""

    gpu: str
    driver: str
    torch: str
    triton: str
    python: str
    numpy: str
    cpu_kernels: str
    date: str
    to_device_gb_s: float | None
    to_host_gb_s: float | None


def describe_machine(cpu_kernels: str, transfers: tuple[float, float] | None) -> Machine:
    """This machine, today."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_name() if has_gpu else f"none ({platform.machine()})",
        driver=_driver() if has_gpu else "none",
        torch=torch.__version__,
        triton=triton.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        cpu_kernels=cpu_kernels,
        date=datetime.now(timezone.utc).date().isoformat(),
        to_device_gb_s=transfers[0] if transfers else None,
        to_host_gb_s=transfers[1] if transfers else None,
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def copy_rate(rows: Sequence[Row], case: Case) -> float | None:
    """Bytes per millisecond through device memory, read and written, as this case's copy moved."""
    for row in rows:
        if row.case == case and row.name == "device copy" and row.ms:
            return row.n_traffic_bytes / row.ms
    return None


def to_text(machine: Machine, rows: Sequence[Row], failures: Sequence[str]) -> str:
    """The whole report; notes go first where it grows too long, then rows."""
    for with_notes in (True, False):
        lines = _lines(machine, rows, failures, with_notes)
        if sum(len(line) + 1 for line in lines) <= MAX_CHARACTERS:
            return "\n".join(lines)
    kept, room = [], MAX_CHARACTERS - 100
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return "\n".join([*kept, f"… {len(lines) - len(kept)} more lines; --json has all rows"])


def _lines(
    machine: Machine, rows: Sequence[Row], failures: Sequence[str], with_notes: bool
) -> list[str]:
    lines = [f"failed: {failure}" for failure in failures]
    lines += [
        f"{machine.gpu}, driver {machine.driver}, torch {machine.torch}, triton {machine.triton},"
        f" Python {machine.python}, numpy {machine.numpy}, CPU kernels: {machine.cpu_kernels},"
        f" {machine.date}",
    ]
    if machine.to_device_gb_s is not None:
        lines.append(
            f"pinned transfers: {machine.to_device_gb_s:.1f} GB/s to the device,"
            f" {machine.to_host_gb_s:.1f} GB/s to the host"
        )
    for case in dict.fromkeys(row.case for row in rows):
        lines += ["", str(case), _HEAD]
        rate = copy_rate(rows, case)
        block = [row for row in rows if row.case == case]
        lines += [_line(row, block, rate, with_notes) for row in block]
    return [*lines, "", *_LEGEND]


_HEAD = (
    f"{'':24}{'device ms':>10}{'wall ms':>10}{'GB/s':>8}{'floor ms':>9}{'×floor':>7}"
    f"{'×torch':>7}{'+GB':>7}"
)
_LEGEND = (
    "GB/s: bytes of one version over the time that counts, which is * where the host takes part.",
    "floor: bytes that must move through device memory, at this case's copy rate.",
    "×torch: how much faster than torch's way; +GB: peak of additional device memory.",
)


def _line(row: Row, block: Sequence[Row], rate: float | None, with_notes: bool) -> str:
    fewer = f"{row.timing.n_rounds} rounds" if row.timing and row.timing.n_rounds < 5 else ""
    note = ", ".join(part for part in (row.note, fewer) if part)
    note = f"  {note}" if note and (with_notes or row.timing is None) else ""
    if row.timing is None or row.ms is None:
        return f"{row.name:24}{note or '  not measured'}"
    floor = row.n_traffic_bytes / rate if rate else None
    beside = next((other.ms for other in block if other.name == row.beside), None)
    extra = row.timing.n_extra_bytes
    device, wall = f"{row.timing.device_ms:.3f}", f"{row.timing.wall_ms:.3f}"
    wall += "*" if row.takes_host else " "
    return (
        f"{row.name:24}{device:>10}{wall:>10}{row.case.n_bytes / row.ms / 1e6:8.1f}"
        f"{_number(floor, 9, 3)}{_number(row.ms / floor if floor else None, 7, 1)}"
        f"{_number(beside / row.ms if beside else None, 7, 2)}"
        f"{_number(None if extra is None else extra / 1e9, 7, 2)}{note}"
    )


def _number(value: float | None, width: int, n_digits: int) -> str:
    """Right-aligned, with a space before it even if it is too long for its column."""
    return f"{'–' if value is None else f' {value:.{n_digits}f}':>{width}}"


def write_json(path: Path, machine: Machine, rows: Sequence[Row], failures: Sequence[str]) -> None:
    """All rows with all their numbers."""
    found = {
        "machine": asdict(machine),
        "failures": list(failures),
        "rows": [{**asdict(row), "ms": row.ms} for row in rows],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
