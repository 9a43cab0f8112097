"""Positional reads that return every byte asked for, or say that the file is too short."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from weightwire.errors import TruncatedFile


def read_into(file_descriptor: int, buffer: npt.NDArray[np.uint8], offset: int, where: str) -> None:
    """Fill ``buffer`` from ``offset`` on.

    Never a memory map: a file that shrinks under a map kills the process with SIGBUS, and mapped
    pages count as resident. The descriptor's own position is not used, so threads may share it.

    Raises:
        TruncatedFile: the file ends before the buffer is full.
    """
    n_done = 0
    while n_done < buffer.size:
        n_read = os.preadv(file_descriptor, [buffer.data[n_done:]], offset + n_done)
        if n_read == 0:
            raise TruncatedFile(
                f"{where}: ends at byte {offset + n_done}, but bytes up to "
                f"{offset + buffer.size} are needed; fetch the file again"
            )
        n_done += n_read


def read_bytes(file_descriptor: int, n_bytes: int, offset: int, where: str) -> bytes:
    """The ``n_bytes`` bytes from ``offset`` on; the caller has checked ``n_bytes`` against a cap.

    Raises:
        TruncatedFile: the file ends before them.
    """
    buffer = np.empty(n_bytes, np.uint8)
    read_into(file_descriptor, buffer, offset, where)
    return buffer.tobytes()
