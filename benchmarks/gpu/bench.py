"""How fast the GPU kernels are: beside a copy, beside torch, and beside their own memory traffic.

    benchmarks/gpu/run.sh                                      # an 8B model at five densities
    benchmarks/gpu/run.sh --quick
    benchmarks/gpu/run.sh --elements 8e9 --densities 0.01 --json FILE
    benchmarks/gpu/run.sh --elements 4e9 --densities 0.01 --dtypes bf16 fp16 fp32 fp8

``run.sh`` builds what this needs first. Every row stands alone: a kernel that is missing or fails
leaves the others' numbers, and the exit code says so. Results are proven, not only timed: what is
encoded, decoded and written gives the new version bit for bit, and a few pieces are compared with
the CPU kernels byte for byte.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import floors
import ours
import proof
import torch
from elements import ELEMENT_TYPES, SECTOR_BYTES, ElementType
from report import Case, Machine, Row, describe_machine, to_text, write_json
from states import SIZES, Model, Pair, flat_model, llama_model, make_pair
from timing import measure, synchronize

from weightwire.codec.piece import encode_piece
from weightwire.kernels import kernels

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
QUICK_ELEMENTS = 1 << 28


class DeviceLost(Exception):
    """The GPU answers nothing after a failed kernel: this process can measure no more."""


@dataclass
class Bench:
    """One pair under measurement, and what rows leave for later ones."""

    pair: Pair
    scratch: torch.Tensor
    """As long as the model: a copy's target, and the weights that are written to."""
    case: Case
    olds: list[torch.Tensor]
    news: list[torch.Tensor]
    pairs: floors.Pairs = field(default_factory=list)
    encoded: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def element(self) -> ElementType:
        """What both versions are made of."""
        return self.pair.model.element

    @property
    def n_bytes(self) -> int:
        """Of one version."""
        return self.pair.model.n_bytes

    @property
    def n_pair_bytes(self) -> int:
        """Of all positions and new bits."""
        return self.element.n_pair_bytes * self.pair.n_changed

    @property
    def n_written_bytes(self) -> int:
        """Of pairs that are read, and of sectors that are read and written back."""
        return self.n_pair_bytes + 2 * SECTOR_BYTES * self.pair.n_sectors

    @property
    def targets(self) -> list[torch.Tensor]:
        """The scratch's pieces."""
        return self.pair.pieces_of(self.scratch)

    def row(self, name: str, work: Callable[[], object], n_traffic: int, **more: Any) -> Row:
        """Measure it."""
        return Row(self.case, name, measure(work), n_traffic_bytes=n_traffic, **more)


Rows = Iterator[Row]
"""Work proven by a check that comes after its row yields first: the number stands, the check too."""


def measure_copy(bench: Bench) -> Rows:
    """The rate all floors are computed from."""
    pair = bench.pair
    yield bench.row("device copy", lambda: floors.copy(pair.old, bench.scratch), 2 * bench.n_bytes)


def measure_count(bench: Bench) -> Rows:
    """The least that any comparison does."""
    pair, n_traffic = bench.pair, 2 * bench.n_bytes
    yield bench.row(
        "compare and count",
        lambda: floors.count_changes(pair.old, pair.new),
        n_traffic,
        beside="torch diff",
    )
    found = int(floors.count_changes(pair.old, pair.new))
    if found != pair.n_changed:
        raise proof.Wrong(f"{found} changes counted, not {pair.n_changed}")


def measure_torch_diff(bench: Bench) -> Rows:
    """Compare, list, gather: on the device, and on to the host."""
    pair, n_traffic = bench.pair, 2 * bench.n_bytes + bench.n_pair_bytes
    yield bench.row("torch diff", lambda: floors.torch_pairs_flat(pair.old, pair.new), n_traffic)
    yield bench.row(
        "torch diff, by piece", lambda: floors.torch_pairs(bench.olds, bench.news), n_traffic
    )
    yield bench.row(
        "torch diff to host",
        lambda: floors.to_host(floors.torch_pairs_flat(pair.old, pair.new)),
        n_traffic,
        takes_host=True,
        note=f"{bench.n_pair_bytes / 1e6:.1f} MB",
    )


def measure_torch_upload(bench: Bench) -> Rows:
    """What a receiver without a codec does before it can write."""
    device = bench.pair.old.device
    pairs = [(_pinned(positions), _pinned(bits)) for positions, bits in floors.to_host(bench.pairs)]
    yield bench.row(
        "torch pairs to device",
        lambda: floors.to_device(pairs, device),
        bench.n_pair_bytes,
        takes_host=True,
    )


def measure_digest(bench: Bench) -> Rows:
    """All elements of one version."""
    first_indices = bench.pair.first_indices
    yield bench.row("torch sum", lambda: floors.torch_checksum(bench.news), bench.n_bytes)
    result = ours.digest(bench.news, first_indices)
    yield bench.row(
        "full digest",
        lambda: ours.digest(bench.news, first_indices),
        bench.n_bytes,
        beside="torch sum",
    )
    print(f"full digest: {proof.check_digests(bench.pair, result)}")


