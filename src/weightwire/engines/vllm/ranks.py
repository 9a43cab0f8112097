"""All ranks of a server, or none: what one of them cannot do, no other does.

A worker that raises in a remote call leaves the other workers' answers unread in vLLM's
multi-process executor, and every later call then gets the answer to an earlier one: the server is
lost. Only the *last* rank may raise, because its answer is the last that is read. So the ranks
tell each other what went wrong, and the last one says it for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from weightwire.engines.remote.failures import Failure, failure_of
from weightwire.errors import WeightwireError

log = logging.getLogger("weightwire.vllm")

Value = TypeVar("Value")


class Ranks(Protocol):
    """The workers that serve one copy of the model together."""

    @property
    def rank(self) -> int:
        """This one's number."""

    @property
    def n_ranks(self) -> int:
        """How many there are."""

    def gather(self, value: Value) -> list[Value]:
        """Everyone's value, by rank; all ranks must call it."""


class OneRank:
    """A server of one worker."""

    rank, n_ranks = 0, 1

    def gather(self, value: Value) -> list[Value]:
        """Its own."""
        return [value]


class VllmRanks:
    """The workers of a tensor-parallel server, over vLLM's own CPU process group."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_world_group

        self._group = get_world_group()
        self.rank: int = self._group.rank_in_group
        self.n_ranks: int = self._group.world_size

    def gather(self, value: Value) -> list[Value]:
        """One small message to each; about a millisecond on one host."""
        if self.n_ranks == 1:
            return [value]
        from torch.distributed import all_gather_object

        found = [value] * self.n_ranks
        all_gather_object(found, value, group=self._group.cpu_group)
        return found


def together(ranks: Ranks, work: Callable[[], object]) -> Failure | None:
    """Do the work on every rank; what went wrong first, if anything did. All ranks must call it."""
    failures = ranks.gather(_attempt(work))
    for rank, failure in enumerate(failures):
        if failure is not None and ranks.n_ranks > 1:
            return Failure(failure.kind, f"rank {rank}: {failure.message}")
    return failures[0]


def _attempt(work: Callable[[], object]) -> Failure | None:
    """What went wrong, if anything; never raises, because the other ranks wait to hear of it."""
    try:
        work()
    except Exception as error:
        log.warning("not done: %s", error, exc_info=not isinstance(error, WeightwireError))
        return failure_of(error)
    return None
