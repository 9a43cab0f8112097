"""A state that goes by once: pairs of name and tensor, each gathered, given and freed.

A diff wants to know all names before it reads the first tensor. From the second time on they are known,
and the stream is compared as it passes, with a few tensors in memory: the one that is compared, the one
that waits, the one that is gathered. The first time it goes through a temporary file.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightwire.diff.views import torch_bits, torch_element_type, torch_type
from weightwire.durable import typed_disk_errors
from weightwire.errors import DuplicateTensor, StateMoved
from weightwire.model import Bits, DType, TensorSpec

_LOOK_S = 0.1
"""How soon a feeder notices that nobody reads any more."""


@dataclass(frozen=True)
class Streamed:
    """One tensor that came by, as it is to be published."""

    spec: TensorSpec
    bits: Bits


def as_streamed(name: str, tensor: Any, dtype: DType | None) -> Streamed:
    """Round a tensor on its own device, then bring it to the CPU; floats narrower than ``dtype`` stay.

    Raises:
        UnsupportedDType: Weightwire has no code for its type.
    """
    own = torch_element_type(name, tensor.dtype)
    is_wide = dtype is not None and own.ordered and own.n_bytes >= dtype.n_bytes
    target = dtype if dtype is not None and is_wide else own
    flat = tensor.detach().to(torch_type(target)).cpu().reshape(-1)
    return Streamed(TensorSpec(name, target, tuple(tensor.shape)), torch_bits(flat, target))


class SpooledState:
    """Implements ``StateReader`` over a temporary file: for a stream of which nothing is known yet."""

    def __init__(self, stream: Iterable[Streamed]) -> None:
        """Take the whole stream.

        Raises:
            DiskTrouble: there is no room for it.
            DuplicateTensor: one name came twice.
        """
        self._file = tempfile.TemporaryFile(prefix="weightwire-spool-")  # noqa: SIM115 (see close)
        self._specs: dict[str, TensorSpec] = {}
        self._offsets: dict[str, int] = {}
        try:
            self._take(stream)
        except BaseException:
            self._file.close()
            raise

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, in the stream's order."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """None: a stream gives tied tensors once."""
        return {}

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A copy from the file."""
        dtype = self._specs[name].dtype
        offset = self._offsets[name] + start * dtype.n_bytes
        raw = os.pread(self._file.fileno(), (stop - start) * dtype.n_bytes, offset)
        return np.frombuffer(raw, dtype.bits_dtype)

    def close(self) -> None:
        """The file is gone with it."""
        self._file.close()

    def _take(self, stream: Iterable[Streamed]) -> None:
        with typed_disk_errors(Path(tempfile.gettempdir())):
            for each in stream:
                self._add(each)
            self._file.flush()

    def _add(self, each: Streamed) -> None:
        if each.spec.name in self._specs:
            raise DuplicateTensor(f"{each.spec.name!r} came twice in one stream of weights")
        self._offsets[each.spec.name] = self._file.tell()
        self._specs[each.spec.name] = each.spec
        self._file.write(each.bits.view(np.uint8).data)


class PassingState:
    """Implements ``StateReader`` over a stream whose names are known: read as it passes, once.

    One thread feeds, another reads; the reader must ask for tensors in the stream's order.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._passing: queue.Queue[Streamed | BaseException] = queue.Queue(1)
        self._now: Streamed | None = None
        self._broken: BaseException | None = None
        self._is_abandoned = threading.Event()
        self.has_more = False
        """The stream went on when all known tensors had been read."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, in the stream's order."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """None: a stream gives tied tensors once."""
        return {}

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A part of the tensor that passes now; waits for it to come.

        Raises:
            StateMoved: it is not the one that comes, or it has passed already.
        """
        if self._now is None or self._now.spec.name != name:
            self._now = None  # freed before the next one is waited for
            self._now = self._next(self._specs[name])
        return self._now.bits[start:stop]

    def feed(self, stream: Iterable[Streamed]) -> None:
        """Pass the stream, to its end or until nobody reads any more.

        Raises:
            whatever the stream raises; the reader is told.
        """
        try:
            for each in stream:
                if not self._pass(each):
                    self.has_more = True
                    return
        except BaseException as error:
            self._pass(error)
            raise
        self._pass(StateMoved("the stream of weights ended before all tensors had come"))

    def abandon(self) -> None:
        """Nobody will read any more."""
        self._is_abandoned.set()

    def _pass(self, each: Streamed | BaseException) -> bool:
        while not self._is_abandoned.is_set():
            try:
                self._passing.put(each, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False

    def _next(self, wanted: TensorSpec) -> Streamed:
        """The reader may have asked for several tensors by now: after an error, none is waited for."""
        each = self._broken or self._passing.get()
        if isinstance(each, Streamed) and each.spec == wanted:
            return each
        self._broken = each if isinstance(each, BaseException) else _unexpected(each, wanted)
        raise StateMoved(f"tensor {wanted.name!r} did not come: {self._broken}") from self._broken


def _unexpected(found: Streamed, wanted: TensorSpec) -> StateMoved:
    return StateMoved(
        f"{found.spec.name!r} {found.spec.shape} came where {wanted.name!r} {wanted.shape} was"
        " expected: the stream's names have changed; the next sync learns them anew"
    )


def streamed(
    pairs: Iterable[tuple[str, Any]],
    pieces: Callable[[str, Any], Iterable[tuple[str, Any]]],
    dtype_of: Callable[[str], DType | None],
) -> Iterator[Streamed]:
    """A trainer's pairs as the tensors of a checkpoint, one at a time."""
    for name, tensor in pairs:
        for part_name, part in pieces(name, tensor):
            yield as_streamed(part_name, part, dtype_of(part_name))