def measure_moved_digest(bench: Bench) -> Rows:
    """By how much a write moves the digests, from the elements it replaces and those it brings."""
    first, pair = bench.pair.first_indices, bench.pair
    bench.scratch.copy_(pair.old)
    prepared = ours.prepare(bench.targets, bench.pairs)
    moved = ours.digest_moved(prepared, first)
    yield bench.row(
        "incremental digest",
        lambda: ours.digest_moved(prepared, first),
        bench.n_pair_bytes + SECTOR_BYTES * pair.n_sectors,
        beside="torch sum",
    )
    before, after = (ours.digest(pieces, first) for pieces in (bench.olds, bench.news))
    print(f"incremental digest: {proof.check_moved_digests(pair, before, moved, after)}")


def measure_torch_write(bench: Bench) -> Rows:
    """The indices are made before: torch wants them wide."""
    wide = [(positions.long(), bits) for positions, bits in bench.pairs]
    yield bench.row(
        "torch index_copy_",
        lambda: floors.torch_write(bench.targets, wide),
        bench.n_written_bytes,
    )


def measure_activation(bench: Bench) -> Rows:
    """Write the changes into weights that are in use."""
    yield bench.row(
        "activation, prepare",
        lambda: ours.prepare(bench.targets, bench.pairs),
        bench.n_pair_bytes,
        takes_host=True,
    )
    bench.scratch.copy_(bench.pair.old)
    prepared = ours.prepare(bench.targets, bench.pairs)
    ours.write(prepared)
    _check_written(bench, "activation")
    yield bench.row(
        "activation",
        lambda: ours.write(prepared),
        bench.n_written_bytes,
        beside="torch index_copy_",
    )


def measure_encode(bench: Bench, codec: str) -> Rows:
    """From two versions on the device to streams in the host's memory."""
    encode = partial(ours.encode, bench.olds, bench.news, bench.element, codec, bench.n_bytes)
    encoded = encode()
    n_bytes = ours.n_stream_bytes(encoded)
    n_changed = max(bench.pair.n_changed, 1)
    yield bench.row(
        f"diff+encode {codec}",
        encode,
        2 * bench.n_bytes + n_bytes,
        takes_host=True,
        beside="torch diff to host",
        note=f"{n_bytes / 1e6:.1f} MB, {n_bytes / n_changed:.3f} B/change",
    )
    print(f"diff+encode {codec}: {proof.check_streams(bench.pair, codec, encoded)}")
    bench.encoded[codec] = encoded


def measure_decode(bench: Bench, codec: str) -> Rows:
    """From streams in the host's memory to pairs on the device, then proven on a copy."""
    pieces = bench.encoded.get(codec) or _encoded_by_cpu(bench, codec)
    pairs = ours.decode(bench.olds, pieces, bench.element)
    n_read = bench.n_bytes if codec == "compact" else 0
    yield bench.row(
        f"decode {codec}",
        lambda: ours.decode(bench.olds, pieces, bench.element),
        n_read + ours.n_stream_bytes(pieces) + bench.n_pair_bytes,
        takes_host=True,
        beside="torch pairs to device",
    )
    bench.scratch.copy_(bench.pair.old)
    try:
        ours.write(ours.prepare(bench.targets, pairs))
    except ours.Missing:
        floors.torch_write(bench.targets, [(p.long(), bits) for p, bits in pairs])
    _check_written(bench, f"decode {codec}")


def _check_written(bench: Bench, what: str) -> None:
    if not floors.same(bench.scratch, bench.pair.new):
        raise proof.Wrong(f"{what}: the written version differs from the new one")
    print(f"{what}: all {len(bench.scratch):,} elements as in the new version")


def _encoded_by_cpu(bench: Bench, codec: str) -> list[Any]:
    """What a CPU sends, for a receiver whose GPU cannot encode.

    Raises:
        Missing: only the reference is there, which would take hours.
    """
    if kernels().name == "reference":
        raise ours.Missing("an encoder")
    both, dtype = zip(bench.olds, bench.news, strict=True), bench.element.dtype
    return [encode_piece(proof.on_host(old), proof.on_host(new), dtype, codec) for old, new in both]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


STEPS: dict[str, Callable[[Bench], Rows]] = {
    "copy": measure_copy,
    "count": measure_count,
    "torch": measure_torch_diff,
    "digest": measure_digest,
    "upload": measure_torch_upload,
    "torch-write": measure_torch_write,
    "activation": measure_activation,
    "moved": measure_moved_digest,
    "encode-plain": lambda bench: measure_encode(bench, "plain"),
    "decode-plain": lambda bench: measure_decode(bench, "plain"),
    "encode": lambda bench: measure_encode(bench, "compact"),
    "decode": lambda bench: measure_decode(bench, "compact"),
}


