"""Ranks over torch.distributed: two gloo groups of its own, whatever backend training uses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from weightwire.errors import RankLost, StopError

DEFAULT_TIMEOUT = timedelta(hours=6)
"""How long to wait for a rank that neither answers nor dies: longer than any first upload."""
T = TypeVar("T")


class TorchRanks:
    """Implements ``Ranks``; made on every rank at the same time."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        """Use the ranks of ``group``, or all of them.

        Raises:
            StopError: torch.distributed was not initialised.
            RankLost: a rank is gone.
        """
        if not dist.is_initialized():
            raise StopError("call torch.distributed.init_process_group before publishing shards")
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.n_ranks = dist.get_rank(group), len(self._members)
        # Two, because anchors are collected in one thread while another makes the next version.
        make = lambda: dist.new_group(self._members, timeout=timeout, backend="gloo")  # noqa: E731
        self._messages, self._pieces = _typed(make), _typed(make)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value on rank 0.

        Raises:
            RankLost: a rank is gone.
        """
        found: list[Any] | None = [None] * self.n_ranks if self.rank == 0 else None
        _typed(lambda: dist.gather_object(value, found, dst=self._members[0], group=self._messages))
        return found or []

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value.

        Raises:
            RankLost: a rank is gone.
        """
        box = [value]
        _typed(lambda: dist.broadcast_object_list(box, src=self._members[0], group=self._messages))
        return box[0]

    def send(self, to: int, data: bytes) -> None:
        """Give bytes to one rank.

        Raises:
            RankLost: a rank is gone.
        """
        size = torch.tensor([len(data)])
        _typed(lambda: dist.send(size, self._members[to], group=self._pieces))
        if data:
            body = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
            _typed(lambda: dist.send(body, self._members[to], group=self._pieces))

    def receive(self, source: int) -> bytes:
        """The next bytes of one rank.

        Raises:
            RankLost: a rank is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        _typed(lambda: dist.recv(size, self._members[source], group=self._pieces))
        body = np.empty(int(size), np.uint8)
        if body.size:
            into = torch.from_numpy(body)
            _typed(lambda: dist.recv(into, self._members[source], group=self._pieces))
        return body.tobytes()


def _typed(call: Callable[[], T]) -> T:
    try:
        return call()
    except (RuntimeError, ValueError) as error:  # what torch raises when a peer is gone
        raise RankLost(f"a rank of the trainer is gone or silent: {error}") from error
