"""Trust, but compare: what a receiver would decode, against the full state, bit for bit."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from weightwire.apply.staging import Staging
from weightwire.diff.state import StateReader
from weightwire.digest import piece_ranges
from weightwire.errors import TargetMismatch
from weightwire.model import TensorSpec
from weightwire.store.cache import Cache
from weightwire.store.contract import ObjectStore
from weightwire.store.fetch import Fetcher
from weightwire.store.plan import Step
from weightwire.store.records import Commit

_MAX_NAMED = 5


def compare_with_full(
    store: ObjectStore,
    record: Commit,
    base: StateReader,
    full: StateReader,
    executor: Executor | None = None,
) -> None:
    """Fetch a version's patch back, decode it over its base, and compare with the full state.

    Raises:
        TargetMismatch: says which tensors differ, how often, and where first.
        RetryError: the patch cannot be read back.
    """
    staging = Staging(base)
    if record.patch is not None:
        cache = Cache()
        try:
            step = Step(record.version, record.digest, patch=record.patch)
            staging.take(Fetcher(store, cache, executor).patch(step))
        finally:
            cache.close()
    differences = _differences(staging, full)
    if differences:
        more = f" and {len(differences) - _MAX_NAMED} more" if len(differences) > _MAX_NAMED else ""
        raise TargetMismatch(
            f"version {record.version} would not be the full state: "
            + "; ".join(differences[:_MAX_NAMED])
            + more
        )


def _differences(decoded: StateReader, full: StateReader) -> list[str]:
    found = [f"{name!r} is missing" for name in full.specs if name not in decoded.specs]
    found += [f"{name!r} should not be there" for name in decoded.specs if name not in full.specs]
    for name, spec in full.specs.items():
        if name in decoded.specs:
            found += _tensor_difference(decoded, full, spec)
    return found


def _tensor_difference(decoded: StateReader, full: StateReader, spec: TensorSpec) -> list[str]:
    if decoded.specs[spec.name] != spec:
        return [f"{spec.name!r} has another type or shape"]
    n_wrong, first = 0, ""
    for start, stop in piece_ranges(spec):
        one, other = decoded.read(spec.name, start, stop), full.read(spec.name, start, stop)
        wrong = np.flatnonzero(one != other)
        if len(wrong) and not n_wrong:
            at = int(wrong[0])
            first = f"first at {start + at}: {int(one[at]):#x} instead of {int(other[at]):#x}"
        n_wrong += len(wrong)
    return [f"{spec.name!r} differs in {n_wrong} elements, {first}"] if n_wrong else []