@dataclass
class Outcome:
    """What a run has shown so far; written out after every step."""

    machine: Machine
    json: Path | None
    deadline: float
    """On the clock of ``time.perf_counter``: no step begins after it."""
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def save(self) -> None:
        """Keep it even if the next step takes the process down."""
        if self.json is not None:
            write_json(self.json, self.machine, self.rows, self.failures)


def run_case(model: Model, density: float, steps: Sequence[str], outcome: Outcome) -> None:
    """All steps on one pair.

    Raises:
        DeviceLost: after a kernel that took the device down.
    """
    began = time.perf_counter()
    bench = _make_bench(model, density)
    print(f"\n{bench.case} (made in {time.perf_counter() - began:.1f} s)")
    bench.pairs = floors.torch_pairs(bench.olds, bench.news)
    for step in steps:
        if time.perf_counter() > outcome.deadline:
            outcome.rows.append(Row(bench.case, step, note="not begun: out of time"))
            continue
        _attempt(step, bench, outcome)
        outcome.save()


def _make_bench(model: Model, density: float) -> Bench:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    old, new, scratch = (
        torch.empty(model.n_elements, dtype=model.element.bits, device=device) for _ in range(3)
    )
    pair = make_pair(model, old, new, density)
    n_tensors, n_pieces = len(model.tensors), len(model.pieces)
    sizes = (n_tensors, n_pieces, model.n_elements, pair.n_changed)
    case = Case(model.name, *sizes, dtype=model.element.name)
    return Bench(pair, scratch, case, pair.pieces_of(old), pair.pieces_of(new))


def _attempt(step: str, bench: Bench, outcome: Outcome) -> None:
    """One step's rows, or why there are none."""
    try:
        for row in STEPS[step](bench):
            outcome.rows.append(row)
            print(f"{row.name}: {row.ms:.3f} ms")
        return
    except ours.Missing as missing:
        outcome.rows.append(Row(bench.case, step, note=f"missing: {missing}"))
        return
    except Exception as error:  # One kernel's failure must not cost the others' numbers.
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        outcome.rows.append(Row(bench.case, step, note=f"FAILED: {why}"))
        changes = f"{bench.case.n_changed:,} {bench.case.dtype} changes"
        outcome.failures.append(f"{step} at {changes}: {why}")
    # Only now, with the error gone, is the memory of the failed work free.
    _recover(step)


def _recover(step: str) -> None:
    gc.collect()
    try:
        synchronize()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(f"the device answers no more after {step}") from error


def measure_transfers() -> tuple[float, float] | None:
    """GB/s from pinned memory to the device and back."""
    if not torch.cuda.is_available():
        return None
    here = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to_device = measure(lambda: there.copy_(here, non_blocking=True)).device_ms
    to_host = measure(lambda: here.copy_(there, non_blocking=True)).device_ms
    return len(here) / to_device / 1e6, len(here) / to_host / 1e6


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, with sizes like 8e9 as whole numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--elements", type=float, help="one flat tensor of so many elements")
    parser.add_argument("--models", nargs="*", choices=tuple(SIZES), help="real shapes")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(ELEMENT_TYPES), default=("bf16",))
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--quick", action="store_true", help="2^28 elements, 1 %% changed")
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS), default=tuple(STEPS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no step after them")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    return parser.parse_args(arguments)


def models_of(options: argparse.Namespace, element: ElementType) -> list[Model]:
    """What the options ask for; an 8B model if they ask for nothing."""
    models = [llama_model(name, element) for name in options.models or ()]
    if options.quick or options.elements:
        models.append(flat_model(int(options.elements or QUICK_ELEMENTS), element))
    return models or [llama_model("llama-3.1-8b", element)]


def cases_of(options: argparse.Namespace) -> Iterator[tuple[Model, float]]:
    """Every model of every element type, at every density."""
    densities = (0.01,) if options.quick else options.densities
    for name in options.dtypes:
        yield from product(models_of(options, ELEMENT_TYPES[name]), densities)


def main(arguments: Sequence[str]) -> int:
    """Measure everything, print the table last."""
    options = parse_options(arguments)
    machine = describe_machine(proof.choose_cpu(), measure_transfers())
    outcome = Outcome(machine, options.json, time.perf_counter() + options.seconds)
    try:
        for model, density in cases_of(options):
            if time.perf_counter() > outcome.deadline:
                what = f"{model.name}, {model.element.name}"
                outcome.failures.append(f"{what} at {density:.1%}: out of time")
                continue
            run_case(model, density, options.only, outcome)
            gc.collect()
    except DeviceLost as error:
        outcome.failures.append(str(error))
    outcome.save()
    print(f"\n{to_text(machine, outcome.rows, outcome.failures)}")
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
