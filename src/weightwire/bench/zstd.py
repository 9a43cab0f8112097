"""Zstandard at level 1, as the published systems use it, with one context per thread."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weightwire.errors import StopError

Part: TypeAlias = npt.NDArray[np.uint8]
"""Bytes of a patch, without a copy."""


class _Contexts(threading.local):
    """Contexts are costly to make and must not be shared by threads that run at once."""

    def __init__(self, zstandard: Any) -> None:
        self._zstandard = zstandard
        self._compressors: dict[int, Any] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def compressor(self, n_threads: int) -> Any:
        """At one thread, zstd works on the caller's instead of waiting for one of its own."""
        if n_threads not in self._compressors:
            n_workers = n_threads if n_threads > 1 else 0
            made = self._zstandard.ZstdCompressor(level=1, threads=n_workers)
            self._compressors[n_threads] = made
        return self._compressors[n_threads]


def compress(array: npt.NDArray[Any], n_threads: int = 1) -> Part:
    """The array's bytes as one frame.

    Raises:
        StopError: the ``zstandard`` package is not installed.
    """
    return np.frombuffer(_contexts().compressor(n_threads).compress(array), np.uint8)


def decompress(part: Part) -> Part:
    """What ``compress`` was given, as bytes.

    Raises:
        StopError: the ``zstandard`` package is not installed.
    """
    return np.frombuffer(_contexts().decompressor.decompress(part), np.uint8)


@cache
def _contexts() -> _Contexts:
    try:
        import zstandard
    except ImportError as error:
        message = "the published encodings need zstandard: pip install 'weightwire[bench]'"
        raise StopError(message) from error
    return _Contexts(zstandard)
