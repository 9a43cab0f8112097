"""The codec benchmark from start to end, as the command line calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weightwire.bench.cases import (
    SPEED,
    SPEED_DENSITY,
    Case,
    chain_cases,
    generated_case,
    generated_cases,
)
from weightwire.bench.chain import Chain, read_chain
from weightwire.bench.codec_bench import Clock, race
from weightwire.bench.contender import Contender
from weightwire.bench.files import measure_files
from weightwire.bench.machine import count_cpus, describe_machine
from weightwire.bench.ours import OUR_CODECS, OurContender, our_contenders
from weightwire.bench.published import BEST_PUBLISHED
from weightwire.bench.results import BenchReport, CaseResult, Measurement, ratio
from weightwire.bench.sliced import published_contenders
from weightwire.bench.whole import WHOLE_TENSORS, WholeTensors
from weightwire.errors import StopError

DEFAULT_ELEMENTS = 1 << 24
QUICK_ELEMENTS = 1 << 16
SPEED_FACTOR = 8
"""The speed case is this much larger than the others, so that it leaves every cache."""

BASELINES = (BEST_PUBLISHED, WHOLE_TENSORS)
"""What ratios are taken against: the best published encoding, in slices and written plainly."""


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    n_elements: int
    n_threads: int
    n_repeats: int


def run_codec_bench(
    data: Path | None,
    n_elements: int = DEFAULT_ELEMENTS,
    n_threads: int | None = None,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    *,
    clock: Clock = time.perf_counter,
) -> BenchReport:
    """Measure Weightwire's codecs and six published encodings on the same tensors.

    Args:
        data: a chain file of recorded versions; without one only generated states are measured.
        n_elements: size of a generated case; the speed case has eight times as many.
        n_threads: threads of every encoding; all CPUs of this process when not given.
        quick: small sizes and one repetition, to see that everything works.

    Raises:
        BackendMissing: the kernels that were asked for do not load.
        StopError: zstandard is not installed, or a size or thread count is not positive.
        NotAPatch, MalformedHeader, MalformedRecord: the chain file is not one.
        TargetMismatch: an encoding did not restore the new bits.
    """
    chain = read_chain(data) if data else None
    plan = _plan(n_elements, count_cpus() if n_threads is None else n_threads, quick)
    machine = describe_machine(plan.n_threads)
    with ThreadPoolExecutor(plan.n_threads) as pool:
        contenders: list[Contender] = [*our_contenders(plan.n_threads)]
        contenders += published_contenders(plan.n_threads, pool)
        contenders.append(WholeTensors(plan.n_threads))
        results, scaling = _race_all(chain, plan, contenders, progress, clock)
    progress("files on disk" if chain else "done")
    return BenchReport(
        machine=machine,
        n_repeats=plan.n_repeats,
        cases=results,
        ratios=tuple(
            ratio(case, own, against)
            for against in BASELINES
            for case in results
            for own in OUR_CODECS
        ),
        scaling=scaling,
        files=measure_files(chain) if chain else (),
    )


def _plan(n_elements: int, n_threads: int, quick: bool) -> Plan:
    if n_elements < 1 or n_threads < 1:
        raise StopError(f"cannot measure {n_elements} elements with {n_threads} threads")
    if quick:
        return Plan(min(n_elements, QUICK_ELEMENTS), n_threads, n_repeats=1)
    return Plan(n_elements, n_threads, n_repeats=3)


def _race_all(
    chain: Chain | None,
    plan: Plan,
    contenders: Sequence[Contender],
    progress: Callable[[str], None],
    clock: Clock,
) -> tuple[tuple[CaseResult, ...], tuple[Measurement, ...]]:
    """Every case in turn; the speed case also with fewer threads, while it is in memory."""
    results: list[CaseResult] = []
    scaling: tuple[Measurement, ...] = ()
    for case in _cases(chain, plan):
        progress(f"{case.name}: {case.n_elements:,} elements")
        results.append(race(case, contenders, plan.n_repeats, clock))
        if case.group == SPEED:
            progress(f"{case.name}: threads")
            scalers = _scaling_contenders(plan.n_threads)
            scaling = race(case, scalers, plan.n_repeats, clock).measurements
    return tuple(results), scaling


def _cases(chain: Chain | None, plan: Plan) -> Iterator[Case]:
    if chain:
        yield from chain_cases(chain)
    yield from generated_cases(plan.n_elements)
    yield generated_case(plan.n_elements * SPEED_FACTOR, "BF16", SPEED_DENSITY, SPEED)


def _scaling_contenders(n_threads: int) -> tuple[OurContender, ...]:
    """Each of our codecs with one thread, with two, and with all."""
    counts = sorted({1, min(2, n_threads), n_threads})
    return tuple(OurContender(codec, count) for codec in OUR_CODECS for count in counts)
