"""Ranks that are threads of one process: for tests, and for losing one on purpose."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from weightwire.errors import RankLost

_LOOK_S = 0.01
T = TypeVar("T")


class _World:
    """The mail between ranks, and who is gone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: defaultdict[tuple[str, int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
        self.lost = threading.Event()

    def box(self, kind: str, source: int, to: int) -> queue.Queue[bytes]:
        with self.lock:
            return self.boxes[kind, source, to]

    def take(self, kind: str, source: int, to: int) -> bytes:
        box = self.box(kind, source, to)
        while True:
            try:
                return box.get(timeout=_LOOK_S)
            except queue.Empty:
                if self.lost.is_set():
                    raise RankLost("a rank is gone") from None


class ThreadRanks:
    """Implements ``Ranks`` among threads; messages are copied, as between processes."""

    def __init__(self, rank: int, n_ranks: int, world: _World) -> None:
        self.rank, self.n_ranks, self._world = rank, n_ranks, world

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value on rank 0.

        Raises:
            RankLost: a rank is gone.
        """
        self._put("gather", 0, pickle.dumps(value))
        if self.rank:
            return []
        return [pickle.loads(self._take("gather", rank)) for rank in range(self.n_ranks)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value.

        Raises:
            RankLost: a rank is gone.
        """
        for rank in range(self.n_ranks) if self.rank == 0 else ():
            self._put("broadcast", rank, pickle.dumps(value))
        return pickle.loads(self._take("broadcast", 0))

    def send(self, to: int, data: bytes) -> None:
        """Give bytes to one rank.

        Raises:
            RankLost: a rank is gone.
        """
        self._put("piece", to, bytes(data))

    def receive(self, source: int) -> bytes:
        """The next bytes of one rank.

        Raises:
            RankLost: a rank is gone.
        """
        return self._take("piece", source)

    def die(self) -> None:
        """Be gone: the others notice."""
        self._world.lost.set()

    def _put(self, kind: str, to: int, data: bytes) -> None:
        if self._world.lost.is_set():
            raise RankLost("a rank is gone")
        self._world.box(kind, self.rank, to).put(data)

    def _take(self, kind: str, source: int) -> bytes:
        return self._world.take(kind, source, self.rank)


def on_ranks(n_ranks: int, work: Callable[[ThreadRanks], T]) -> list[T | BaseException]:
    """Run ``work`` on so many ranks at once; gives what each returned or raised.

    A rank that raises something that is not an ``Exception`` is dead, as if killed.
    """
    world = _World()
    results: list[Any] = [None] * n_ranks

    def run(ranks: ThreadRanks) -> None:
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:  # the result of the rank, whatever it is
            results[ranks.rank] = error
            if not isinstance(error, Exception):
                ranks.die()

    threads = [
        threading.Thread(target=run, args=(ThreadRanks(rank, n_ranks, world),))
        for rank in range(n_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
