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
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


def compress(array: npt.NDArray[Any]) -> Part:
    """The array's bytes as one frame.

    Raises:
        StopError: the ``zstandard`` package is not installed.
    """
    return np.frombuffer(_contexts().compressor.compress(array), np.uint8)


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
