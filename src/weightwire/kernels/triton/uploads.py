"""From the host to a device: small tables in one copy, and payloads joined while they are sent.

Page-locked memory is torch's own: it keeps what was let go, and lends it again once the copies out
of it are done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightwire.kernels import native_module
from weightwire.kernels.devices import on_stream, once
from weightwire.kernels.triton.downloads import stream_named

_TABLE_BYTES = 16
"""Tables in one memory begin at multiples of this."""

_PADS = [np.zeros(n, dtype=np.uint8) for n in range(_TABLE_BYTES)]

_TORCH = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
}

_RUN_BYTES = 64 << 20
"""Joined at a time: what is joined travels while the next is being joined."""

_MAX_THREADS = 8
"""More do not copy faster."""


def send_tables(tables: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Flat tables, in one copy that is not waited for."""
    if device.type == "cpu":
        return [torch.from_numpy(table) for table in tables]
    parts: list[npt.NDArray[np.uint8]] = []
    for table in tables:
        parts += [table.view(np.uint8), _PADS[-table.nbytes % _TABLE_BYTES]]
    sizes = list(map(len, parts))
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    np.concatenate(parts, out=packed.numpy())
    sent = packed.to(device, non_blocking=True).split(sizes)[::2]
    return [part.view(_TORCH[table.dtype]) for part, table in zip(sent, tables, strict=True)]


class Sending:
    """A payload on its way, beside what anyone else does in the meantime."""

    def __init__(self, parts: Sequence[npt.NDArray[np.uint8]], device: torch.device) -> None:
        """Begin to join parts, and to copy what is joined; they stay as they are until it arrived."""
        n_bytes = sum(map(len, parts))
        # Never empty: a kernel may look at the first word of nothing.
        self._words = torch.empty(n_bytes // 4 + 1, dtype=torch.int32, device=device)
        self._sent: Future[None] | None = None
        if device.type == "cpu":
            self._memory = self._words.view(torch.uint8)
            join_parts(parts, self._memory[:n_bytes].numpy())
            return
        self._memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        # Should nobody ask for the words: their memory is not lent again before they are there.
        self._words.record_stream(stream)
        self._sent = _senders().submit(self._send, parts)

    def joined(self) -> npt.NDArray[np.uint8]:
        """All parts in the host's memory, and maybe more behind them; waits until they are there."""
        if self._sent is not None:
            self._sent.result()
        joined: npt.NDArray[np.uint8] = self._memory.numpy()
        return joined

    def arrived(self) -> torch.Tensor:
        """The words, for whatever the current stream is given to do from now on."""
        if self._sent is not None:
            self._sent.result()
            device = self._words.device
            torch.cuda.current_stream(device).wait_stream(_copy_stream(device))
        return self._words

    def _send(self, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
        to = self._words.view(torch.uint8)
        with on_stream(_copy_stream(self._words.device)):
            for first, run in _runs(parts):
                here = slice(first, first + sum(map(len, run)))
                join_parts(run, self._memory[here].numpy())
                to[here].copy_(self._memory[here], non_blocking=True)


@once
def _senders() -> ThreadPoolExecutor:
    """Few, since each has threads of its own that need nothing of Python."""
    return ThreadPoolExecutor(2, thread_name_prefix="weightwire-sender")


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Its own: what is sent and what comes back do not wait for each other."""
    return stream_named(device, "to device")


def _runs(
    parts: Sequence[npt.NDArray[np.uint8]],
) -> Iterator[tuple[int, list[npt.NDArray[np.uint8]]]]:
    """Parts to be joined together, with the place of the first one's first byte."""
    run: list[npt.NDArray[np.uint8]] = []
    first = n_bytes = 0
    for part in parts:
        run.append(part)
        n_bytes += len(part)
        if n_bytes >= _RUN_BYTES:
            yield first, run
            first, n_bytes, run = first + n_bytes, 0, []
    if run:
        yield first, run


def join_parts(parts: Sequence[npt.NDArray[np.uint8]], out: npt.NDArray[np.uint8]) -> None:
    """Copy parts into ``out``, one after the other; they fill it."""
    native = native_module()
    if native is None:
        np.concatenate([*parts, out[:0]], out=out)
        return
    native.join_parts(list(parts), out, min(len(os.sched_getaffinity(0)), _MAX_THREADS))
