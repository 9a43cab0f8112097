"""What the chain costs as real patch files: header, digests and index included."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightwire.bench.chain import Chain
from weightwire.bench.results import FileSize

_State: TypeAlias = dict[str, npt.NDArray[Any]]


def measure_files(chain: Chain) -> tuple[FileSize, ...]:
    """Save every single patch and the merged one, and add up their files."""
    import weightwire as ww

    states = list(_states(chain))
    singles = [ww.diff(old, new) for old, new in pairwise(states)]
    merged = ww.merge(states[0], *singles)
    n_single = sum(_count_changed(old, new) for old, new in pairwise(states))
    n_merged = _count_changed(states[0], states[-1])
    n_full = sum(array.nbytes for array in states[0].values())
    return (
        FileSize("single patches", len(singles), _saved(singles), n_single, n_full * len(singles)),
        FileSize("merged patch", 1, _saved([merged]), n_merged, n_full),
    )


def _states(chain: Chain) -> Iterable[_State]:
    shapes = {tensor.spec.name: tensor.spec.shape for tensor in chain.tensors}
    for version in chain.versions():
        yield {
            name: bits.view(ml_dtypes.bfloat16).reshape(shapes[name])
            for name, bits in version.items()
        }


def _count_changed(old: _State, new: _State) -> int:
    return sum(
        int(np.count_nonzero(old[name].view(np.uint16) != new[name].view(np.uint16)))
        for name in old
    )


def _saved(patches: Iterable[Any]) -> int:
    """Bytes of all files these patches are saved to."""
    with TemporaryDirectory(prefix="weightwire-bench-") as root:
        for index, patch in enumerate(patches):
            patch.save(Path(root) / f"patch-{index}")
        return sum(file.stat().st_size for file in Path(root).rglob("*") if file.is_file())
