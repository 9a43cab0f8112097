"""What a whole server says of itself: all its ranks, and how long it had to pause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightwire.engines.remote.status import RankStatus
from weightwire.errors import EngineRefused

Mode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight: go on with the new weights, end first, or end at once."""


@dataclass(frozen=True)
class Pause:
    """One activation, as the server's users felt it."""

    version: int
    n_ranks: int
    total_s: float
    """From asking for the pause until the server ran again: nothing was generated for so long."""
    drain_s: float
    """Of that, until no further step was begun."""
    activate_s: float
    """Of that, overwriting weights, on the slowest rank."""
    stage_s: float
    """Before the pause, on the slowest rank."""
    n_bytes: int
    """Downloaded, by all ranks."""
    n_changed: int
    """Elements overwritten, on all ranks."""


@dataclass(frozen=True)
class ServerStatus:
    """All ranks of a server."""

    ranks: tuple[RankStatus, ...]

    @property
    def version(self) -> int:
        """What every rank holds, whole; -1 if they do not agree."""
        versions = {rank.version if rank.is_sound else -1 for rank in self.ranks}
        return versions.pop() if len(versions) == 1 else -1

    @property
    def is_mixture(self) -> bool:
        """Whether ranks hold different versions, or one holds none whole."""
        held = {(rank.version, rank.digest) for rank in self.ranks}
        return len(held) > 1 or any(rank.is_dirty for rank in self.ranks)

    @property
    def newest(self) -> int:
        """The newest version that every rank has seen in the store."""
        return min(rank.newest for rank in self.ranks)

    @property
    def n_replicas(self) -> int:
        """Engines that step together, each with a copy of the model."""
        return max(rank.n_replicas for rank in self.ranks)

    def has_polled_since(self, before: ServerStatus) -> bool:
        """Whether every rank has looked into the store since."""
        pairs = zip(self.ranks, before.ranks, strict=True)
        return all(now.n_polls > then.n_polls for now, then in pairs)

    def is_ready(self, version: int) -> bool:
        """Whether every rank can activate this version, or holds it."""
        return all(
            rank.staged == version or (rank.version == version and rank.is_sound)
            for rank in self.ranks
        )

    @property
    def is_checking(self) -> bool:
        """Whether a rank still reads back what it wrote."""
        return any(rank.state == "checking" for rank in self.ranks)

    @property
    def is_left_over(self) -> bool:
        """Whether a client of ours paused the server and did not resume it."""
        return any(rank.session and not rank.session.was_paused for rank in self.ranks)

    @property
    def held(self) -> str:
        """For people: what each rank holds."""
        marks = {True: " and dirty", False: ""}
        return ", ".join(
            f"rank {rank.rank}: version {rank.version}{marks[rank.is_dirty]}" for rank in self.ranks
        )

    def require_done(self) -> None:
        """Refuse to go on unless every rank did what it was asked.

        Raises:
            WeightwireError: of the first rank that did not.
        """
        for rank in self.ranks:
            if rank.refused is not None:
                raise rank.refused.as_error()

    def require_sound(self) -> None:
        """Refuse to go on where a rank ran into something.

        Raises:
            WeightwireError: the first rank's.
        """
        for rank in self.ranks:
            if rank.failure is not None:
                raise rank.failure.as_error()

    def require_possible(self, version: int) -> None:
        """Stop waiting for what will not come.

        Raises:
            WeightwireError: what a rank ran into.
            EngineRefused: a rank holds a newer version.
        """
        self.require_sound()
        for rank in self.ranks:
            if rank.version > version and rank.is_sound:
                raise EngineRefused(
                    f"rank {rank.rank} holds version {rank.version}: versions only go forward"
                )


def pause_of(
    version: int, status: ServerStatus, began: float, drained: float, ended: float
) -> Pause:
    """What an activation cost, from the client's clock and the ranks' own."""
    ranks = status.ranks
    return Pause(
        version=version,
        n_ranks=len(ranks),
        total_s=ended - began,
        drain_s=drained - began,
        activate_s=max(rank.activate_s for rank in ranks),
        stage_s=max(rank.stage_s for rank in ranks),
        n_bytes=sum(rank.n_bytes for rank in ranks),
        n_changed=sum(rank.n_changed for rank in ranks),
    )
