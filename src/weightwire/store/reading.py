"""Reading an object that is known by length and SHA-256, and believing nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Executor

from weightwire.errors import HashMismatch, TruncatedFile
from weightwire.store.contract import ObjectStore

READ_PART_BYTES = 8 << 20
"""Larger objects are read in parts of this size: one connection rarely fills a link."""


def read_checked(
    store: ObjectStore,
    key: str,
    n_bytes: int,
    sha256: str,
    *,
    executor: Executor | None = None,
    part_bytes: int = READ_PART_BYTES,
) -> bytes:
    """The bytes of an object, proven to be the ones a record names.

    Never more than one byte beyond ``n_bytes`` is asked for, so an object that is longer than
    promised costs nothing.

    Args:
        sha256: 64 hex digits.
        executor: reads parts side by side; without one they are read in turn.

    Raises:
        TruncatedFile: shorter than ``n_bytes``.
        HashMismatch: longer, or other bytes.
        ObjectMissing, StoreUnavailable, StoreRefused: from the store.
    """
    digest = hashlib.sha256()
    parts = []
    for (start, stop), part in _read_parts(store, key, _ranges(n_bytes, part_bytes), executor):
        _check_length(key, part, min(stop, n_bytes) - start)
        digest.update(part)
        parts.append(part)
    if digest.hexdigest() != sha256:
        found = digest.hexdigest()
        raise HashMismatch(f"{key}: SHA-256 {found[:16]}…, not {sha256[:16]}…; read it again")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _ranges(n_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Where each part starts and stops; the last one reaches a byte beyond the end."""
    starts = list(range(0, max(n_bytes, 1), part_bytes))
    return list(zip(starts, [*starts[1:], n_bytes + 1], strict=True))


def _read_parts(
    store: ObjectStore, key: str, ranges: list[tuple[int, int]], executor: Executor | None
) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Each range with its bytes, in order; reads that are no longer wanted are called off."""
    if executor is None or len(ranges) == 1:
        yield from ((each, store.read(key, *each)) for each in ranges)
        return
    futures = [executor.submit(store.read, key, *each) for each in ranges]
    try:
        yield from ((each, future.result()) for each, future in zip(ranges, futures, strict=True))
    finally:
        for future in futures:
            future.cancel()


def _check_length(key: str, part: bytes, n_expected: int) -> None:
    """Whether a part is as long as the record says.

    Raises:
        TruncatedFile, HashMismatch: it is not.
    """
    if len(part) < n_expected:
        raise TruncatedFile(
            f"{key}: {len(part)} bytes where {n_expected} should be; the object ends early,"
            " or the read did: read it again"
        )
    if len(part) > n_expected:
        raise HashMismatch(f"{key}: longer than its record says; read it again")
