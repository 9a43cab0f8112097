"""Many simulated worlds, one seed each: ``python -m weightwire.testing.simulate --seeds 1000``.

``--seed N --trace`` replays one world and prints what happened in it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from weightwire.clock import Clock, SystemClock
from weightwire.testing.faults import FaultKind
from weightwire.testing.world import Trouble, Violation, WorldReport, run_world

_BLOCK = 20
"""Worlds handed to a process at a time."""
_N_SHOWN = 20


@dataclass
class Tally:
    """What many worlds add up to."""

    n_worlds: int = 0
    n_versions: int = 0
    n_steps: int = 0
    n_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, report: WorldReport) -> None:
        """Count one world that kept every promise."""
        self.n_worlds += 1
        self.n_versions += report.n_versions
        self.n_steps += report.n_steps
        self.n_seconds += report.n_seconds
        self.faults.update({kind.name: n for kind, n in report.faults.items()})

    def merge(self, other: Tally) -> None:
        """Count what another process counted."""
        self.n_worlds += other.n_worlds
        self.n_versions += other.n_versions
        self.n_steps += other.n_steps
        self.n_seconds += other.n_seconds
        self.faults.update(other.faults)
        self.violations += other.violations


def run_block(seeds: Iterable[int]) -> Tally:
    """Some worlds, one after another; a broken promise is noted, and the next world begins."""
    logging.disable(logging.CRITICAL)  # broken stores are the point; nobody reads of each
    tally = Tally()
    for seed in seeds:
        try:
            tally.add(run_world(seed))
        except Violation as violation:
            tally.n_worlds += 1
            tally.violations.append(str(violation))
    logging.disable(logging.NOTSET)
    return tally


def run_worlds(
    first: int, n_worlds: int, n_processes: int, progress: Callable[[Tally], None]
) -> Tally:
    """Worlds ``first`` to ``first + n_worlds``, spread over processes."""
    tally = Tally()
    for part in _parts(list(_blocks(first, n_worlds)), n_processes):
        tally.merge(part)
        progress(tally)
    return tally


def all_kinds() -> list[str]:
    """Every way in which something can go wrong in a world."""
    return [kind.name for kind in (*FaultKind, *Trouble)]


def _blocks(first: int, n_worlds: int) -> Iterator[range]:
    last = first + n_worlds
    for start in range(first, last, _BLOCK):
        yield range(start, min(start + _BLOCK, last))


def _parts(blocks: list[range], n_processes: int) -> Iterator[Tally]:
    if n_processes == 1:
        yield from map(run_block, blocks)
        return
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as processes:
        yield from processes.map(run_block, blocks)


def _show_progress(clock: Clock, began: float, n_worlds: int, tally: Tally) -> None:
    rate = tally.n_worlds / max(clock.monotonic() - began, 1e-9)
    bad = len(tally.violations)
    print(
        f"\r{tally.n_worlds}/{n_worlds} worlds, {rate:.1f}/s, {bad} violations", end="", flush=True
    )


def _show(tally: Tally, seconds: float) -> None:
    print(
        f"\n\n{tally.n_worlds} worlds in {seconds:.0f} s ({tally.n_worlds / seconds:.1f} per second)"
    )
    print(
        f"{tally.n_versions} versions, {tally.n_steps} operations, {tally.n_seconds:.0f} simulated s"
    )
    width = max(map(len, all_kinds()))
    for name in all_kinds():
        print(f"  {name:<{width}}  {tally.faults[name]:>9}")
    print(f"{tally.faults.total()} faults, {len(tally.violations)} violations")
    for violation in tally.violations[:_N_SHOWN]:
        print(f"\n{violation}")


def _replay(seed: int, *, with_trace: bool) -> int:
    try:
        report = run_world(seed)
    except Violation as violation:
        print(violation)
        return 1
    if with_trace:
        print("\n".join(report.events))
    print(f"seed {seed}: {report.n_versions} versions, {report.n_steps} operations, no violation")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives its exit status."""
    parser = argparse.ArgumentParser(prog="weightwire.testing.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, help="replay this world only")
    parser.add_argument("--trace", action="store_true", help="print what happened in it")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _replay(options.seed, with_trace=options.trace)
    clock = SystemClock()
    began = clock.monotonic()
    progress = partial(_show_progress, clock, began, options.seeds)
    tally = run_worlds(options.first, options.seeds, options.processes, progress)
    _show(tally, clock.monotonic() - began)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
