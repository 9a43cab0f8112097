"""How the ranks of one trainer agree: everyone does its part, rank 0 decides, all learn the outcome.

Whatever goes wrong on one rank is known on every rank before anything is decided, so no rank can
move on alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from weightwire.errors import RankFailed, StopError, WeightwireError

T = TypeVar("T")
U = TypeVar("U")


class Ranks(Protocol):
    """The processes of one trainer, as a publisher sees them.

    Small messages go through ``gather`` and ``broadcast``, which every rank calls in the same
    order. Pieces of tensors go through ``send`` and ``receive``, from another thread at the same
    time: an anchor is collected while the next version is made. Every call raises ``RankLost``
    when a rank is gone.
    """

    rank: int
    n_ranks: int

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, in rank order, on rank 0; an empty list elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def send(self, to: int, data: bytes) -> None:
        """Give bytes to one rank."""

    def receive(self, source: int) -> bytes:
        """The next bytes one rank gives."""


@dataclass(frozen=True)
class _Answer:
    """What one rank has to say: its part, or why there is none."""

    part: Any
    error: WeightwireError | None


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 made of it."""

    value: Any
    error: WeightwireError | None


def agree(ranks: Ranks, work: Callable[[], T], decide: Callable[[list[T]], U]) -> U:
    """Do ``work`` on every rank, ``decide`` on rank 0 from all of it, and give that to everyone.

    Raises:
        RankFailed: some rank's work failed in a way that may be tried again; names the rank.
        StopError: … in a way that cannot, by its own class, with the rank's name.
        WeightwireError: what ``decide`` raised, on every rank alike.
        RankLost: a rank is gone.
    """
    part, cause = _attempt(work)
    error = None if cause is None else _named(ranks.rank, cause)
    answers: list[_Answer] = ranks.gather(_Answer(part, error))
    verdict: _Verdict = ranks.broadcast(_judge(answers, decide) if answers else None)
    if verdict.error is not None:
        raise verdict.error from cause
    return verdict.value  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the others wait: they must learn of it, whatever it is
        return None, error


def _judge(answers: list[_Answer], decide: Callable[[list[Any]], Any]) -> _Verdict:
    failures = [answer.error for answer in answers if answer.error is not None]
    if failures:
        # A rank whose error stops the run for good decides: trying again would only repeat it.
        fatal = [error for error in failures if isinstance(error, StopError)]
        return _Verdict(None, (fatal or failures)[0])
    try:
        return _Verdict(decide([answer.part for answer in answers]), None)
    except WeightwireError as error:
        return _Verdict(None, error)
    except Exception as error:  # the same: nobody may be left waiting
        return _Verdict(None, _named(0, error))


def _named(rank: int, error: Exception) -> WeightwireError:
    if isinstance(error, StopError):
        return type(error)(f"rank {rank}: {error}")
    return RankFailed(
        f"rank {rank}: {type(error).__name__}: {error}; nothing was published, the next publish"
        " covers everything"
    )
