"""Walking a plan: fetch, decode, prove; and when a step turns out bad, another way.

Damaged bytes are fetched again. If that does not help, the step is avoided and the next cheapest
way is taken; where the state at hand is at fault, the only way left is an anchor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from weightwire.apply.needs import Needs
from weightwire.apply.staging import Staging
from weightwire.checkpoint import Checkpoint
from weightwire.diff.state import StateReader, StateView
from weightwire.digest import TensorDigest, digest_state
from weightwire.errors import (
    BaseMismatch,
    CutElsewhere,
    DiskTrouble,
    MissingTensor,
    ResyncError,
    RetryError,
    StoreUnavailable,
    TargetMismatch,
    UnsupportedVersion,
)
from weightwire.model import TensorSpec
from weightwire.store.cache import Cache
from weightwire.store.fetch import Fetcher
from weightwire.store.history import History
from weightwire.store.plan import Held, Plan, Step, plan

log = logging.getLogger("weightwire.store")

Progress = Callable[[int], None]

FindNeeds = Callable[[Mapping[str, TensorSpec], Mapping[str, str]], Needs]
"""Given a run's tensors and aliases: which elements a receiver keeps."""


@dataclass(frozen=True)
class Start:
    """A proven state to start from."""

    held: Held
    state: StateReader
    digests: Mapping[str, TensorDigest]


@dataclass
class Reached:
    """A version, decoded and proven, and not yet written anywhere."""

    step: Step
    plan: Plan
    staging: Staging
    folder: Path | None = None
    """Where the anchor's files are, if it started from one."""
    n_detours: int = 0
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def is_whole(self) -> bool:
        """It started from an anchor: all tensors must be written, not only what changed."""
        return self.folder is not None

    def close(self) -> None:
        """Let go of open files."""
        self.resources.close()


def reach(
    history: History,
    start: Start | None,
    target: int,
    fetcher: Fetcher,
    cache: Cache,
    progress: Progress = lambda _: None,
    *,
    bad: set[str] | None = None,
    on_bad_start: Callable[[], None] = lambda: None,
    needs: FindNeeds | None = None,
) -> Reached:
    """Get to a version by the cheapest way that works.

    ``bad`` collects folders that turned out damaged; ``on_bad_start`` is told when it is the
    state we started from that is not what it should be; ``needs`` tells what a receiver that does
    not keep whole tensors keeps.

    Raises:
        NoWay: every way was tried.
        StoreUnavailable, DiskTrouble: not a way's fault; try again later.
        UnsupportedVersion: the run was written by a newer release.
    """
    bad = set() if bad is None else bad
    twice: set[str] = set()
    is_widened = False
    while True:
        held = start.held if start else None
        chosen = plan(history, held, target, avoid=bad, at_hand=cache.at_hand())
        walk = _Walk(chosen, start, fetcher, progress, needs)
        try:
            reached = walk.go()
        except (StoreUnavailable, DiskTrouble, UnsupportedVersion):
            raise
        except (RetryError, ResyncError) as error:
            log.warning("version %d cannot be had this way: %s", target, error)
            if isinstance(error, CutElsewhere) and not is_widened:
                # Nobody's fault: the anchor has what the receiver does not keep.
                start, is_widened = None, True
                continue
            if walk.blames_start(error):
                on_bad_start()
                start = None
                continue
            folder = walk.at.folder if walk.at else ""
            # What was kept on disk may be at fault, not what is in the store.
            was_kept = folder in cache.at_hand() and folder not in twice
            cache.discard(folder)
            (twice if was_kept else bad).add(folder)
        else:
            reached.n_detours = len(bad) + len(twice)
            return reached


class _Walk:
    """One attempt at one plan; remembers the step it is at, for blame."""

    def __init__(
        self,
        chosen: Plan,
        start: Start | None,
        fetcher: Fetcher,
        progress: Progress,
        needs: FindNeeds | None,
    ) -> None:
        self._plan, self._start, self._needs = chosen, start, needs
        self._fetcher, self._progress = fetcher, progress
        self.at: Step | None = None

    def go(self) -> Reached:
        with ExitStack() as stack:
            anchor = self._plan.anchor
            folder = None
            if anchor is not None:
                staging, folder = self._begin_anew(anchor, stack)
            elif self._start is not None:
                staging = Staging(self._start.state, self._start.digests)
            else:
                raise BaseMismatch("a plan without an anchor needs a state to start from")
            for step in self._plan.patches:
                self._take(step, staging)
            last = self._plan.steps[-1]
            return Reached(
                last,
                self._plan,
                staging,
                folder=folder,
                resources=stack.pop_all(),
            )

    def blames_start(self, error: Exception) -> bool:
        """Whether it is the state we started from that is not what it should be."""
        if self._plan.anchor is not None or not self._plan.patches:
            return False
        first = self.at is self._plan.patches[0]
        return first and isinstance(error, BaseMismatch | MissingTensor)

    def _begin_anew(self, step: Step, stack: ExitStack) -> tuple[Staging, Path]:
        self.at = step
        folder, manifest = self._fetcher.anchor(step, self._progress)
        files = stack.enter_context(Checkpoint.open(folder))
        state = StateView(files, files.specs, manifest.ties)
        digest, digests = digest_state(state)
        if digest != step.digest:
            raise TargetMismatch(f"{step.folder}: its bits have digest {digest}, not {step.digest}")
        needs = self._needs(state.specs, state.ties) if self._needs else None
        return Staging(state, digests, needs), folder

    def _take(self, step: Step, staging: Staging) -> None:
        self.at = step
        patch = self._fetcher.patch(step)
        staging.take(patch)
        self._fetcher.keep(step, patch)
        self._progress(step.n_bytes)
