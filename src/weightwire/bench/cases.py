"""Which tensors are measured: a recorded chain where there is one, and generated states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weightwire.bench.chain import Chain
from weightwire.bench.generate import Pair, generate_pair
from weightwire.model import Bits, dtype_named

CHAIN, GENERATED, SPEED = "chain", "generated", "speed"
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
OTHER_DTYPES = ("F16", "F32", "F8_E4M3")
SPEED_DENSITY = 0.01
SEED = 20_260_101


@dataclass(frozen=True)
class Case:
    """Tensors that are encoded together, in two versions each."""

    name: str
    group: str
    pairs: tuple[Pair, ...]

    @property
    def n_elements(self) -> int:
        """Elements of all tensors."""
        return sum(len(pair.old) for pair in self.pairs)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, in one version."""
        return sum(pair.old.nbytes for pair in self.pairs)

    @property
    def n_changed(self) -> int:
        """Elements whose bits differ."""
        return sum(_count_changed(pair.old, pair.new) for pair in self.pairs)

    @property
    def dtype(self) -> str:
        """The element types of the tensors, by name."""
        return ", ".join(sorted({pair.dtype.name for pair in self.pairs}))


def chain_cases(chain: Chain) -> Iterator[Case]:
    """All single steps together, then the net change from the first version to the last."""
    versions = list(chain.versions())
    steps = [pair for old, new in pairwise(versions) for pair in _pairs(chain, old, new)]
    yield Case(f"chain, {chain.n_steps} single steps", CHAIN, tuple(steps))
    merged = _pairs(chain, versions[0], versions[-1])
    yield Case(f"chain, {chain.n_steps} steps merged", CHAIN, merged)


def generated_cases(n_elements: int) -> Iterator[Case]:
    """BF16 over all densities, then the other element types at one density."""
    for density in DENSITIES:
        yield generated_case(n_elements, "BF16", density)
    for name in OTHER_DTYPES:
        yield generated_case(n_elements, name, SPEED_DENSITY)


def generated_case(n_elements: int, dtype: str, density: float, group: str = GENERATED) -> Case:
    """One generated tensor."""
    name = f"{dtype} {density * 100:g} %" + (", large" if group == SPEED else "")
    return Case(name, group, (generate_pair(n_elements, dtype_named(dtype), density, SEED),))


def _pairs(chain: Chain, old: dict[str, Bits], new: dict[str, Bits]) -> tuple[Pair, ...]:
    return tuple(
        Pair(
            old[tensor.spec.name],
            new[tensor.spec.name],
            tensor.spec.dtype,
            _count_changed(old[tensor.spec.name], new[tensor.spec.name])
            / max(tensor.spec.n_elements, 1),
        )
        for tensor in chain.tensors
    )


def _count_changed(old: Bits, new: Bits) -> int:
    return int(np.count_nonzero(old != new))
