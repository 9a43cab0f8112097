"""Room for changes: in memory up to a cap, beyond it in a temporary file that is mapped back."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import numpy as np
import numpy.typing as npt

from weightwire.durable import write_at
from weightwire.errors import DiskTrouble
from weightwire.model import Changes

SPILL_BYTES = 256 << 20
"""Changes kept in memory before the rest goes to disk: a model of any size fits beside it."""

_Array = npt.NDArray[np.unsignedinteger]


class Spill:
    """Takes changes and gives them back, in memory or mapped; the file has no name and dies with us."""

    def __init__(self, max_bytes: int = SPILL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._file: int | None = None
        self.n_bytes = 0
        """In memory."""
        self.n_file_bytes = 0
        """In the file; it only grows."""

    def keep(self, changes: Changes) -> Changes:
        """The same changes, possibly at another place.

        Raises:
            DiskTrouble: there is no room for them in the temporary folder.
        """
        if self._has_room(changes.n_bytes):
            return changes
        return Changes(self._mapped(changes.positions), self._mapped(changes.bits))

    def keep_array(self, array: _Array) -> _Array:
        """The same for an array by itself, such as coded changes.

        Raises:
            DiskTrouble: as ``keep``.
        """
        return array if self._has_room(array.nbytes) else self._mapped(array)

    def release(self, changes: Changes) -> None:
        """Changes that ``keep`` was given, and gave back as they were, are needed no more."""
        self.n_bytes -= changes.n_bytes

    def _has_room(self, n_bytes: int) -> bool:
        if n_bytes and self.n_bytes + n_bytes > self._max_bytes:
            return False
        self.n_bytes += n_bytes
        return True

    def _mapped(self, array: _Array) -> _Array:
        try:
            return self._write(array)
        except OSError as error:
            raise DiskTrouble(f"no room for changes in {tempfile.gettempdir()}: {error}") from error

    def _write(self, array: _Array) -> _Array:
        file, start = self._open(), self.n_file_bytes
        data = np.ascontiguousarray(array).view(np.uint8).data
        write_at(file, data, start)
        # Maps begin at whole pages.
        n_pages = -(-data.nbytes // mmap.ALLOCATIONGRANULARITY)
        self.n_file_bytes += n_pages * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file, data.nbytes, access=mmap.ACCESS_READ, offset=start)
        return np.frombuffer(mapped, array.dtype)

    def _open(self) -> int:
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix="weightwire-spill-")
            os.unlink(path)  # noqa: PTH108
            weakref.finalize(self, os.close, self._file)
        return self._file
